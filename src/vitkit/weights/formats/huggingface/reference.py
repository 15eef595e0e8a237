"""transformers' own models of its folders, to verify what vitkit writes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from vitkit.io.strict_json import read_json
from vitkit.spec import ViTSpec
from vitkit.weights.formats.format import BuiltModel, ReferenceLibrary
from vitkit.weights.formats.huggingface.config import is_task_model


def _logits(output: Any) -> Any:
    return output.logits


def _pooled(output: Any) -> Any:
    return output.pooler_output


def _build(path: Path, spec: ViTSpec) -> BuiltModel:
    """Build the model by the class that `config.json` names, without any network.

    Raises:
        ValueError: tensors that are missing, unknown or of another shape.
    """
    transformers: Any = importlib.import_module("transformers")
    auto_class = transformers.AutoModel
    logits = _pooled
    if is_task_model(read_json(path / "config.json")["architectures"][0]):
        auto_class = transformers.AutoModelForImageClassification
        logits = _logits
    # Mismatched sizes are not raised but reported by name, as missing and unknown tensors are.
    model, report = auto_class.from_pretrained(
        path, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
    )
    faults = [f"{kind} {sorted(names)}" for kind, names in report.items() if names]
    if faults:
        raise ValueError("; ".join(faults))
    body = model.base_model
    blocks = body.layers if hasattr(body, "layers") else body.encoder.layer
    return BuiltModel(model, blocks, logits=logits)


TRANSFORMERS = ReferenceLibrary(
    "transformers", (5, 23), ("transformers", "transformers.modeling_utils"), _build
)
