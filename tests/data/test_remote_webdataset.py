"""Shards on a web server that breaks off, fails and changes: every image, in one order, or a
line that says why not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import urllib3
from image_files import refusal
from processes import wait_until
from shard_server import ShardServer, serving
from shards import as_tars, samples, train_briefly, write_tar
from tar_headers import END, binary, header

from vitkit.data.augmentation.pipeline import Augmentation
from vitkit.data.checks.check import drop_or_refuse_unreadable
from vitkit.data.datasets.dataset import Dataset, StoredSplit
from vitkit.data.datasets.pixel_cache import cached
from vitkit.data.loading.loader import TrainingSteps, batches
from vitkit.data.sources import remote_shards
from vitkit.data.sources.open import open_dataset
from vitkit.errors import DataError, ImageError, SettingError, UserError
from vitkit.io import download as connections
from vitkit.io import download as resume_download
from vitkit.spec import Preprocess
from vitkit.training.run import TrainResult
from vitkit.training.state.state_folder import newest_state, run_hash

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])
TRAIN = [f"train-{number:04}.tar" for number in range(4)]
PER_SHARD = 6


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardServer]:
    """Four shards of train, one of val and of test; no shard stays in the cache for long."""
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VITKIT_SHARDS_GB", "0")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(connections, "BACKOFF", 0.001)
    monkeypatch.setattr(resume_download, "PAUSE", 0.001)
    monkeypatch.setattr(remote_shards, "NEVER_DELETED", 2)
    images = samples(8)
    train = [sample for sample in images if sample[0] == "train"]
    train = [train[index] for index in np.random.default_rng(0).permutation(len(train))]
    with serving() as running:
        for number, name in enumerate(TRAIN):
            entries = []
            for index in range(number * PER_SHARD, (number + 1) * PER_SHARD):
                _, label, file, content = train[index]
                entries += [(f"{index}.{file.split('.')[1]}", content), (f"{index}.cls", label)]
            running.files[name] = tar(tmp_path, entries)
        as_tars(tmp_path / "rest", [sample for sample in images if sample[0] != "train"])
        for path in (tmp_path / "rest").iterdir():
            running.files[path.name] = path.read_bytes()
        yield running


def tar(folder: Path, entries: list[tuple[str, str | bytes]]) -> bytes:
    members = [(name, c.encode() if isinstance(c, str) else c) for name, c in entries]
    return write_tar(folder / "one.tar", members).read_bytes()


NAMES = "{train-0000,train-0001,train-0002,train-0003,val-0000,test-0000}.tar"


def whole(server: ShardServer) -> str:
    return f"wds:{server.address}/{NAMES}"


def shards_of(dataset: Dataset, split: str = "train") -> np.ndarray:
    """Each image's shard."""
    stored = dataset.splits[split]
    assert isinstance(stored, StoredSplit)
    return np.asarray(stored.store.shard[stored.numbers])


def forget_shards(folder: Path) -> None:
    for path in (folder / "cache" / "shards").glob("*.tar"):
        path.unlink()


def steps_of(dataset: Dataset, batch_size: int = 4, seed: int = 0) -> TrainingSteps:
    preprocess = Preprocess(image_size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3)
    return TrainingSteps(
        dataset.splits["train"], preprocess, Augmentation(), batch_size=batch_size, seed=seed
    )


def epoch_of(steps: TrainingSteps, epoch: int) -> np.ndarray:
    count = steps.steps_per_epoch
    return np.concatenate([steps.indices(s) for s in range(count * epoch, count * (epoch + 1))])


def test_the_images_are_those_of_the_same_files_here(server: ShardServer, tmp_path: Path) -> None:
    for name, content in server.files.items():
        (tmp_path / name).write_bytes(content)
    remote = open_dataset(whole(server))
    local = open_dataset(f"wds:{tmp_path}/{NAMES}")
    assert remote.classes == local.classes == ("1", "2", "10")
    for split, images in local.splits.items():
        np.testing.assert_array_equal(remote.splits[split].labels, images.labels)
        for index in range(len(images)):
            assert remote.splits[split].name(index) == images.name(index)
            np.testing.assert_array_equal(remote.splits[split].read(index), images.read(index))
    assert remote.fingerprint != local.fingerprint  # the order of a run would be another one


