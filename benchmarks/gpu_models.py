"""The models that `gpu.py` times: timm's and vitkit's with the same weights, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from versus.machine import declare_missing_operators

import vitkit
from vitkit.engines.choose import sample_images
from vitkit.engines.engine import build_engine
from vitkit.layer_table import summary

declare_missing_operators()  # torchvision, which timm imports, takes them from CUDA's library

import timm  # noqa: E402

CLASSES = 1000
LARGEST_DIFFERENCE = 1e-4
"""The largest allowed difference of two logits, in float32 without TF32."""
NAMES = {"Ti": "vit_tiny_patch16_224", "S": "vit_small_patch16_224", "B": "vit_base_patch16_224",
         "L": "vit_large_patch16_224"}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Where and how large everything is.

    Attributes:
        device: of all models and images.
        smoke: models of two blocks for 32 pixels, batches of 4, few repeats.
        blocks: A B B A blocks of each comparison.
    """

    device: torch.device
    smoke: bool = False
    blocks: int = 7

    @property
    def shape(self) -> dict[str, int]:
        """Return the fields of the models that a smoke run changes."""
        return {"depth": 2} if self.smoke else {}

    @property
    def size(self) -> int:
        """Return the height and width of the images, in pixels."""
        return 32 if self.smoke else 224

    def batch(self, count: int) -> int:
        """Return the size of a batch: `count`, but in a smoke run 4 for each 256."""
        return max(1, count // 64) if self.smoke else count

    def warm(self, compiled: bool = False) -> int:
        """Return the number of warm-up calls."""
        return 2 if self.smoke else 20 if compiled else 8


def pair(name: str, setting: Setting) -> dict[str, nn.Module]:
    """Return timm's and vitkit's model with timm's initial weights, float32, in eval mode."""
    torch.manual_seed(0)
    shape = {"num_classes": CLASSES, **setting.shape}
    with setting.device:
        theirs = timm.create_model(name, img_size=setting.size, **shape)
    with torch.no_grad():  # a trained model's biases are not zero
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    with torch.device("meta"):  # its initial weights would take seconds
        ours = vitkit.create_model(name, image_size=setting.size, **shape)
    weights = {key: value.clone() for key, value in theirs.state_dict().items()}
    ours.load_state_dict(weights, assign=True)
    return {"timm": theirs.eval(), "vitkit": ours.eval()}


def images(count: int, setting: Setting, number: int = 0) -> Tensor:
    """Return batch `number`, noise with the spectrum of photographs, float32: (B, 3, H, W)."""
    size = (setting.size, setting.size)
    return sample_images(count, 3, size, seed=number).to(setting.device)


@torch.no_grad()
def same_logits(name: str, setting: Setting) -> dict[str, float]:
    """Compare the two models before anything is timed.

    In float32 the logits must agree. In bfloat16, vitkit's and those of its engine may differ by
    twice timm's own rounding, and the largest logit must be the same one where float32 says clearly
    which it is.

    Raises:
        SystemExit: they do not compute the same.
    """
    models = pair(name, setting)
    given = images(setting.batch(256), setting)
    full = {key: model(given) for key, model in models.items()}
    engine = build_engine("torch", models["vitkit"], precision="bfloat16")(given)
    half = {key: model.bfloat16()(given.bfloat16()).float() for key, model in models.items()}
    half["engine"] = engine
    apart = (full["timm"] - full["vitkit"]).abs().max().item()
    rounding = (half["timm"] - full["timm"]).abs().max().item()
    first, second = full["timm"].topk(2).values.unbind(1)
    clear = first - second > 2 * rounding  # no rounding changes the largest of these
    theirs = half.pop("timm")
    differences = {key: (logits - theirs).abs().max().item() for key, logits in half.items()}
    same = {key: logits.argmax(1) == theirs.argmax(1) for key, logits in half.items()}
    made = {"float32_difference": apart, "bfloat16_rounding": rounding,
            "bfloat16_difference": differences["vitkit"],
            "engine_difference": differences["engine"],
            "bfloat16_agreement": same["vitkit"].float().mean().item(),
            "clear_images": clear.sum().item(), "classes": full["timm"].argmax(1).unique().numel(),
            }  # fmt: skip
    fine = apart <= LARGEST_DIFFERENCE and max(differences.values()) <= 2 * rounding
    if not fine or not all(agree[clear].all() for agree in same.values()):
        raise SystemExit(f"{name}: the models are not the same: {made}")
    return made


def flops(model: nn.Module, size: int) -> float:
    """Return the operations of one image's forward pass: 2 for each multiply-add of a product."""
    return 2.0 * summary(model, (1, 3, size, size)).mult_adds


def compile_model(model: nn.Module, mode: str | None = None) -> None:
    """Compile in place; without a GPU only the tracing of it, for the smoke run."""
    if torch.cuda.is_available():
        model.compile(dynamic=False, mode=mode)
    else:
        model.compile(dynamic=False, backend="eager")


@dataclass
class Inference:
    """A forward pass in bfloat16, weights too. A call takes the number of its batch."""

    model: Callable[[Tensor], Tensor]
    batches: list[Tensor]
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(self, number: int) -> Tensor:
        with torch.inference_mode(), self.around():
            return self.model(self.batches[number % len(self.batches)])


@dataclass
class Training:
    """A step under bfloat16 autocast: forward, loss, backward, clip, fused AdamW, zero_grad.

    With `reads`, loss and norm are read before the weights change, as a run of `vitkit train` does.
    """

    model: nn.Module
    batches: list[Tensor]
    labels: Tensor
    reads: bool = False

    def __post_init__(self) -> None:
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def __call__(self, number: int) -> None:
        given = self.batches[number % len(self.batches)]
        with torch.autocast(given.device.type, torch.bfloat16):
            logits = self.model(given)
        loss = F.cross_entropy(logits.float(), self.labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.reads:
            loss.item(), norm.item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
