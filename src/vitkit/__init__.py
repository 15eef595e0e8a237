"""vitkit: plain Vision Transformers, from a folder of images to a model you can look into.

Public names are imported at their first use, so that `import vitkit` takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitkit.api import compare as compare
    from vitkit.api import show_batch as show_batch
    from vitkit.api import train as train
    from vitkit.data.augmentation.pipeline import training_transform as training_transform
    from vitkit.data.checks.check import check as check
    from vitkit.data.datasets.dataset import Dataset as Dataset
    from vitkit.data.sources.open import open_dataset as open_dataset
    from vitkit.engines.choose import EngineOptions as EngineOptions
    from vitkit.engines.inference_folds import optimized as optimized
    from vitkit.errors import CheckpointError as CheckpointError
    from vitkit.errors import DataError as DataError
    from vitkit.errors import DeviceError as DeviceError
    from vitkit.errors import ImageError as ImageError
    from vitkit.errors import Interrupted as Interrupted
    from vitkit.errors import LoaderError as LoaderError
    from vitkit.errors import MissingExtraError as MissingExtraError
    from vitkit.errors import NonFiniteError as NonFiniteError
    from vitkit.errors import OutputError as OutputError
    from vitkit.errors import SettingError as SettingError
    from vitkit.errors import ShapeError as ShapeError
    from vitkit.errors import SpecError as SpecError
    from vitkit.errors import UserCodeError as UserCodeError
    from vitkit.errors import UserError as UserError
    from vitkit.errors import VitkitError as VitkitError
    from vitkit.evaluation.comparison import Comparison as Comparison
    from vitkit.evaluation.result import Evaluation as Evaluation
    from vitkit.explaining.explanation import Explanation as Explanation
    from vitkit.explaining.faithfulness import Faithfulness as Faithfulness
    from vitkit.explaining.faithfulness import FaithfulnessReport as FaithfulnessReport
    from vitkit.explaining.files import Animation as Animation
    from vitkit.explaining.files import plot_explanations as plot_explanations
    from vitkit.explaining.model import Artefacts as Artefacts
    from vitkit.explaining.model import ModelExplanation as ModelExplanation
    from vitkit.explaining.model import find_artefacts as find_artefacts
    from vitkit.exporting.export import ExportReport as ExportReport
    from vitkit.exporting.export import export as export
    from vitkit.exporting.exported_model import evaluate as evaluate
    from vitkit.layer_table import summary as summary
    from vitkit.models.attention import CrossAttention as CrossAttention
    from vitkit.models.attention import MultiHeadSelfAttention as MultiHeadSelfAttention
    from vitkit.models.attention import scaled_dot_product_attention as scaled_dot_product_attention
    from vitkit.models.embedding import PatchEmbedding as PatchEmbedding
    from vitkit.models.encoder import Encoder as Encoder
    from vitkit.models.encoder import EncoderBlock as EncoderBlock
    from vitkit.models.interface.feature_maps import FeatureMaps as FeatureMaps
    from vitkit.models.mlp import MLP as MLP
    from vitkit.models.readout import Features as Features
    from vitkit.models.record import Record as Record
    from vitkit.models.transformer import Transformer as Transformer
    from vitkit.models.vit import ViT as ViT
    from vitkit.plots.confusion import plot_attention as plot_attention
    from vitkit.prediction.explain_image import animate_explanation as animate_explanation
    from vitkit.prediction.explain_image import explain as explain
    from vitkit.prediction.explain_image import explain_model as explain_model
    from vitkit.prediction.explain_image import faithfulness_report as faithfulness_report
    from vitkit.prediction.explain_image import plot_attention_sheet as plot_attention_sheet
    from vitkit.prediction.find import find_images as find_images
    from vitkit.prediction.predictor import Prediction as Prediction
    from vitkit.prediction.predictor import Predictor as Predictor
    from vitkit.prediction.predictor import embed as embed
    from vitkit.reporting.report import report as report
    from vitkit.spec import Preprocess as Preprocess
    from vitkit.spec import ViTSpec as ViTSpec
    from vitkit.train_settings import TrainSettings as TrainSettings
    from vitkit.training.config.train_config import TrainConfig as TrainConfig
    from vitkit.training.distillation import DistillWrapper as DistillWrapper
    from vitkit.training.monitoring.figures import LearningCurves as LearningCurves
    from vitkit.training.optimization.parameters import freeze as freeze
    from vitkit.training.optimization.parameters import parameter_groups as parameter_groups
    from vitkit.training.optimization.precision import checkpoint_gradients as checkpoint_gradients
    from vitkit.training.run import TrainResult as TrainResult
    from vitkit.training.step import Objective as Objective
    from vitkit.training.step import TrainingStep as TrainingStep
    from vitkit.training.trainer import Callback as Callback
    from vitkit.training.trainer import Trainer as Trainer
    from vitkit.weights.adapt import adapt as adapt
    from vitkit.weights.catalogue import list_models as list_models
    from vitkit.weights.checkpoint import Checkpoint as Checkpoint
    from vitkit.weights.convert import ConversionReport as ConversionReport
    from vitkit.weights.convert import convert as convert
    from vitkit.weights.formats.vitkit import save as save
    from vitkit.weights.inspection import Inspection as Inspection
    from vitkit.weights.inspection import inspect as inspect
    from vitkit.weights.load import load as load
    from vitkit.weights.pretrained import create_model as create_model
    from vitkit.weights.recognise_format import formats as formats
    from vitkit.weights.write import resized as resized

_HOMES: dict[str, tuple[str, ...]] = {
    "vitkit.api": (
        "compare",
        "show_batch",
        "train",
    ),
    "vitkit.data.augmentation.pipeline": ("training_transform",),
    "vitkit.data.checks.check": ("check",),
    "vitkit.data.datasets.dataset": ("Dataset",),
    "vitkit.data.sources.open": ("open_dataset",),
    "vitkit.engines.choose": ("EngineOptions",),
    "vitkit.engines.inference_folds": ("optimized",),
    "vitkit.errors": (
        "CheckpointError",
        "DataError",
        "DeviceError",
        "ImageError",
        "Interrupted",
        "LoaderError",
        "MissingExtraError",
        "NonFiniteError",
        "OutputError",
        "SettingError",
        "ShapeError",
        "SpecError",
        "UserCodeError",
        "UserError",
        "VitkitError",
    ),
    "vitkit.evaluation.comparison": ("Comparison",),
    "vitkit.evaluation.result": ("Evaluation",),
    "vitkit.explaining.explanation": ("Explanation",),
    "vitkit.explaining.faithfulness": (
        "Faithfulness",
        "FaithfulnessReport",
    ),
    "vitkit.explaining.files": (
        "Animation",
        "plot_explanations",
    ),
    "vitkit.explaining.model": (
        "Artefacts",
        "ModelExplanation",
        "find_artefacts",
    ),
    "vitkit.exporting.export": (
        "ExportReport",
        "export",
    ),
    "vitkit.exporting.exported_model": ("evaluate",),
    "vitkit.layer_table": ("summary",),
    "vitkit.models.attention": (
        "CrossAttention",
        "MultiHeadSelfAttention",
        "scaled_dot_product_attention",
    ),
    "vitkit.models.embedding": ("PatchEmbedding",),
    "vitkit.models.encoder": (
        "Encoder",
        "EncoderBlock",
    ),
    "vitkit.models.interface.feature_maps": ("FeatureMaps",),
    "vitkit.models.mlp": ("MLP",),
    "vitkit.models.readout": ("Features",),
    "vitkit.models.record": ("Record",),
    "vitkit.models.transformer": ("Transformer",),
    "vitkit.models.vit": ("ViT",),
    "vitkit.plots.confusion": ("plot_attention",),
    "vitkit.prediction.explain_image": (
        "animate_explanation",
        "explain",
        "explain_model",
        "faithfulness_report",
        "plot_attention_sheet",
    ),
    "vitkit.prediction.find": ("find_images",),
    "vitkit.prediction.predictor": (
        "Prediction",
        "Predictor",
        "embed",
    ),
    "vitkit.reporting.report": ("report",),
    "vitkit.spec": (
        "Preprocess",
        "ViTSpec",
    ),
    "vitkit.train_settings": ("TrainSettings",),
    "vitkit.training.config.train_config": ("TrainConfig",),
    "vitkit.training.distillation": ("DistillWrapper",),
    "vitkit.training.monitoring.figures": ("LearningCurves",),
    "vitkit.training.optimization.parameters": (
        "freeze",
        "parameter_groups",
    ),
    "vitkit.training.optimization.precision": ("checkpoint_gradients",),
    "vitkit.training.run": ("TrainResult",),
    "vitkit.training.step": (
        "Objective",
        "TrainingStep",
    ),
    "vitkit.training.trainer": (
        "Callback",
        "Trainer",
    ),
    "vitkit.weights.adapt": ("adapt",),
    "vitkit.weights.catalogue": ("list_models",),
    "vitkit.weights.checkpoint": ("Checkpoint",),
    "vitkit.weights.convert": (
        "ConversionReport",
        "convert",
    ),
    "vitkit.weights.formats.vitkit": ("save",),
    "vitkit.weights.inspection": (
        "Inspection",
        "inspect",
    ),
    "vitkit.weights.load": ("load",),
    "vitkit.weights.pretrained": ("create_model",),
    "vitkit.weights.recognise_format": ("formats",),
    "vitkit.weights.write": ("resized",),
}
"""Module -> the public names that it defines."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__: str
__all__ = [
    "MLP",
    "Animation",
    "Artefacts",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "Comparison",
    "ConversionReport",
    "CrossAttention",
    "DataError",
    "Dataset",
    "DeviceError",
    "DistillWrapper",
    "Encoder",
    "EncoderBlock",
    "EngineOptions",
    "Evaluation",
    "Explanation",
    "ExportReport",
    "Faithfulness",
    "FaithfulnessReport",
    "FeatureMaps",
    "Features",
    "ImageError",
    "Inspection",
    "Interrupted",
    "LearningCurves",
    "LoaderError",
    "MissingExtraError",
    "ModelExplanation",
    "MultiHeadSelfAttention",
    "NonFiniteError",
    "Objective",
    "OutputError",
    "PatchEmbedding",
    "Prediction",
    "Predictor",
    "Preprocess",
    "Record",
    "SettingError",
    "ShapeError",
    "SpecError",
    "TrainConfig",
    "TrainResult",
    "TrainSettings",
    "Trainer",
    "TrainingStep",
    "Transformer",
    "UserCodeError",
    "UserError",
    "ViT",
    "ViTSpec",
    "VitkitError",
    "adapt",
    "animate_explanation",
    "check",
    "checkpoint_gradients",
    "compare",
    "convert",
    "create_model",
    "embed",
    "evaluate",
    "explain",
    "explain_model",
    "export",
    "faithfulness_report",
    "find_artefacts",
    "find_images",
    "formats",
    "freeze",
    "inspect",
    "list_models",
    "load",
    "open_dataset",
    "optimized",
    "parameter_groups",
    "plot_attention",
    "plot_attention_sheet",
    "plot_explanations",
    "report",
    "resized",
    "save",
    "scaled_dot_product_attention",
    "show_batch",
    "summary",
    "train",
    "training_transform",
]


def __getattr__(name: str) -> object:
    """Import a public name from its module at its first use (PEP 562)."""
    if name == "__version__":
        # reading it takes longer than all other imports of the command line
        value = import_module("importlib.metadata").version("vitkit")
    elif name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
    else:
        names = import_module("vitkit.other_names")
        hint = ""
        if name in names.CLASSES:
            hint = f"; write vitkit.{names.CLASSES[name]}"
        elif name in names.MOVED:
            hint = f"; it is in {names.MOVED[name]} now"
        raise AttributeError(f"module 'vitkit' has no attribute {name!r}{hint}")
    globals()[name] = value  # so that this function is called once for each name
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