def test_an_epoch_goes_through_the_shards_one_by_one(server: ShardServer) -> None:
    dataset = open_dataset(whole(server))
    steps, shards = steps_of(dataset), shards_of(dataset)
    orders = [epoch_of(steps, epoch) for epoch in range(6)]
    runs = [shards[order].reshape(len(TRAIN), PER_SHARD) for order in orders]
    for order, run in zip(orders, runs, strict=True):
        assert sorted(order) == list(range(24))
        assert (run == run[:, :1]).all()
        assert all((np.diff(part) != 1).any() for part in order.reshape(run.shape))
    assert len({tuple(run[:, 0]) for run in runs}) > 2
    assert epoch_of(steps_of(dataset), 3).tolist() == orders[3].tolist()
    assert epoch_of(steps_of(dataset, seed=1), 3).tolist() != orders[3].tolist()
    inside = [order[np.flatnonzero(shards[order] == 2)].tolist() for order in orders]
    assert len({tuple(places) for places in inside}) == 6
    from_cache = cached(dataset)
    assert epoch_of(steps_of(from_cache), 3).tolist() == orders[3].tolist()


def test_a_shard_is_fetched_once_to_be_indexed_and_once_an_epoch(
    server: ShardServer, tmp_path: Path
) -> None:
    dataset, _ = drop_or_refuse_unreadable(open_dataset(whole(server)), "refuse")
    assert server.fetched == dict.fromkeys(server.files, 1)
    dataset, _ = drop_or_refuse_unreadable(open_dataset(whole(server)), "refuse")
    assert server.fetched == dict.fromkeys(server.files, 1)
    forget_shards(tmp_path)
    server.fetched.clear()
    steps = steps_of(dataset, batch_size=3)
    list(batches(steps, range(steps.steps_per_epoch)))
    assert server.fetched == dict.fromkeys(TRAIN, 1)
    list(batches(steps, range(steps.steps_per_epoch, 2 * steps.steps_per_epoch)))
    assert max(server.fetched.values()) == 2
    assert len([*(tmp_path / "cache" / "shards").glob("*.tar")]) == remote_shards.NEVER_DELETED
    assert any("downloaded again in every epoch" in note for note in dataset.notes)


