"""Activation checkpointing: memory, gradients, and the message when memory runs out."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vitkit
from vitkit import checkpoint_gradients

SMALL = {"image_size": 32, "patch_size": 4, "width": 64, "depth": 4, "num_heads": 4,
         "mlp_width": 256, "num_classes": 5, "layer_scale": 0.5}  # fmt: skip
ROOM = 200 << 20
"""Bytes that a training run gets, less than one step of the whole batch takes."""
DROPOUTS = {"attention_dropout": 0.2, "mlp_dropout": 0.2, "drop_path": 0.3}


class Operations(TorchDispatchMode):
    """A counter of all operations, including those of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


def gradients(recompute: str | None, **fields: object) -> tuple[dict[str, torch.Tensor], Counter]:
    torch.manual_seed(0)
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL | fields, initialisation="timm")).train()
    checkpoint_gradients(model, recompute)
    images = torch.randn(3, 3, 32, 32)
    with Operations() as seen:
        model(images).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}, seen.count


@pytest.mark.parametrize(
    "fields",
    [DROPOUTS, {"positions": "rope", "norm": "rms", "mlp": "swiglu_packed", "activation": "silu"}],
)
def test_gradients_are_the_same_bit_for_bit(fields):
    expected, plain = gradients(None, **fields)
    made, block = gradients("block", **fields)
    for name, gradient in expected.items():
        assert torch.equal(made[name], gradient), name
    # computed again: qkv, proj, fc1; fc2's result is not needed
    assert block["addmm"] >= plain["addmm"] + 3 * 4


def kept(recompute: str | None) -> int:
    """Count the numbers that autograd keeps between the passes, without parameters."""
    model = checkpoint_gradients(vitkit.ViT(vitkit.ViTSpec(**SMALL)).train(), recompute)
    own = {p.data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = model(torch.randn(8, 3, 32, 32))
    del made
    return sum(seen.values())


def test_whole_blocks_keep_a_small_part():
    assert kept("block") < 0.25 * kept(None)


def test_a_record_still_works_and_evaluation_is_unchanged():
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL)).eval()
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        before = model(images)
        assert torch.equal(checkpoint_gradients(model, "block")(images), before)
    record = vitkit.Record(attention=[1], gradients=True)
    model(images, record).sum().backward()
    assert record.attention[1].grad is not None


LIMITED = """
import resource, sys
from pathlib import Path
from vitkit import cli
room, output, *words = sys.argv[1:]
first = [*words, f"--output={output}/first", "--spec.width=16", "--spec.num-heads=1"]
# a whole epoch, and its end
epoch = ["--batch-size=256", "--grad-accum-steps=1", "--max-steps=5", "--spec.patch-size=4"]
assert cli.run([*first, *epoch]) == 0
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + int(room)
resource.setrlimit(resource.RLIMIT_AS, (held, held))
sys.exit(cli.run([*words, f"--output={output}/limited"]))
"""
"""A small run imports all there is to import; then the real one gets so many bytes more."""
WORDS = (
    "train", "digits", "--recipe=digits", "--amp=off", "--device=cpu", "--threads=1", "--quiet",
    "--batch-size=1024", "--max-steps=1", "--spec.depth=1", "--spec.width=192",
    "--spec.patch-size=1", "--no-plots", "--no-report",
)  # fmt: skip
limits = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not hold to the limit"
)


def limited(output: Path, *flags: str) -> tuple[int, str]:
    """Run a command in a fresh process with `ROOM` spare bytes; return exit code and errors."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(ROOM), str(output), *WORDS, *flags],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


@limits
def test_a_batch_that_does_not_fit_is_refused_in_one_line(tmp_path):
    """Out of the system's memory, wherever torch allocates."""
    code, printed = limited(tmp_path)
    assert code == 2, printed
    assert re.fullmatch(
        r"vitkit: cpu is out of memory with 1,024 images at once; pass --grad-checkpointing, or "
        r"start afresh with --grad-accum-steps 2, a lower --batch-size or --img-size, or a smaller "
        r"model; no state is saved in .*/limited",
        printed.splitlines()[-1],
    )
