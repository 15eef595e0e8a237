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

    # changes a result by another seed's spread, which is the measure here
    seed: Annotated[
        int,
        Field(ge=0, lt=2**63, strict=True),
        Meaning(resume="fixed", changes_result=False, with_probe="used", with_auto="passed on"),
    ] = 0
    """Decides initial weights, order, augmentation and dropout."""
    # a run may go on with other devices or on another machine
    device: Annotated[
        str,
        Meaning(
            resume="not compared", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`; auto takes the best there is."""
    # fixed: half precision has other bits, and float16 a loss scale in the state
    amp: Annotated[
        Literal["auto", "off", "bfloat16", "float16"],
        Meaning(resume="fixed", changes_result=True, with_probe="used", with_auto="passed on"),
    ] = "auto"
    """Mixed precision; auto takes bfloat16 (float16 on a GPU without it) where the device is known
    to multiply faster in it and a step is large enough to gain, and float32 elsewhere."""
    # fixed for the bits; the difference is rounding
    attention_kernel: Annotated[
        Literal["auto", "fused", "plain"],
        Meaning(resume="fixed", changes_result=False, with_probe="used", with_auto="passed on"),
    ] = "auto"
    """How heads attend: by one fused kernel, or by two matrix products with the attention weights
    between them; auto takes plain for half precision on a processor, up to 1,024 tokens."""
    compile: Annotated[
        bool,
        tyro.conf.arg(aliases=("--torchcompile",)),
        Meaning(resume="fixed", changes_result=True, with_probe="refused", with_auto="passed on"),
    ] = False
    """Compile the training step (torch.compile); without a compiler it stays as it is."""
    grad_checkpointing: Annotated[
        Literal["block", "norm_and_activation"] | None,
        Meaning(resume="may change", changes_result=False, with_probe="refused"),
    ] = None
    """Less memory for more time: compute again in the backward pass the insides of each block (also
    without a value), or norms and activations alone."""
    devices: Annotated[
        PositiveInt, Meaning(resume="may change", changes_result=False, with_probe="used")
    ] = 1
    """Processes to start on this machine, one a device; under torchrun it is torchrun's number."""
    # states can be read by any number of processes, whole or sharded
    parallel: Annotated[
        Literal["ddp", "fsdp"],
        Meaning(
            resume="may change", changes_result=False, with_probe="used", several_processes=True
        ),
    ] = "ddp"
    """With several processes, each holds the whole model, or a part of every weight."""
    timeout: Annotated[
        PositiveFloat,
        Meaning(
            resume="not compared", changes_result=False, with_probe="used", several_processes=True
        ),
    ] = 60.0
    """Seconds that one process waits for another in a step before it counts as dead."""
    # fixed for the bits: the order of sums depends on it
    threads: Annotated[
        PositiveInt | None,
        Meaning(resume="fixed", changes_result=False, with_probe="used", with_auto="passed on"),
    ] = None
    """Threads of torch's own on the CPU; decided at the start and kept, as sums depend on it."""
    workers: Annotated[
        NonNegativeInt | None,
        tyro.conf.arg(aliases=("-j",)),
        Meaning(
            resume="not compared", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = None
    """Loader processes of each process; default 0 for data in memory, else one per core up to 8."""