def test_what_has_room_is_fetched_once(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITKIT_SHARDS_GB", "1")
    dataset = open_dataset(whole(server))
    list(batches(steps_of(dataset), range(12)))
    assert server.fetched == dict.fromkeys(server.files, 1)
    assert "from any step" in dataset.notes[-1]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert open_dataset(whole(server)).fingerprint == dataset.fingerprint
    monkeypatch.setenv("VITKIT_SHARDS_GB", "some")
    with pytest.raises(
        SettingError, match=r"VITKIT_SHARDS_GB=.some.: expected a number of gigabytes"
    ):
        open_dataset(whole(server))


def test_workers_make_the_same_batches(server: ShardServer) -> None:
    steps = steps_of(open_dataset(whole(server)))
    here = list(batches(steps, range(12)))
    theirs = list(batches(steps, range(12), workers=2))
    for one, other in zip(here, theirs, strict=True):
        np.testing.assert_array_equal(one.indices, other.indices)
        np.testing.assert_array_equal(one.pixels, other.pixels)


def test_the_next_shard_is_fetched_while_one_is_read(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitkit.data.loading.batch.get_worker_info", lambda: "in a worker")
    steps = steps_of(dataset := open_dataset(whole(server)), batch_size=3)
    forget_shards(tmp_path)
    server.fetched.clear()
    list(batches(steps, range(1)))
    present, coming = list(dict.fromkeys(shards_of(dataset)[epoch_of(steps, 0)]))[:2]
    wait_until(lambda: len(server.fetched) >= 2)
    assert server.fetched == {TRAIN[present]: 1, TRAIN[coming]: 1}


def test_broken_connections_are_gone_on_with(server: ShardServer) -> None:
    name = TRAIN[1]
    server.breaks[name] = [4000, 300]
    server.fails[TRAIN[2]] = [503, 429, 500]
    dataset = open_dataset(whole(server))
    assert server.went_on == [(name, 4000), (name, 4300)]
    server.ranges, server.breaks[name] = False, [4000, 5000]
    for index in range(24):
        assert dataset.splits["train"].read(index).ndim == 3


@pytest.mark.parametrize("page", [b"<html>sign in</html>", bytes(2048)])
def test_one_bad_answer_is_asked_for_again_and_never_kept(
    server: ShardServer, tmp_path: Path, page: bytes
) -> None:
    server.instead[TRAIN[1]] = [page]
    assert len(open_dataset(whole(server)).splits["train"]) == 24
    assert not server.instead[TRAIN[1]]
    for path in (tmp_path / "cache").rglob("*"):
        assert not path.is_file() or page not in path.read_bytes()[: len(page)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"<html>", "not a tar file"),  # the sign-in page for every request, as a proxy gives it
        (header(b"x", binary(2**80), b"9") + END, "claims 1,208,925,819,614,629,174,706,176 bytes"),
    ],
)
def test_what_cannot_be_indexed_is_fetched_again_by_the_next_run(
    server: ShardServer, content: bytes, expected: str
) -> None:
    good = server.files[TRAIN[1]]
    server.files[TRAIN[1]] = content
    assert expected in refusal(whole(server))
    assert "the next run downloads it again" in refusal(whole(server))
    assert server.fetched[TRAIN[1]] == 2
    server.files[TRAIN[1]] = good
    assert len(open_dataset(whole(server)).splits["train"]) == 24


def test_what_came_before_a_reset_is_kept(server: ShardServer) -> None:
    name = TRAIN[1]
    server.resets[name] = [3000] * 3
    open_dataset(whole(server))
    assert server.went_on == [(name, 3000), (name, 6000), (name, 9000)]


