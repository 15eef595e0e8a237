"""The head of a model, read and replaced in place: timm's calls for it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vitkit.errors import SpecError
from vitkit.models.encoder import recompute_block
from vitkit.models.initialisation import HEADS, initialise
from vitkit.models.interface.intermediates import Intermediates
from vitkit.models.interface.pretrained import Origin
from vitkit.other_names import field_value
from vitkit.spec import ViTSpec

COMPILED = "_orig_mod"
"""Name of the inner module in `torch.compile`'s wrapper."""


class Backbone(Intermediates):
    """A model's inner tokens, the facts about its head, and other heads, by timm's names."""

    head: nn.Module
    head_dist: nn.Module
    attn_pool: nn.Module
    fc_norm: nn.Module
    pre_logits: nn.Module
    origin: Origin | None
    _make_pooling: Callable[[ViTSpec], nn.Module]

    @property
    def num_features(self) -> int:
        """The width E of the head's input, which `forward` returns where there is no head."""
        return self.spec.head_inputs

    @property
    def num_classes(self) -> int:
        """The number of logits; 0 without a head. A linear layer put in place of `head` counts."""
        head = getattr(self.head, COMPILED, self.head)
        if isinstance(head, nn.Identity):
            return 0
        if isinstance(head, nn.Linear):
            return head.out_features
        return self.spec.num_classes  # a layer of the user's own

    @property
    def embed_dim(self) -> int:
        """The width D of a token."""
        return self.spec.width

    def get_classifier(self) -> nn.Module:
        """Return the head, a `torch.nn.Linear`, or an `Identity` where there is none."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Put a fresh head in place of the model's, as timm's method of this name.

        The head starts as `spec.initialisation` says, on the model's device and in its dtype.
        `spec` follows, so the model can be saved; class names are forgotten.

        Args:
            num_classes: K; 0 for none, so that `forward` returns pooled features (B, E).
            global_pool: also change the pooling: `token` (class token), `avg` (mean of the
                patches); default as it is. The last norm keeps its place.

        Raises:
            SpecError: a negative number, or a pooling that the model cannot have.

        >>> from vitkit.models.vit import ViT
        >>> model = ViT(ViTSpec(width=64, depth=1, num_heads=4, mlp_width=128))
        >>> model.reset_classifier(10, "avg")
        >>> model.num_classes, model.spec.pooling, model.get_classifier()
        (10, 'mean', Linear(in_features=64, out_features=10, bias=True))
        >>> model.reset_classifier(0)
        >>> model(torch.zeros(2, 3, 224, 224)).shape
        torch.Size([2, 64])
        """
        old = self.spec
        spec = old.replace(num_classes=num_classes, pooling=_pooling(global_pool, old))
        # Those layers have as many weights as the pooled vector has numbers.
        normed_width = old.final_norm and not old.norm_before_pool
        if spec.pooled_width != old.pooled_width and (normed_width or old.representation_width):
            raise SpecError(
                f"global_pool {global_pool!r}: the layers after the pooling are made for "
                f"{old.pooling!r}, which is {old.pooled_width} wide; leave global_pool out"
            )
        if spec.pooling != old.pooling:
            self.attn_pool = self._make_pooling(spec)
        # Made on the CPU, then put where the model is, in its dtype and mode.
        like = next(self.parameters())
        for name, head in fresh_heads(spec).items():
            setattr(self, name, head.to(like.device, like.dtype).train(self.training))
        self.spec = spec
        if self.origin is not None:
            self.origin = replace(self.origin, classes=())

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass, which saves memory; or keep activations.

        >>> from vitkit.models.vit import ViT
        >>> model = ViT(ViTSpec(width=64, depth=1, num_heads=4, mlp_width=128))
        >>> model.set_grad_checkpointing()
        >>> model(torch.zeros(1, 3, 224, 224)).sum().backward()  # the same gradients
        """
        self.run_block = recompute_block if enable else None


def is_of_head(name: str) -> bool:
    """Return whether a parameter, such as `head.weight`, belongs to a head."""
    return name.partition(".")[0] in HEADS


def fresh_heads(spec: ViTSpec) -> dict[str, nn.Module]:
    """Return untrained heads by name, made on the CPU, so that every device has the same ones.

    They have the scheme of `spec.initialisation`, from torch's global generator, and the bias
    `spec.head_bias`; without classes they are `Identity`.
    """
    names = HEADS if spec.distillation_token else HEADS[:1]
    if spec.num_classes == 0:
        return {name: nn.Identity() for name in names}
    linear: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    heads = nn.ModuleDict(
        {name: nn.Linear(spec.head_inputs, spec.num_classes, **linear) for name in names}
    )
    initialise(heads, spec)
    return dict(heads)


def _pooling(global_pool: str | None, spec: ViTSpec) -> str:
    """Return the pooling that timm's `global_pool` means for a model."""
    if global_pool is None:
        return spec.pooling
    pooling: str = field_value("global_pool", global_pool)
    if pooling == "map" != spec.pooling:
        raise SpecError("global_pool 'map': the model has no attention pooling; pass token or avg")
    return pooling
