"""vitkit's own file: one `.safetensors` with the weights and everything needed to use them.

The tensors have timm's names, so timm loads them as they are. The header's metadata has one JSON
document under the key `vitkit`: format version, spec, preprocessing, class names, versions, a
sha256 for each group of tensors, and whatever the writer adds (recipe, metrics, data fingerprint,
licence). Reading checks all of it against the header's shapes before any tensor is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.distributed import is_sharded
from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter, replacing
from vitkit.io.caches import tensor_digests
from vitkit.messages import plural
from vitkit.models.interface.classifier import COMPILED
from vitkit.models.layers import eval_mode
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.catalogue import with_assumption
from vitkit.weights.checkpoint import blank_model, tensor_shapes
from vitkit.weights.files import (
    WEIGHT_DTYPES,
    Header,
    Shapes,
    Source,
    count_not_finite,
    safetensors_writer,
)
from vitkit.weights.formats.format import (
    METADATA_KEY,
    Description,
    model_description,
    read_description,
)

OWN_VERSION = 1
"""Version of the format, written into every file."""
DESCRIBED = ("format_version", "spec", "preprocess", "classes", "versions", "sha256")
"""Keys of the description that `save` writes itself."""
_version = cache(version)  # each call parses a file of metadata


def save(
    path: str | Path,
    model: nn.Module,
    *,
    preprocess: Preprocess | None = None,
    classes: Sequence[str] = (),
    **metadata: Any,
) -> Path:
    """Write a model as one self-describing file, all of it or nothing.

    A file that `load` could not read is never written.

    Args:
        path: a file ending in `.safetensors`; an older one is replaced only when the new is
            complete.
        model: a `ViT`, also one that is compiled or wrapped for data parallelism. Its spec goes
            into the file; a linear layer put in place of `head` counts as the model's head.
        preprocess: how images are resized and normalised for it; needed, unless the model comes
            from pretrained weights, whose preprocessing is the default.
        classes: the K class names in the order of the logits; default those of the pretrained
            weights, unless the model has another number of classes, or a new head.
        **metadata: further JSON values, such as `metrics`, `recipe` or `licence`.

    Returns:
        The path.

    Raises:
        CheckpointError: another ending; no `ViT`; a model with a `backbone`, adapters, pruning or
            parametrizations, which no spec describes, or with hooks or layers that change its
            logits; weights that are not finite; class names that are no texts or do not fit the
            head; images of other channels than the model's; metadata that JSON cannot hold (NaN
            among them), or more than 25 MB of them.
        OutputError: the file cannot be written; an older file is untouched.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"the first argument is a {type(path).__name__}, not a path; write "
            "vitkit.save('model.safetensors', model, preprocess=checkpoint.preprocess)"
        )
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: expected a name that ends in .safetensors")
    vit = unwrapped(model, path)
    if vit.origin is not None:
        preprocess = preprocess or vit.origin.preprocess
        classes = () if classes is None else class_names(classes, path)
        if not classes and len(vit.origin.classes) == vit.spec.num_classes:
            classes = vit.origin.classes
            metadata = with_assumption(metadata) if vit.origin.classes_assumed else metadata
    if not isinstance(preprocess, Preprocess):
        raise CheckpointError(
            f"{path}: preprocess= is missing (how images are resized and normalised for the "
            "model); pass checkpoint.preprocess of the weights that you started from, or a "
            "vitkit.Preprocess"
        )
    # All checks of the model are made before the file on disk is touched.
    writer = own_file_writer(model, preprocess, classes, metadata, path=path)
    with replacing(path, needed=writer.size) as temporary:
        writer.write(temporary)
    return path


