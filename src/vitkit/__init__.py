"""vitkit: plain Vision Transformers, from a folder of images to a model you can look into.

Public names are imported at their first use, so that `import vitkit` takes no time.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitkit.api import compare as compare
    from vitkit.api import explain as explain
    from vitkit.api import train as train
    from vitkit.data.checks.check import check as check
    from vitkit.data.sources.open import open_dataset as open_dataset
    from vitkit.errors import VitkitError as VitkitError
    from vitkit.evaluation.evaluate import evaluate as evaluate
    from vitkit.layer_table import summary as summary
    from vitkit.models.attention import CrossAttention as CrossAttention
    from vitkit.models.attention import MultiHeadSelfAttention as MultiHeadSelfAttention
    from vitkit.models.attention import scaled_dot_product_attention as scaled_dot_product_attention
    from vitkit.models.embedding import PatchEmbedding as PatchEmbedding
    from vitkit.models.encoder import Encoder as Encoder
    from vitkit.models.encoder import EncoderBlock as EncoderBlock
    from vitkit.models.mlp import MLP as MLP
    from vitkit.models.presets import list_models as list_models
    from vitkit.models.record import Record as Record
    from vitkit.models.transformer import Transformer as Transformer
    from vitkit.models.vit import ViT as ViT
    from vitkit.prediction import Prediction as Prediction
    from vitkit.prediction import Predictor as Predictor
    from vitkit.prediction import embed as embed
    from vitkit.spec import Preprocess as Preprocess
    from vitkit.spec import ViTSpec as ViTSpec
    from vitkit.training.distillation.wrapper import DistillWrapper as DistillWrapper
    from vitkit.training.optimization.activation_checkpointing import (
        checkpoint_gradients as checkpoint_gradients,
    )
    from vitkit.training.optimization.freezing import freeze as freeze
    from vitkit.training.optimization.parameter_groups import parameter_groups as parameter_groups
    from vitkit.training.step import Objective as Objective
    from vitkit.training.step import TrainingStep as TrainingStep
    from vitkit.training.trainer import Callback as Callback
    from vitkit.training.trainer import Trainer as Trainer
    from vitkit.weights.adapt import adapt as adapt
    from vitkit.weights.convert import ConversionReport as ConversionReport
    from vitkit.weights.convert import convert as convert
    from vitkit.weights.converting.resized_model import resized as resized
    from vitkit.weights.formats.registry import formats as formats
    from vitkit.weights.formats.vitkit import save as save
    from vitkit.weights.inspection import Inspection as Inspection
    from vitkit.weights.inspection import inspect as inspect
    from vitkit.weights.load import load as load
    from vitkit.weights.pretrained import create_model as create_model

_HOMES: dict[str, tuple[str, ...]] = {
    "vitkit.api": ("compare", "explain", "train"),
    "vitkit.data.checks.check": ("check",),
    "vitkit.data.sources.open": ("open_dataset",),
    "vitkit.errors": ("VitkitError",),
    "vitkit.evaluation.evaluate": ("evaluate",),
    "vitkit.layer_table": ("summary",),
    "vitkit.models.attention": (
        "CrossAttention",
        "MultiHeadSelfAttention",
        "scaled_dot_product_attention",
    ),
    "vitkit.models.embedding": ("PatchEmbedding",),
    "vitkit.models.encoder": ("Encoder", "EncoderBlock"),
    "vitkit.models.mlp": ("MLP",),
    "vitkit.models.presets": ("list_models",),
    "vitkit.models.record": ("Record",),
    "vitkit.models.transformer": ("Transformer",),
    "vitkit.models.vit": ("ViT",),
    "vitkit.prediction": ("Prediction", "Predictor", "embed"),
    "vitkit.spec": ("Preprocess", "ViTSpec"),
    "vitkit.training.distillation.wrapper": ("DistillWrapper",),
    "vitkit.training.optimization.activation_checkpointing": ("checkpoint_gradients",),
    "vitkit.training.optimization.freezing": ("freeze",),
    "vitkit.training.optimization.parameter_groups": ("parameter_groups",),
    "vitkit.training.step": ("Objective", "TrainingStep"),
    "vitkit.training.trainer": ("Callback", "Trainer"),
    "vitkit.weights.adapt": ("adapt",),
    "vitkit.weights.convert": ("ConversionReport", "convert"),
    "vitkit.weights.converting.resized_model": ("resized",),
    "vitkit.weights.formats.registry": ("formats",),
    "vitkit.weights.formats.vitkit": ("save",),
    "vitkit.weights.inspection": ("Inspection", "inspect"),
    "vitkit.weights.load": ("load",),
    "vitkit.weights.pretrained": ("create_model",),
}
"""Module -> the public names that it defines."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = _version("vitkit")
__all__ = [
    "MLP",
    "Callback",
    "ConversionReport",
    "CrossAttention",
    "DistillWrapper",
    "Encoder",
    "EncoderBlock",
    "Inspection",
    "MultiHeadSelfAttention",
    "Objective",
    "PatchEmbedding",
    "Prediction",
    "Predictor",
    "Preprocess",
    "Record",
    "Trainer",
    "TrainingStep",
    "Transformer",
    "ViT",
    "ViTSpec",
    "VitkitError",
    "adapt",
    "check",
    "checkpoint_gradients",
    "compare",
    "convert",
    "create_model",
    "embed",
    "evaluate",
    "explain",
    "formats",
    "freeze",
    "inspect",
    "list_models",
    "load",
    "open_dataset",
    "parameter_groups",
    "resized",
    "save",
    "scaled_dot_product_attention",
    "summary",
    "train",
]


def __getattr__(name: str) -> object:
    """Import a public name from its module at its first use (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'vitkit' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
