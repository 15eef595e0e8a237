"""Whole files of each container, a few bytes changed: read, or refused by a `CheckpointError`."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from weights.hostile import archives, pickles, safetensors_files

import vitkit
from vitkit import CheckpointError

SEEDS = {
    "foreign.safetensors": safetensors_files.whole(), "own.safetensors": safetensors_files.own(),
    "google.npz": archives.with_array("x", None), "torch.pth": pickles.plain(),
}  # fmt: skip
Change = tuple[str, float, int, bytes]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "remove"]),
        st.one_of(st.floats(0, 1), st.floats(0, 0.02), st.floats(0.95, 1)),
        st.integers(0, 255),
        st.binary(max_size=12),
    ),
    min_size=1,
    max_size=4,
)
"""What is done, where (headers lie at the start, directories at the end), a bit, and bytes."""


def changed(content: bytes, changes: list[Change]) -> bytes:
    for what, where, bit, more in changes:
        at = int(where * max(len(content) - 1, 0))
        if what == "flip" and content:
            content = content[:at] + bytes([content[at] ^ (bit or 1)]) + content[at + 1 :]
        elif what == "cut":
            content = content[:at]
        elif what == "insert":
            content = content[:at] + more + content[at:]
        elif what == "remove":
            content = content[:at] + content[at + bit :]
    return content


def opened(name: str, content: bytes) -> None:
    """Through both doors; anything but a `CheckpointError` of one line escapes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        for read in (vitkit.inspect, vitkit.load):
            message = str(path)
            try:
                read(path, trust_pickle=True)
            except CheckpointError as error:
                message = str(error)
            assert str(path) in message
            assert message.isprintable()


def fuzz(name: str, examples: int) -> None:
    @settings(max_examples=examples, derandomize=True, deadline=None, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(CHANGES)
    @example([("cut", 0.0, 0, b"")])
    @example([("flip", 0.9998822007484178, 0, b"")])  # an archive of several disks
    def run(changes: list[Change]) -> None:
        opened(name, changed(SEEDS[name], changes))

    run()


@pytest.mark.parametrize("name", SEEDS)
def test_changed_bytes_are_read_or_refused(name):
    opened(name, SEEDS[name])
    fuzz(name, 60)


@pytest.mark.soak
@pytest.mark.parametrize("name", SEEDS)
def test_many_changed_bytes_are_read_or_refused(name):
    fuzz(name, 5000)
