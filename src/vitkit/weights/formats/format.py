"""What a format is: how its files are known, what they say of the model, and its table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from vitkit.io.atomic import FileWriter
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.converting.fold import Capabilities, Fitted
from vitkit.weights.files.open import Header, Source
from vitkit.weights.formats.key_table import Table
from vitkit.weights.formats.vitkit import ABOUT, about, safetensors_writer

Sure = Literal["stored", "shapes", "usual"]
"""How a value is known: the file says it; shapes force it; files of this format usually have it."""


@dataclass(frozen=True)
class Inferred:
    """What a file of some format says of its model.

    Attributes:
        spec: the architecture.
        preprocess: what images become.
        classes: the K class names in the order of the logits; empty where the file has none.
        sure: spec field, or `preprocess`, -> how it is known.
        warnings: one line each.
        left_out: names of tensors of the file that are not of this model.
    """

    spec: ViTSpec
    preprocess: Preprocess
    classes: tuple[str, ...] = ()
    sure: Mapping[str, Sure] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bundle:
    """A model on its way to a file.

    Attributes:
        spec: the architecture, which the format holds.
        tensors: under the format's names, float32.
        preprocess: what images become.
        classes: the class names, or none.
    """

    spec: ViTSpec
    tensors: Mapping[str, Tensor]
    preprocess: Preprocess
    classes: tuple[str, ...]


Writer = Callable[[Bundle], dict[str, FileWriter]]
"""File name -> content, for a folder; a single file where there is one."""


@dataclass(frozen=True)
class Format:
    """One published way to store a ViT.

    Attributes:
        name: as people say it, such as `huggingface`.
        detect: whether a file is of this format, by names and shapes alone.
        prepare: brings older or other names of the format to the ones its table has.
        infer: what a prepared file says of the model; overrides are spec fields the user gives.
        table: the rows between its names and ours, for a spec.
        capabilities: for each of its classes, spec field -> the values its models can have; any for
        a
            field not named.
        write: the files of a folder in this format.
        fixed: fields that the code of the format decides, whatever model a file is of.
        settle: exact changes that depend on the numbers, after those that the spec asks for.
        resampling: how its library brings learned positions to another image size; `None` where
            it takes one size only.
    """

    name: str
    detect: Callable[[Header], bool]
    prepare: Callable[[Source], Source]
    infer: Callable[[Header, Mapping[str, Any]], Inferred]
    table: Callable[[ViTSpec], Table]
    capabilities: tuple[Capabilities, ...]
    write: Writer
    fixed: frozenset[str] = frozenset()
    settle: Callable[[Fitted], Fitted] = lambda fitted: fitted
    resampling: Callable[[ViTSpec], str | None] = lambda spec: None


CODE = frozenset(("activation", "norm_eps", "position_resampling"))
"""Fields that code with one kind of model decides, whatever model a file is of."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "stem": ("convolution", "linear"), "patch_bias": (True,), "class_token": (True,),
    "num_registers": (0,), "positions": ("learned",), "embedding_norm": (False,),
    "block": ("pre_norm",), "norm": ("layer",), "norm_eps": (1e-6,), "activation": ("gelu",),
    "mlp": ("plain",), "qkv_bias": (True,), "qk_norm": (False,), "pooling": ("cls",),
    "final_norm": (True,), "norm_before_pool": (True,), "head_width": (None,),
}  # fmt: skip
"""What the ViT of the first paper is in every PyTorch code: what all their `capabilities` share."""
SINGLE: dict[str, tuple[Any, ...]] = {
    "distillation_token": (False,), "positions_cover_prefix": (True,), "layer_scale": (None,),
}  # fmt: skip
"""A class token alone, with a position, and branches that are not scaled."""


def safetensors_file(bundle: Bundle, metadata: Mapping[str, str] | None = None) -> FileWriter:
    """The bundle's tensors as one safetensors file, whose header says what its format cannot."""
    said = about(bundle.spec, bundle.preprocess, bundle.classes)
    return safetensors_writer(bundle.tensors, {ABOUT: json.dumps(said), **(metadata or {})})
