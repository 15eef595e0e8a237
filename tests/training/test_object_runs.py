"""Runs on datasets that are Python objects: the bits of any other run, resumed with the object."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import Dataset as TorchDataset
from training.tiny_runs import QUICK, end_of

import vitkit
from vitkit import DataError, SettingError, UserCodeError, cli

SPEC = {"image_size": 8, "patch_size": 4, "width": 8, "num_heads": 1, "mlp_width": 8, "depth": 1}
SMALL = QUICK | {"spec": SPEC, "epochs": 2, "batch_size": 32}
DIGITS = vitkit.open_dataset("digits").splits["train"]
IMAGES, LABELS = DIGITS.images[:200, :, :, 0], DIGITS.labels[:200]
TEST = (DIGITS.images[200:300, :, :, 0], DIGITS.labels[200:300])


class Cells(TorchDataset):
    """Digits as a dataset of torch, in any form of item."""

    def __init__(self, item=lambda image, label: (Image.fromarray(image), int(label))):
        self.item = item

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        return self.item(IMAGES[index], LABELS[index])


def float_tensor(image, label):
    return torch.from_numpy(image)[None] / 255, torch.tensor(label)


@pytest.fixture
def pairs(tmp_path):
    found = []
    for number, (image, label) in enumerate(zip(IMAGES, LABELS, strict=True)):
        path = tmp_path / f"images/{number:03}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path)
        found.append((path, int(label)))
    return found


def weights_of(result):
    return load_file(result.last)


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def form_of(kind, pairs):
    """The same images in another form."""
    if kind == "pairs":
        return pairs
    if kind in ("Cells", "float"):
        return Cells(float_tensor) if kind == "float" else Cells()
    import datasets

    datasets.disable_progress_bars()
    rows = {"image": [str(path) for path, _ in pairs], "label": LABELS.tolist()}
    return datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())


@pytest.fixture(scope="module")
def array_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arrays") / "run"
    return vitkit.train({"train": (IMAGES, LABELS), "test": TEST}, output=folder, **SMALL)


@pytest.mark.parametrize("kind", ["pairs", "Cells", "float", "datasets"])
def test_the_same_images_give_the_same_bits_however_they_are_given(
    tmp_path, pairs, array_run, kind
):
    data = {"train": form_of(kind, pairs), "test": TEST}
    result = vitkit.train(data, output=tmp_path / "run", **SMALL)
    assert same(weights_of(array_run), weights_of(result))
    assert result.metrics == array_run.metrics
    assert result.metrics["test"]["images"] == 100
    name = "Cells" if kind == "float" else kind
    assert f"data: memory://{name}-arrays-" in (result.run / "config.yaml").read_text()


class StopsAt(vitkit.Callback):
    """Raises after a step."""

    def __init__(self, step):
        self.step = step

    def after_step(self, trainer, result):
        if trainer.progress.step == self.step:
            raise KeyError("boom")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_run_goes_on_with_the_same_object_and_bits(tmp_path, workers):
    settings = SMALL | {"workers": workers, "aa": "trivial"}
    straight = vitkit.train(Cells(), output=tmp_path / "straight", **settings)
    # a callback that raises is named with its event; the state is saved
    with pytest.raises(UserCodeError) as error:
        vitkit.train(Cells(), output=tmp_path / "run", callbacks=[StopsAt(3)], **settings)
    assert isinstance(error.value.__cause__, KeyError)
    assert str(error.value) == (
        "the callback StopsAt raised KeyError in after_step: 'boom'; the run stopped at step 3, "
        "everything is saved: fix it and resume with the same objects: "
        f"vitkit.train(data, resume='{tmp_path / 'run'}', callbacks=...)"
    )
    resumed = vitkit.train(Cells(), resume=tmp_path / "run", callbacks=[StopsAt(-1)], quiet=True)
    ends = [end_of(r.run) for r in (straight, resumed)]
    assert ends[0] == ends[1]
    assert resumed.metrics == straight.metrics


def test_the_name_of_an_object_of_a_script_asks_for_the_object(tmp_path):
    message = r"loss __main__:own: .* pass the object itself: vitkit.train\(data, loss=...\)"
    with pytest.raises(SettingError, match=message):
        vitkit.train("digits", loss="__main__:own", output=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


def test_a_run_is_resumed_with_its_own_object_alone(tmp_path, capsys):
    run = vitkit.train((IMAGES, LABELS), output=tmp_path / "run", **SMALL).run
    with pytest.raises(SettingError, match=r"data memory://arrays-\w+; pass the same ones again: "):
        vitkit.train(resume=run, epochs=3)
    assert cli.run(["train", "--resume", str(run), "--epochs", "3"]) == 2
    assert f"vitkit.train(data, resume='{run}')" in capsys.readouterr().err
    changed = IMAGES.copy()
    changed[11] = 255 - changed[11]
    with pytest.raises(DataError, match=r"classes differ from .*; pass the same object, or start"):
        vitkit.train((changed, LABELS), resume=run, epochs=3, quiet=True)
    assert (
        vitkit.train((IMAGES, LABELS), resume=run, epochs=3, quiet=True).stopped == "all 3 epochs"
    )
    with pytest.raises(SettingError, match="data is missing"):
        vitkit.train(epochs=1)


def test_objects_are_evaluated_whole_or_as_in_training(tmp_path):
    run = vitkit.train((IMAGES, LABELS), output=tmp_path / "run", **SMALL)
    again = vitkit.evaluate(run.best, (IMAGES, LABELS))
    assert again["images"] == run.metrics["test"]["images"] == 40
    assert again["top1"] == run.metrics["test"]["top1"]
    assert vitkit.evaluate(run.best, TEST)["images"] == 100
    assert vitkit.evaluate(run.best, {"val": TEST})["images"] == 100
    # class numbers of an object without names are the checkpoint's
    named = vitkit.open_dataset((IMAGES, LABELS), classes=[*"abcdefghij"])
    run = vitkit.train(named, output=tmp_path / "named", **SMALL)
    by_number = vitkit.evaluate(run.best, TEST)
    by_name = vitkit.evaluate(run.best, (TEST[0], ["abcdefghij"[label] for label in TEST[1]]))
    assert by_number == by_name
    assert by_number.classes == tuple("abcdefghij")
    beyond = np.where(TEST[1] == 3, 10, TEST[1])
    with pytest.raises(DataError, match="has the label 10; expected 0 to 9"):
        vitkit.evaluate(run.best, (TEST[0], beyond))
    compared = vitkit.compare(run.best, run.last, data=TEST)
    assert [score["images"] for score in compared.scores.values()] == [100, 100]


def test_data_of_one_process_are_refused_where_others_are_started(tmp_path):
    with pytest.raises(SettingError, match=r"devices 2 starts .* data memory://arrays-.* torchrun"):
        vitkit.train((IMAGES, LABELS), output=tmp_path / "run", devices=2, **SMALL)
    assert not (tmp_path / "run").exists()


def test_a_dataset_that_cannot_be_sent_to_a_spawned_worker_is_named(tmp_path):
    import multiprocessing

    fork = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        with pytest.raises(DataError, match=r"cannot be sent to loader process.*lambda.*workers"):
            vitkit.train(
                Cells(lambda i, j: (i, j)), output=tmp_path / "r", **SMALL | {"workers": 1}
            )
    finally:
        multiprocessing.set_start_method(fork, force=True)


def test_an_item_that_raises_in_the_middle_of_a_run_saves_it(tmp_path):
    class Fails(Cells):
        reads = 0

        def __getitem__(self, index):
            Fails.reads += 1
            # opened, checked, and some batches made
            if Fails.reads == 500:
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    with pytest.raises(DataError, match=r"Fails\[\d+\] raised OSError: the disk is gone; ") as e:
        vitkit.train(Fails(), output=tmp_path / "run", **SMALL)
    assert "everything is saved" in str(e.value)
    resumed = vitkit.train(Fails(), resume=tmp_path / "run", quiet=True)
    straight = vitkit.train(Fails(), output=tmp_path / "straight", **SMALL)
    assert same(weights_of(resumed), weights_of(straight))


def test_a_search_measures_an_object(tmp_path):
    settings = {"budget": "0.1s", "output": tmp_path / "search", "quiet": True, "report": False}
    found = vitkit.train((IMAGES, LABELS), auto=True, **settings)
    assert vitkit.load(found.best).metadata["metrics"].keys() == {"val", "test"}