def own_file_writer(
    model: nn.Module,
    preprocess: Preprocess,
    classes: Sequence[str],
    metadata: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    *,
    path: Path,
) -> FileWriter:
    """Return the writer of the file that `save` writes.

    Args:
        model: as for `save`.
        preprocess: as for `save`.
        classes: as for `save`.
        metadata: as for `save`.
        dtype: dtype of the tensors in the file; default as in the model.
        path: the file, for messages.

    Raises:
        CheckpointError: as for `save`.
    """
    spec, state = as_saved(model, path)
    # Cast before the checks: a number may be finite in float32 and not in float16.
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in state.items()}
    _refuse_unusable(tensors, path)
    # Our own entries come last, so that metadata of an older file never replace them.
    document = {
        **metadata,
        "format_version": OWN_VERSION,
        **model_description(spec, preprocess, class_names(classes, path)),
        "versions": {"vitkit": _version("vitkit"), "torch": torch.__version__},
        "sha256": tensor_digests(tensors),
    }
    try:
        text = json.dumps(document, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the metadata are not JSON: {error}; pass plain values"
        ) from None
    # Parsed as reading the file will parse it, so that errors appear before it is written.
    read_description(Header(path, {}, {}, {METADATA_KEY: text}))
    return safetensors_writer(tensors, {METADATA_KEY: text}, path)


def class_names(classes: object, path: Path) -> tuple[str, ...]:
    """Return the class names of any iterable, such as an array of numpy.

    Raises:
        CheckpointError: anything but several texts.
    """
    names = [classes]  # a single text is a mistake, though it could be iterated
    if isinstance(classes, Iterable) and not isinstance(classes, str):
        names = list(classes)
    for name in names:
        if not isinstance(name, str) or isinstance(classes, str):
            raise CheckpointError(
                f"{path}: classes contains {name!r}; pass a list of class names, such as ['cat', "
                "'dog']"
            )
    return tuple(map(str, names))  # JSON has no texts of numpy


def read_own(source: Source, description: Description) -> dict[str, Tensor]:
    """Read the tensors of a file of ours, checked against its description and its digests.

    Raises:
        CheckpointError: weights that do not fit the spec in the file, or are damaged.
    """
    check_description(source.header, description)
    tensors = {name: source[name] for name in source}
    # A file without digests is read, too; where there are some, each group must have its own.
    expected = description.document.get("sha256")
    if expected is not None:
        actual = tensor_digests(tensors)
        for group in actual:
            if not isinstance(expected, dict) or expected.get(group) != actual[group]:
                raise CheckpointError(
                    f"{source.header.path}: {group} is damaged: its sha256 is not the one that the "
                    "header states; download or copy the file again"
                )
    return tensors


def check_description(header: Header, description: Description) -> None:
    """Check a description against the header: version, names and shapes; no tensor is read.

    Raises:
        CheckpointError: a newer version; tensors missing, unknown, or of another shape.
    """
    file_version = description.document.get("format_version")
    if type(file_version) is not int or not 1 <= file_version <= OWN_VERSION:
        raise CheckpointError(
            f"{header.path}: format version {file_version!r}; this vitkit reads 1 to "
            f"{OWN_VERSION}; upgrade vitkit"
        )
    # Checked before `tensor_shapes` builds the model: a file may declare a million blocks.
    blocks = description.spec.depth + sum(description.spec.resnet_layers)
    difference = f"{blocks} blocks in {len(header.shapes)} tensors"
    if blocks <= len(header.shapes):
        difference = _difference(tensor_shapes(description.spec), header.shapes)
    if difference:
        raise CheckpointError(f"{header.path}: contradicts the spec in the file: {difference}")


def _difference(expected: Shapes, actual: Shapes) -> str:
    """Describe how tensors differ from those of a spec, or return an empty text."""
    missing = sorted(expected.keys() - actual.keys())
    unknown = sorted(actual.keys() - expected.keys())
    if missing or unknown:
        return (
            f"{plural(len(missing), 'tensor')} missing ({', '.join(missing[:5]) or 'none'}), "
            f"{len(unknown)} unknown ({', '.join(unknown[:5]) or 'none'})"
        )
    for name, shape in actual.items():
        if shape != expected[name]:
            return f"{name} has shape {shape}, the spec needs {expected[name]}"
    return ""


