"""Runs that begin with trained weights: what is kept, adapted, replaced, frozen and refused."""

import numpy as np
import pytest
import safetensors.torch
import torch
from training.faulty import stopping_at
from training.starts import DIGITS, SHORT, a_checkpoint, bits, log_of, only_begun, train
from training.tiny_runs import last_state
from weights.hub_cache import empty, published
from weights.round_trips import noisy

import vitkit
from vitkit import Callback, CheckpointError, Interrupted, SettingError, SpecError, cli


def pixels(count: int, channels: int = 1) -> torch.Tensor:
    return torch.rand(count, channels, 8, 8, generator=torch.Generator().manual_seed(0))


def normalised(images: torch.Tensor, preprocess: vitkit.Preprocess) -> torch.Tensor:
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (preprocess.mean, preprocess.std))
    return (images - mean) / std


def test_the_head_is_kept_where_the_classes_are_the_same_by_name(tmp_path):
    shuffled = tuple("3145926087")
    stored = a_checkpoint(tmp_path / "a.safetensors", classes=shuffled)
    begun = only_begun(tmp_path / "run", pretrained=tmp_path / "a.safetensors")
    assert begun.classes == DIGITS
    assert begun.preprocess == stored.preprocess  # mean, std, filter and fit are the weights'
    images = normalised(pixels(5), stored.preprocess)
    order = [shuffled.index(name) for name in DIGITS]
    torch.testing.assert_close(begun.model(images), stored.model(images)[:, order])
    assert "the head is kept: its 10 classes are reordered to the data's order" in log_of(
        tmp_path / "run"
    )


@pytest.mark.parametrize("to", ["vitkit", "timm"])
def test_the_head_is_replaced_where_the_classes_differ_and_that_is_logged(tmp_path, to):
    place = tmp_path / "a.safetensors"
    stored = a_checkpoint(place, classes=tuple("abcdefg"), num_classes=7, seed=3)
    if to == "timm":
        vitkit.convert(place, tmp_path / "timm", to="timm")
        place = tmp_path / "timm"
    begun = only_begun(tmp_path / "run", pretrained=str(place))
    head = begun.model.head
    assert head.weight.abs().max() < 1e-9
    assert head.bias.abs().max() < 1e-9
    assert head.weight.shape == (10, 16)
    for name, weight in stored.model.state_dict().items():
        if not name.startswith("head"):
            torch.testing.assert_close(begun.model.state_dict()[name], weight)
    log = log_of(tmp_path / "run")
    assert "the head of 7 classes is replaced by one of 10; its initial weights are zero" in log
    assert begun.preprocess.mean == stored.preprocess.mean
    about = begun.metadata["started_from"]
    assert about["place"] == str(place)
    assert about["format"] == to
    assert about["sha256"][:16] in log


def test_the_tanh_layer_of_pretraining_goes_with_the_head(tmp_path):
    a_checkpoint(tmp_path / "a.safetensors", num_classes=4, representation_width=8)
    begun = only_begun(tmp_path / "run", pretrained=tmp_path / "a.safetensors")
    assert begun.model.spec.representation_width is None
    assert "without the tanh layer; its initial weights are zero" in log_of(tmp_path / "run")


def test_another_size_resamples_positions_and_says_so(tmp_path):
    stored = a_checkpoint(tmp_path / "a.safetensors", classes=DIGITS)
    begun = only_begun(tmp_path / "run", pretrained=tmp_path / "a.safetensors", img_size=16)
    assert begun.preprocess.image_size == begun.model.spec.image_size == (16, 16)
    wanted = vitkit.adapt(stored, image_size=16)
    torch.testing.assert_close(begun.model.pos_embed, wanted.model.pos_embed)
    assert "pos_embed: 2 x 2 -> 4 x 4 by bicubic" in log_of(tmp_path / "run")


