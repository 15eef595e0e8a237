"""Settings of the machine: device, precision, memory, processes."""

from __future__ import annotations

from typing import Annotated, Literal

import tyro
from pydantic import Field

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.field_types import NonNegativeInt, PositiveFloat, PositiveInt
from vitkit.training.config.meaning import Meaning


@frozen(raises=SettingError)
class RuntimeSettings:
    """The seed, and where and in which arithmetic a run is computed."""

    # changes the result only within the spread of seeds, by which runs are compared
    seed: Annotated[
        int,
        Field(ge=0, lt=2**63, strict=True),
        Meaning(resume="fixed", changes_result=False, with_probe="used", with_auto="passed on"),
    ] = 0
    """Seed of initial weights, image order, augmentation and dropout, 0 or more; the same seed
    gives the same run."""
    # a run may be resumed on other devices or another machine
    device: Annotated[
        str,
        Meaning(
            resume="not compared", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = "auto"
    """Device: `cpu`, `cuda`, `cuda:1`, `mps`; auto picks the fastest one available."""
    # fixed: half precision has other bits, and float16 a loss scale in the state
    amp: Annotated[
        Literal["auto", "off", "bfloat16", "float16"],
        Meaning(resume="fixed", changes_result=True, with_probe="used", with_auto="passed on"),
    ] = "auto"
    """Mixed precision: auto uses bfloat16 (float16 on a GPU without it) if the device is known to
    be faster in it and the step is large enough to gain, else float32."""
    # fixed for bit-exactness; the difference is rounding
    attention_kernel: Annotated[
        Literal["auto", "fused", "plain"],
        Meaning(resume="fixed", changes_result=False, with_probe="used", with_auto="passed on"),
    ] = "auto"
    """Attention by one fused kernel (`fused`), or by two matrix products and a softmax (`plain`);
    auto uses plain only for half precision on a CPU with up to 1,024 tokens."""
    compile: Annotated[
        bool,
        tyro.conf.arg(aliases=("--torchcompile",)),
        Meaning(resume="fixed", changes_result=True, with_probe="refused", with_auto="passed on"),
    ] = False
    """Compile the training step with torch.compile; without a compiler the step stays as it is."""
    grad_checkpointing: Annotated[
        Literal["block", "norm_and_activation"] | None,
        Meaning(resume="may change", changes_result=False, with_probe="refused"),
    ] = None
    """Save memory by computing activations again in the backward pass: those inside each `block`
    (the same without a value), or only norms and activation functions."""
    devices: Annotated[
        PositiveInt, Meaning(resume="may change", changes_result=False, with_probe="used")
    ] = 1
    """Number of processes to start on this machine, one per device; with torchrun, use its own
    option instead."""
    # states can be read by any number of processes, whole or sharded
    parallel: Annotated[
        Literal["ddp", "fsdp"],
        Meaning(
            resume="may change", changes_result=False, with_probe="used", several_processes=True
        ),
    ] = "ddp"
    """With several processes: `ddp` keeps the whole model in each, `fsdp` splits every weight among
    them."""
    timeout: Annotated[
        PositiveFloat,
        Meaning(
            resume="not compared", changes_result=False, with_probe="used", several_processes=True
        ),
    ] = 60.0
    """Seconds a process waits for the others before it assumes that one has died, above 0."""
    # fixed for bit-exactness: the order of sums depends on it
    threads: Annotated[
        PositiveInt | None,
        Meaning(resume="fixed", changes_result=False, with_probe="used", with_auto="passed on"),
    ] = None
    """CPU threads of torch. Default: torch's choice, which a resumed run keeps, as rounding
    depends on it."""
    workers: Annotated[
        NonNegativeInt | None,
        tyro.conf.arg(aliases=("-j",)),
        Meaning(
            resume="not compared", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = None
    """Loader processes per training process. Default: 0 for data in memory, else one per core up to
    8."""