# The spec and the tensors of a model to save: without wrappers, with its present head.
#
# A file that could not be read again must not be written, so every difference between a model and
# its spec is found here, or refused with the call that removes it.

REMEDIES = {
    "lora_": "merge the adapters first: model = peft_model.merge_and_unload()",
    "weight_orig": "end the pruning first: torch.nn.utils.prune.remove(module, 'weight')",
    "parametrizations.": (
        "end the parametrization first: "
        "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
    ),
}
"""Part of a tensor's name that a spec does not know -> the call that makes it a plain weight."""


def as_saved(model: object, path: Path) -> tuple[ViTSpec, dict[str, Tensor]]:
    """Return the spec of a model as it is now, and its tensors by the names of that spec.

    `torch.compile`, data parallelism and `AveragedModel` are unwrapped. Another linear layer in
    place of `head` changes the number of classes; an `nn.Identity` there means that the model has
    no head.

    Args:
        model: a `ViT`, or one in such a wrapper.
        path: the file to be written, for messages.

    Raises:
        CheckpointError: no ViT, or one whose tensors no spec describes, or one that computes other
            logits than its tensors alone do, such as by a hook.
    """
    vit = unwrapped(model, path)
    if vit.spec.stem == "backbone":
        raise CheckpointError(
            f"{path}: the file cannot describe the model's own backbone; save its state_dict() "
            "beside the code that builds the backbone, or use stem 'resnet'"
        )
    spec, state = present_state(vit)
    _refuse_misfits(vit, spec, state, path)
    _refuse_unsaved_changes(vit, spec, state, path)
    return spec, state


def present_state(vit: ViT) -> tuple[ViTSpec, dict[str, Tensor]]:
    """Return the spec of a model with the head that it has now, and its tensors by its names."""
    spec = vit.spec.replace(num_classes=vit.num_classes)
    # Single blocks may be compiled, too.
    state = {name.replace(f"{COMPILED}.", ""): t for name, t in vit.state_dict().items()}
    if "head.weight" in state and spec.num_classes:  # a linear layer may have no bias
        state.setdefault("head.bias", state["head.weight"].new_zeros(spec.num_classes))
    return spec, state