def test_other_channels_and_another_mean_give_the_same_tokens(tmp_path):
    stored = a_checkpoint(tmp_path / "a.safetensors", classes=DIGITS, in_channels=3)
    begun = only_begun(
        tmp_path / "run", pretrained=tmp_path / "a.safetensors", spec={"in_channels": 1},
        mean=(0.5,), std=(0.5,),
    )  # fmt: skip
    grey = pixels(4)
    ours = begun.model(normalised(grey, begun.preprocess))
    theirs = stored.model(normalised(grey.expand(-1, 3, -1, -1), stored.preprocess))
    assert begun.preprocess.mean == (0.5,)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_run_goes_on_with_the_same_bits_when_the_file_is_gone(tmp_path):
    place = tmp_path / "a.safetensors"
    a_checkpoint(place, classes=DIGITS)
    settings = {"pretrained": str(place), "freeze_blocks": 1, "spec": {"mlp_dropout": 0.2}}
    straight = train(tmp_path / "straight", **settings)
    with pytest.raises(Interrupted):
        train(tmp_path / "run", stopping_at(7), **settings)
    place.unlink()
    resumed = train(tmp_path / "run", resume=str(tmp_path / "run"))
    assert bits(resumed.last) == bits(straight.last)
    assert bits(resumed.best) == bits(straight.best)
    assert vitkit.load(resumed.last).metadata["started_from"]["place"] == str(place)
    again = SHORT | settings | {"resume": str(tmp_path / "run")}  # all settings given once more
    assert vitkit.train("digits", **again).last == resumed.last
    with pytest.raises(SettingError, match=r"pretrained: .*a.safetensors -> other"):
        train(tmp_path / "run", resume=str(tmp_path / "run"), pretrained="other")


