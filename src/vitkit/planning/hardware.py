"""Facts of accelerators, from their makers' data sheets (`docs/scaling.md` has the sources)."""

from __future__ import annotations

from dataclasses import dataclass

from vitkit.errors import SettingError
from vitkit.messages import did_you_mean

THIS = "this"
"""Name of the processor of the machine that the command runs on."""
DEVICES_OF_A_MACHINE = 8
"""GPUs that one machine has at most; more of them exchange over the network."""
SPARE_GB = 2.0
"""Memory of a GPU that a plan leaves free: CUDA's context, workspaces, gaps. An allowance."""
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of device.

    Attributes:
        name: as in the data sheet.
        half_tflops: 10^12 operations a second of dense matrix products, in half precision.
        full_tflops: the same in float32, without TF32.
        bandwidth: bytes a second between memory and chip.
        memory: bytes.
        link: bytes a second that one GPU sends to the others of its machine.
        network: bytes a second that one GPU sends to other machines.
        has_bfloat16: False where half precision is float16 alone.
    """

    name: str
    half_tflops: float
    full_tflops: float
    bandwidth: float
    memory: float
    link: float
    network: float
    has_bfloat16: bool = True

    @property
    def available(self) -> float:
        """The bytes that a training step may have."""
        return self.memory - SPARE_GB * GB

    def link_between(self, devices: int) -> float:
        """Return the bytes a second that one of `devices` GPUs sends, over the slowest link."""
        return self.link if devices <= DEVICES_OF_A_MACHINE else self.network


GPUS: dict[str, Hardware] = {
    "h100": Hardware(
        name="NVIDIA H100 SXM 80 GB", half_tflops=989.4, full_tflops=67.0, bandwidth=3.35e12,
        memory=80 * GB, link=450 * GB, network=50 * GB,
    ),
    "h200": Hardware(
        name="NVIDIA H200 SXM 141 GB", half_tflops=989.4, full_tflops=67.0, bandwidth=4.8e12,
        memory=141 * GB, link=450 * GB, network=50 * GB,
    ),
    "a100-40": Hardware(
        name="NVIDIA A100 SXM 40 GB", half_tflops=312.0, full_tflops=19.5, bandwidth=1.555e12,
        memory=40 * GB, link=300 * GB, network=25 * GB,
    ),
    "a100-80": Hardware(
        name="NVIDIA A100 SXM 80 GB", half_tflops=312.0, full_tflops=19.5, bandwidth=2.039e12,
        memory=80 * GB, link=300 * GB, network=25 * GB,
    ),
    "l4": Hardware(
        name="NVIDIA L4 24 GB", half_tflops=121.0, full_tflops=30.3, bandwidth=300 * GB,
        memory=24 * GB, link=32 * GB, network=1.5 * GB,
    ),
    "t4": Hardware(
        name="NVIDIA T4 16 GB", half_tflops=65.0, full_tflops=8.1, bandwidth=300 * GB,
        memory=16 * GB, link=16 * GB, network=1.5 * GB, has_bfloat16=False,
    ),
    "rtx4090": Hardware(
        name="NVIDIA GeForce RTX 4090 24 GB", half_tflops=165.2, full_tflops=82.6,
        bandwidth=1.008e12, memory=24 * GB, link=32 * GB, network=1.5 * GB,
    ),
}  # fmt: skip
"""Name of `--gpu` -> facts. The links are one direction of NVLink, or of PCI Express with 16 lanes;
the networks those of the usual machine with eight of them."""


def find_gpu(name: str) -> Hardware:
    """Return the facts of a GPU.

    Raises:
        SettingError: no such name.
    """
    known = [*GPUS, THIS]
    if name not in GPUS:
        near = did_you_mean(name, known)
        raise SettingError(f"--gpu {name}: must be one of {', '.join(known)}{near}")
    return GPUS[name]