@pytest.mark.parametrize("form", ["3", "date", "999999", "soon"])
def test_a_server_is_not_asked_before_it_wants_to_be(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    waits: list[float] = []
    clock = SimpleNamespace(sleep=waits.append, time=time.time)
    monkeypatch.setattr(urllib3.util.retry, "time", clock)
    server.wait = formatdate(time.time() + 60, usegmt=True) if form == "date" else form
    server.fails[TRAIN[2]] = [503]
    open_dataset(whole(server))
    expected = {"3": [3], "date": [pytest.approx(60, abs=30)], "999999": [120], "soon": []}[form]
    assert waits == expected


def test_a_length_that_is_no_number_is_no_length(server: ShardServer) -> None:
    server.lengths = "abc"
    server.ranges = False
    assert len(open_dataset(whole(server)).splits["train"]) == 24


def refused(error: type[UserError], dataset: Dataset) -> str:
    with pytest.raises(error) as caught:
        list(batches(steps_of(dataset), range(6)))
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_the_error_names_a_server_that_is_gone_and_no_image(server: ShardServer) -> None:
    dataset = open_dataset(whole(server))
    server.fails[TRAIN[1]] = [500] * 6
    message = refused(DataError, dataset)
    assert (
        f"{TRAIN[1]}: the server answered 500 Internal Server Error; 6 attempts failed" in message
    )
    server.ranges, server.breaks[TRAIN[1]] = False, [4000] * 7
    assert f"{TRAIN[1]}: the server closed the connection; 6 attempts failed" in refused(
        DataError, dataset
    )
    server.breaks.clear()
    server.fails[TRAIN[0]] = [403]
    with pytest.raises(DataError, match="the server answered 403 Forbidden"):
        drop_or_refuse_unreadable(cached_away(dataset), "skip")


def cached_away(dataset: Dataset) -> Dataset:
    """The dataset, with all that was remembered of its images forgotten."""
    for path in (remote_shards.cache_folder() / "looks").glob("*"):
        path.unlink()
    return dataset


@pytest.mark.parametrize("tagged", [True, False])
def test_a_shard_that_changes_ends_the_run(server: ShardServer, tagged: bool) -> None:
    server.tagged = tagged
    dataset = open_dataset(whole(server))
    before = server.files[TRAIN[3]]
    server.files[TRAIN[3]] = before.replace(b"\x89PNG", b"\x89PNg", 1)
    assert f"{TRAIN[3]}: changed since it was indexed" in refused(DataError, dataset)
    assert open_dataset(whole(server)).fingerprint != dataset.fingerprint


def test_bad_images_are_named(server: ShardServer, tmp_path: Path) -> None:
    server.files[TRAIN[0]] = server.files[TRAIN[0]].replace(b"\x89PNG", b"\x89PNg", 1)
    server.files["val-0000.tar"] = tar(tmp_path, [("0.png", b""), ("0.cls", "1")])
    dataset = open_dataset(whole(server))
    with pytest.raises(DataError, match=r"2 of 31 images .*train-0000\.tar/\d: not an image"):
        drop_or_refuse_unreadable(dataset, "refuse")
    with pytest.raises(ImageError, match=r"val-0000\.tar/0: empty"):
        dataset.splits["val"].read(0)


def test_what_is_not_there_or_no_tar_is_refused(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = refusal(f"wds:{server.address}/train-{{0000..0009}}.tar")
    assert "/set/train-0004.tar: the server answered 404 Not Found" in missing
    assert not server.fetched
    raw = server.files[TRAIN[2]]
    server.files[TRAIN[2]] = raw[:2560]
    message = refusal(whole(server))
    assert f"{server.address}/{TRAIN[2]}: " in message
    assert "truncated" in message
    server.files[TRAIN[2]] = b"<html>"
    assert f"{TRAIN[2]}: not a tar file" in refusal(whole(server))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "train-0002.tar: not indexed yet, and HF_HUB_OFFLINE forbids" in refusal(whole(server))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("wds:pipe:curl https://host/train-{0..9}.tar", "commands are not run"),
        ("wds:s3://bucket/train-{0..9}.tar", "expected an https:// address"),
        ("wds:http://host/train-{0..9}.tar", "expected an https:// address"),
        ("wds:file:///etc/train-{0..9}.tar", "expected an https:// address"),
        ("wds:https://[host/train-{0..9}.tar", "not a valid address"),
        ("wds:https://host/train-*.tar", "a web server does not list its files"),
    ],
)
def test_other_addresses_are_refused(address: str, message: str) -> None:
    assert message in refusal(address)


def train(server: ShardServer, output: Path, **settings: object) -> TrainResult:
    return train_briefly(
        whole(server), output, **{"epochs": 2, "batch_size": 4, "save_every": 1, **settings}
    )


def end_of(output: Path) -> str:
    return run_hash(newest_state(output / "state")[0])


def test_a_run_that_stopped_inside_a_shard_ends_with_the_same_bits(
    server: ShardServer, tmp_path: Path
) -> None:
    train(server, tmp_path / "through")
    stopped = tmp_path / "stopped"
    train(server, stopped, max_steps=10, workers=2)
    dataset = open_dataset(whole(server))
    steps, shards = steps_of(dataset), shards_of(dataset)
    assert shards[steps.indices(9)][-1] == shards[steps.indices(10)][0]
    forget_shards(tmp_path)
    server.fetched.clear()
    server.breaks = {name: [2000, 2000] for name in TRAIN}
    train(server, stopped, resume=str(stopped), max_steps=None)
    assert end_of(stopped) == end_of(tmp_path / "through")
    needed = {TRAIN[shard] for step in (10, 11) for shard in shards[steps.indices(step)]}
    assert {name for name in server.fetched if name in TRAIN} == needed
    assert len(needed) < len(TRAIN)
    assert "resumes exactly from any step" in (stopped / "train.log").read_text()
    for name, content in server.files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match="differ from those"):  # the order would be another one
        train_briefly(f"wds:{tmp_path}/{NAMES}", stopped, batch_size=4, resume=str(stopped))