def _refuse_unusable(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse tensors that reading the file would refuse: no floats, or not finite."""
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.dtype not in WEIGHT_DTYPES:
            kind = "on the meta device and has no values" if tensor.is_meta else tensor.dtype
            raise CheckpointError(f"{path}: {name} is {kind}; expected floats")
        not_finite = count_not_finite(tensor)
        if not_finite:
            raise CheckpointError(
                f"{path}: {name}: {not_finite} of {tensor.numel()} numbers are NaN or infinite in "
                "float32, and such a file could not be loaded; save an earlier model"
            )


def unwrapped(model: object, path: Path) -> ViT:
    """Return the ViT inside of any wrappers.

    Raises:
        CheckpointError: there is none.
    """
    inner = model
    # Wrappers may be nested: compiled inside of data parallelism, averaged on top.
    while not isinstance(inner, ViT):
        wrapped = getattr(inner, COMPILED, None) or getattr(inner, "module", None)
        if not isinstance(wrapped, nn.Module):
            break
        if isinstance(inner, nn.Module) and (inner._forward_hooks or inner._forward_pre_hooks):
            raise CheckpointError(
                f"{path}: a file cannot hold the forward hooks of the {type(inner).__name__} "
                "around the model; remove them (handle.remove())"
            )
        inner = wrapped
    if isinstance(inner, ViT):
        return inner
    remedy = "pass a vitkit.ViT, such as checkpoint.model"
    if hasattr(model, "merge_and_unload"):
        remedy = REMEDIES["lora_"]
    elif isinstance(getattr(model, "model", None), ViT):  # `FeatureMaps`
        remedy = "pass the ViT in it, its .model"
    raise CheckpointError(f"{path}: {type(model).__name__} is not a ViT; {remedy}")


def _refuse_misfits(vit: ViT, spec: ViTSpec, state: Mapping[str, Tensor], path: Path) -> None:
    """Refuse a model whose tensors are not those of its spec."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    difference = _difference(tensor_shapes(spec), shapes)
    if not difference:
        return
    remedies = [text for part, text in REMEDIES.items() if any(part in name for name in state)]
    if not remedies and "head." in difference:
        remedies = [
            f"model.head is a {type(vit.head).__name__}, and a file can hold only a "
            f"torch.nn.Linear({spec.head_inputs}, K) there, without other layers (dropout before "
            "it is the field head_dropout)"
        ]
    remedy = "; or ".join([*remedies, "save its state_dict() beside the code that builds it"])
    raise CheckpointError(f"{path}: the model differs from its spec: {difference}; {remedy}")


# Changes to a model that a file of weights cannot store: hooks, other layers, other methods.
#
# Where a model differs from a new one of its spec in more than its tensors, one image decides: both
# must give the same logits.

TOLERANCE = 1e-5
"""Largest difference of logits, as a part of the largest logit: compiled layers round otherwise."""


def _refuse_unsaved_changes(
    vit: ViT, spec: ViTSpec, state: Mapping[str, Tensor], path: Path
) -> None:
    """Refuse a model that computes other logits than a file of its tensors would."""
    changed = _layers(vit) != _layers(blank_model(spec)) or any(map(_has_own_code, vit.modules()))
    # A part of a model cannot be run, and tensors on the meta device have no values.
    if not changed or any(t.is_meta or is_sharded(t) for t in state.values()):
        return
    effect = _effect(vit, spec, state)
    if effect:
        raise CheckpointError(
            f"{path}: a file holds tensors alone, and this model has hooks, methods or layers of "
            f"its own: loaded again, {effect}; remove hooks (handle.remove()) and put the layers "
            "of its spec back, or save its state_dict() beside the code that builds it"
        )


def _layers(model: ViT) -> dict[str, tuple[type, str]]:
    """Return class and settings of each layer, without the wrappers of compiled ones."""
    layers = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module._modules.get(COMPILED), nn.Module):
            plain_name = f".{name}".replace(f".{COMPILED}", "")
            layers[plain_name] = (type(module), module.extra_repr())
    return layers


def _has_own_code(module: nn.Module) -> bool:
    """Return True for a layer with hooks, or with a method in place of its class's."""
    if module._forward_hooks or module._forward_pre_hooks:
        return True
    if isinstance(module._modules.get(COMPILED), nn.Module):
        return False  # the wrapper of a compiled layer
    return any(callable(getattr(type(module), name, None)) for name in vars(module))


@torch.no_grad()
def _effect(vit: ViT, spec: ViTSpec, state: Mapping[str, Tensor]) -> str:
    """Describe how a model differs from a new one with its tensors, or return an empty string."""
    with torch.device("meta"):
        plain = ViT(spec)
    plain.load_state_dict(dict(state), assign=True)  # no copies
    plain.eval()
    like = next(plain.parameters())
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, spec.in_channels, *spec.image_size, generator=generator).to(like)
    try:
        with eval_mode(vit):
            found = vit(images)
    except Exception as error:  # noqa: BLE001 - layers and hooks of the user's own raise anything
        return f"it would return logits, and now it raises {type(error).__name__}: {error}"
    expected = plain(images).double()
    if not expected.isfinite().all():
        return ""  # tensors that are not finite have a message of their own
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return f"it would return logits {tuple(expected.shape)}, and now something else"
    scale = float(expected.abs().max().clamp(min=1e-12))
    difference = float((found.double() - expected).abs().max().nan_to_num(nan=1.0)) / scale
    if difference <= TOLERANCE:
        return ""
    return f"its logits would differ by {difference:.1g} of the largest"
