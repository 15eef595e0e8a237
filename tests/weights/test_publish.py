"""Pushing to the Hub: the folder loads again, here and elsewhere, and the card is true."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from weights.round_trips import noisy, same_bits

import vitkit
from vitkit import Checkpoint, CheckpointError, OutputError

SPEC = vitkit.ViTSpec(image_size=32, patch_size=8, width=64, depth=2, num_heads=2, mlp_width=96,
                      num_classes=3)  # fmt: skip
GREY = vitkit.Preprocess(
    image_size=32, mean=(0.1, 0.2, 0.3), fit="squash", interpolation="bilinear"
)


class LocalHub:
    """A hub that is a folder."""

    def __init__(self, place: Path) -> None:
        self.place, self.made, self.messages = place, [], []

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        if "/" not in repo_id:
            raise HFValidationError(f"not a name:\n{repo_id}")
        assert exist_ok
        self.made.append((repo_id, private))

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        shutil.copytree(folder_path, self.place / repo_id)
        self.messages.append(commit_message)


@pytest.fixture
def checkpoint() -> Checkpoint:
    metadata = {"licence": "Apache 2.0", "metrics": {"top1": 0.98765}, "recipe": {"epochs": 3},
                "data": {"fingerprint": "ab12"}}  # fmt: skip
    names = tuple(np.array(["ant", "bee", "cat"]))
    return Checkpoint(noisy(SPEC), GREY, names, metadata=metadata)


def test_a_pushed_folder_is_the_checkpoint(tmp_path, checkpoint):
    hub = LocalHub(tmp_path)
    assert checkpoint.push_to_hub("me/ants", private=True, hub=hub) == "hf://me/ants"
    assert (hub.made, hub.messages) == ([("me/ants", True)], ["Upload weights"])
    again = vitkit.load(tmp_path / "me/ants")
    same_bits(checkpoint.model.state_dict(), again.model.state_dict())
    assert (again.classes, again.preprocess) == (checkpoint.classes, checkpoint.preprocess)
    assert again.format == "huggingface"


def test_the_card_says_what_the_checkpoint_says(tmp_path, checkpoint):
    checkpoint.push_to_hub("me/ants", hub=LocalHub(tmp_path))
    card = ModelCard((tmp_path / "me/ants/README.md").read_text())
    assert card.data.to_dict() == {
        "license": "apache-2.0", "library_name": "transformers",
        "pipeline_tag": "image-classification", "tags": ["vitkit", "vision-transformer"],
    }  # fmt: skip
    for part in ("0.1 million parameters, 2 blocks of width 64", "32 x 32 pixels", "3 classes",
                 "squashed to 32 x 32 pixels (bilinear), divided by 255, mean 0.1, 0.2, 0.3",
                 "- bee", "- top1: 0.9877", "- epochs: 3", "- fingerprint: ab12",
                 'from_checkpoint("hf://me/ants")'):  # fmt: skip
        assert part in card.text, part
    assert "## Changes" not in card.text
    adapted = vitkit.adapt(checkpoint, num_classes=0)
    adapted.push_to_hub("me/bare", to="timm", hub=LocalHub(tmp_path))
    card = ModelCard((tmp_path / "me/bare/README.md").read_text())
    assert "top1" not in card.text, "measured with the head that is gone"
    assert (card.data.library_name, card.data.pipeline_tag) == ("timm", "image-feature-extraction")
    assert "is left out, so that the model returns features" in card.text
    assert "vitkit embed hf://me/bare" in card.text
    assert "Predictor" not in card.text
    assert json.loads((tmp_path / "me/bare/config.json").read_text())["num_classes"] == 0


@pytest.mark.parametrize(("norm_eps", "known"), [(1e-6, True), (1e-4, False)])
def test_the_card_shows_only_what_will_run(tmp_path, norm_eps, known):
    """No model of timm's registry takes an epsilon."""
    model = noisy(SPEC.replace(norm_eps=norm_eps))
    Checkpoint(model, GREY, ()).push_to_hub("me/x", to="timm", hub=LocalHub(tmp_path))
    assert ("import timm" in (tmp_path / "me/x/README.md").read_text()) == known
    document = json.loads((tmp_path / "me/x/config.json").read_text())
    assert ("architecture" in document) == known


@pytest.mark.parametrize(
    ("licence", "stated"),
    [("cc-by-nc-4.0", {"license": "cc-by-nc-4.0"}),
     ("dinov3-license", {"license": "other", "license_name": "dinov3-license"}),
     ("My Own Terms", {"license": "other", "license_name": "my-own-terms"}),
     ("[mine]", {"license": "other", "license_name": "[mine]"}),
     ("1.0", {"license": "other", "license_name": "1.0"})],
)  # fmt: skip
def test_a_licence_that_the_hub_does_not_list_has_a_name_of_its_own(tmp_path, licence, stated):
    named = Checkpoint(noisy(SPEC), GREY, ("a", "b", "c"), metadata={"licence": licence})
    named.push_to_hub("me/ants", hub=LocalHub(tmp_path))
    metadata = ModelCard((tmp_path / "me/ants/README.md").read_text()).data.to_dict()
    assert {key: metadata[key] for key in metadata if key.startswith("license")} == stated


def test_what_goes_wrong_is_one_line_and_nothing_is_left(tmp_path, checkpoint):
    with pytest.raises(OutputError, match=r"nameless: cannot be uploaded: not a name: nameless;"):
        checkpoint.push_to_hub("nameless", hub=LocalHub(tmp_path))
    attention = SPEC.replace(pooling="map", class_token=False)
    with pytest.raises(
        CheckpointError, match=r"^checkpoint: as huggingface: it cannot hold class_token = False"
    ):
        Checkpoint(noisy(attention), GREY, ()).push_to_hub("me/x", hub=LocalHub(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"--to \(to=\) .hugingface. is not a format; pass one"
    ):
        checkpoint.push_to_hub("me/x", to="hugingface", hub=LocalHub(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_hub_that_cannot_be_reached_is_one_line(checkpoint):
    """Its client raises the error of its HTTP library, which is no `OSError`."""

    class NoNetwork(LocalHub):
        def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
            raise HfHubHTTPError.__bases__[0]("Connection refused")

    with pytest.raises(OutputError, match=r"^me/ants: cannot be uploaded: Connection refused; log"):
        checkpoint.push_to_hub("me/ants", hub=NoNetwork(Path()))
