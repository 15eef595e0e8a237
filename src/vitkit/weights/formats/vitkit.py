"""Writing vitkit's own file; `weights.checkpoint` describes it, and reads it.

A file that could not be read again must not be written, so every difference between a model and
its spec is found here, or refused with the call that removes it.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit import distributed, errors
from vitkit.io import atomic, untrusted
from vitkit.models.interface.backbone import COMPILED
from vitkit.models.layers import eval_mode
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights import checkpoint as own
from vitkit.weights import files

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
        raise errors.CheckpointError(
            f"the first argument is a {type(path).__name__}, not a path; write "
            "vitkit.save('model.safetensors', model, preprocess=checkpoint.preprocess)"
        )
    path = Path(path)
    if path.suffix != ".safetensors":
        raise errors.CheckpointError(f"{path}: expected a name that ends in .safetensors")
    vit = unwrapped(model, path)
    if vit.origin is not None:
        preprocess = preprocess or vit.origin.preprocess
        classes = () if classes is None else class_names(classes, path)
        if not classes and len(vit.origin.classes) == vit.spec.num_classes:
            classes = vit.origin.classes
            metadata = own.with_assumption(metadata) if vit.origin.classes_assumed else metadata
    if not isinstance(preprocess, Preprocess):
        raise errors.CheckpointError(
            f"{path}: preprocess= is missing (how images are resized and normalised for the "
            "model); pass checkpoint.preprocess of the weights that you started from, or a "
            "vitkit.Preprocess"
        )
    # All checks of the model are made before the file on disk is touched.
    writer = own_file_writer(model, preprocess, classes, metadata, path=path)
    with atomic.replacing(path, needed=writer.size) as temporary:
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
) -> atomic.FileWriter:
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
    for name, tensor in tensors.items():
        problem = files.unusable_numbers(tensor)
        untrusted.refuse(path, {f"{name}: {problem}": problem})
    # Our own entries come last, so that metadata of an older file never replace them.
    document = {
        **metadata,
        "format_version": own.OWN_VERSION,
        **own.model_description(spec, preprocess, class_names(classes, path)),
        "versions": {"vitkit": _version("vitkit"), "torch": torch.__version__},
        "sha256": files.tensor_digests(tensors),
    }
    try:
        text = json.dumps(document, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.CheckpointError(
            f"{path}: the metadata are not JSON: {error}; pass plain values"
        ) from None
    # Parsed as reading the file will parse it, so that errors appear before it is written.
    own.read_description(files.Header(path, metadata={own.METADATA_KEY: text}))
    return files.safetensors_writer(tensors, {own.METADATA_KEY: text}, path)


def class_names(classes: object, path: Path) -> tuple[str, ...]:
    """Return the class names of any iterable, such as an array of numpy.

    Raises:
        CheckpointError: anything but several texts.
    """
    # a single text is a mistake, though it could be iterated
    several = isinstance(classes, Iterable) and not isinstance(classes, str)
    names: list[Any] = list(classes) if several else [classes]  # type: ignore[call-overload]
    wrong = [repr(name) for name in names if not isinstance(name, str) or not several]
    problem = f"classes contains {', '.join(wrong[:1])}; pass a list of class names, such as ['a']"
    untrusted.refuse(path, {problem: wrong})
    return tuple(map(str, names))  # JSON has no texts of numpy


# The spec and the tensors of a model to save: without wrappers, with its present head.

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
    backbone = (
        "the file cannot describe the model's own backbone; save its state_dict() beside the code "
        "that builds the backbone, or use stem 'resnet'"
    )
    untrusted.refuse(path, {backbone: vit.spec.stem == "backbone"})
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
        hooks = (
            f"a file cannot hold the forward hooks of the {type(inner).__name__} around the model; "
            "remove them (handle.remove())"
        )
        untrusted.refuse(path, {hooks: isinstance(inner, nn.Module) and _has_hooks(inner)})
        inner = wrapped
    if isinstance(inner, ViT):
        return inner
    remedy = "pass a vitkit.ViT, such as checkpoint.model"
    if hasattr(model, "merge_and_unload"):
        remedy = REMEDIES["lora_"]
    elif isinstance(getattr(model, "model", None), ViT):  # `FeatureMaps`
        remedy = "pass the ViT in it, its .model"
    raise errors.CheckpointError(f"{path}: {type(model).__name__} is not a ViT; {remedy}")


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _refuse_misfits(vit: ViT, spec: ViTSpec, state: Mapping[str, Tensor], path: Path) -> None:
    """Refuse a model whose tensors are not those of its spec."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    difference = own.difference_of(own.tensor_shapes(spec), shapes)
    remedies = [text for part, text in REMEDIES.items() if any(part in name for name in state)]
    if not remedies and "head." in difference:
        remedies = [
            f"model.head is a {type(vit.head).__name__}, and a file can hold only a "
            f"torch.nn.Linear({spec.head_inputs}, K) there, without other layers (dropout before "
            "it is the field head_dropout)"
        ]
    remedies.append("save its state_dict() beside the code that builds it")
    problem = f"the model differs from its spec: {difference}; {'; or '.join(remedies)}"
    untrusted.refuse(path, {problem: difference})


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
    plain = _layers(own.blank_model(spec))
    changed = _layers(vit) != plain or any(map(_has_own_code, vit.modules()))
    # A part of a model cannot be run, and tensors on the meta device have no values.
    if not changed or any(t.is_meta or distributed.is_sharded(t) for t in state.values()):
        return
    effect = _effect(vit, spec, state)
    problem = (
        "a file holds tensors alone, and this model has hooks, methods or layers of its own: "
        f"loaded again, {effect}; remove hooks (handle.remove()) and put the layers of its spec "
        "back, or save its state_dict() beside the code that builds it"
    )
    untrusted.refuse(path, {problem: effect})


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
    if _has_hooks(module):
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