def test_settings_with_a_start_want_the_very_same_weights_afresh(tmp_path):
    place = tmp_path / "a.safetensors"
    a_checkpoint(place, classes=DIGITS)
    run = train(tmp_path / "run", pretrained=str(place), max_steps=1)
    again = {"recipe": str(run.run / "config.yaml"), "overwrite": True}
    vitkit.train("digits", output=tmp_path / "again", **again)
    a_checkpoint(place, classes=DIGITS, seed=8)
    with pytest.raises(CheckpointError, match=r"but `start` in the settings expects"):
        vitkit.train("digits", output=str(tmp_path / "third"), **again)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"model": "vit_small_patch16_224"}, CheckpointError,
         r"contains another model: .*width: 384 requested, 16 in the file.*; leave --model out"),
        ({"spec": {"width": 32}}, CheckpointError, r"width: 32 requested, 16 in the file; leave"),
        ({"img_size": 10}, SpecError, r"not divisible by patch_size 4; the nearest .* 8 or 12"),
        ({"mean": (0.5, 0.5, 0.5)}, SettingError, r"must have 1 value, one for each channel"),
        ({"spec": {"num_classes": 3}}, SettingError, r"num-classes 3 contradicts the data"),
        ({"freeze": ("backbone", "head")}, SettingError, r"everything is frozen: .*freeze backb"),
        ({"freeze": ("backbone",), "opt": "muon"}, SettingError, r"--opt muon trains the matrices"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(tmp_path, settings, error, words):
    a_checkpoint(tmp_path / "a.safetensors", classes=DIGITS)
    with pytest.raises(error, match=words) as caught:
        train(tmp_path / "run", pretrained=tmp_path / "a.safetensors", **settings)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


class Watched(Callback):
    """Notes which modules are in training mode while a step is made."""

    modes: dict[str, bool]

    def before_step(self, trainer, batch):
        modules = trainer.training_step.model.named_modules()
        type(self).modes = {name: part.training for name, part in modules}


def test_a_frozen_backbone_stays_as_it_was_and_has_no_dropout(tmp_path):
    stored = a_checkpoint(tmp_path / "a.safetensors", num_classes=5)
    spec = {"mlp_dropout": 0.5, "position_dropout": 0.5, "head_dropout": 0.1}
    result = train(tmp_path / "run", Watched, pretrained=tmp_path / "a.safetensors",
                   freeze=("backbone",), spec=spec)  # fmt: skip
    trained = vitkit.load(result.last).model.state_dict()
    for name, weight in stored.model.state_dict().items():
        if not name.startswith("head"):
            assert torch.equal(trained[name], weight), name
    assert trained["head.weight"].abs().max() > 1e-4
    training = {name for name, mode in Watched.modes.items() if mode}
    assert {"head", "head_drop"} <= training
    assert not {name for name in training if name.startswith(("blocks.", "embedding"))}
    state = last_state(result.run) / "optimizer.safetensors"
    sizes = {t.numel() for t in safetensors.torch.load_file(state).values() if t.ndim}
    assert sizes == {160, 10}
    assert "of them frozen)" in log_of(result.run)


def test_a_new_head_that_is_frozen_at_zero_is_refused(tmp_path):
    a_checkpoint(tmp_path / "a.safetensors", num_classes=3)
    a_checkpoint(tmp_path / "b.safetensors", classes=DIGITS)
    with pytest.raises(SettingError, match="--freeze head freezes a new head of zeros"):
        train(tmp_path / "run", pretrained=tmp_path / "a.safetensors", freeze=("head",))
    only_begun(tmp_path / "kept", pretrained=tmp_path / "b.safetensors", freeze=("head",))


def test_muon_with_nothing_left_for_adamw_is_refused(tmp_path):
    a_checkpoint(tmp_path / "b.safetensors", classes=DIGITS)
    frozen = ("patch_embed", "head", "norm", "cls_token", "pos_embed", "*.bias", "blocks.*.norm1",
              "blocks.*.norm2")  # fmt: skip
    with pytest.raises(SettingError, match="of the second kind are frozen; freeze less"):
        train(tmp_path / "run", pretrained=tmp_path / "b.safetensors", freeze=frozen, opt="muon")


def test_the_alias_and_the_flag_without_a_value(tmp_path, capsys):
    a_checkpoint(tmp_path / "a.safetensors", classes=DIGITS)
    words = ["train", "digits", "--output", str(tmp_path / "run"), "--device", "cpu", "--quiet"]
    short = ["--max-steps", "1", "--amp", "off", "--freeze", "backbone", "--no-report"]
    assert cli.run([*words, *short, "--finetune", str(tmp_path / "a.safetensors")]) == 0
    begun = vitkit.load(tmp_path / "run" / "weights" / "last.safetensors")
    assert np.allclose(begun.preprocess.mean, 0.3)
    assert cli.run([*words, "--model", "vit_cifar_patch4_32", "--pretrained", "--overwrite"]) == 2
    assert "no weights are published for vit_cifar_patch4_32" in capsys.readouterr().err


def test_a_published_name_with_a_slash_and_its_own_size(tmp_path, monkeypatch):
    """A checkpoint whose size and readout are not its preset's, which the user did not ask for."""
    monkeypatch.chdir(tmp_path)
    cache, name = empty(tmp_path / "hub", monkeypatch), "facebook/dinov2-small-imagenet1k-1-layer"
    preset = "vit_small_patch14_dinov2"
    spec = vitkit.create_model(preset, image_size=28, pooling="cls_mean", num_classes=3).spec
    own = vitkit.save(tmp_path / "own.safetensors", noisy(spec),
                      preprocess=vitkit.Preprocess(image_size=28))  # fmt: skip
    published(own, cache, name, "huggingface")
    settings = SHORT | {"max_steps": 1, "batch_size": 2, "freeze": ("backbone",), "test": False}
    run = vitkit.train("digits", model=f"hf://{name}", pretrained="auto", **settings)
    begun = vitkit.load(run.last).model.spec
    assert (begun.image_size, begun.pooling) == ((28, 28), "cls_mean")
    assert run.run.resolve().parent == tmp_path / "runs"


def test_allow_partial_starts_from_weights_with_an_unknown_tensor(tmp_path, capsys):
    stored = a_checkpoint(tmp_path / "a.safetensors", classes=DIGITS)
    weights = tmp_path / "extra.safetensors"
    safetensors.torch.save_file(
        {**stored.model.state_dict(), "extra.weight": torch.ones(3)}, weights
    )
    words = ["train", "digits", "--output", str(tmp_path / "run"), "--device", "cpu",
             "--max-steps", "1", "--amp", "off", "--threads", "1", "--pretrained", str(weights),
             "--quiet", "--no-report"]  # fmt: skip
    assert cli.run(words) == 2
    assert "1 unknown tensor: extra.weight" in capsys.readouterr().err
    assert cli.run([*words, "--allow-partial", "--overwrite"]) == 0
    assert "1 unknown tensor left out: extra.weight" in log_of(tmp_path / "run")
