"""Other libraries as witnesses: their own model, built and filled by their own code from a file.

Who proves that a file is what its format says? The library that will read it, where it is there.
Each is imported when it is asked for, never before.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import json
import logging
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.io.strict_json import read_json
from vitkit.spec import ViTSpec
from vitkit.weights.formats.huggingface.config import is_task_model
from vitkit.weights.formats.lucidrains import release
from vitkit.weights.formats.timm import config

WEIGHTS = "model.safetensors"
UNUSABLE = (ImportError, OSError, RuntimeError, AttributeError)
"""What an import raises where a library is missing, or does not go with what it stands on."""
REFUSALS = (AssertionError, AttributeError, LookupError, OSError, RuntimeError, SafetensorError,
            TypeError, ValueError)  # fmt: skip
"""What libraries raise for a file that is not theirs."""


def _output(before: Any, after: Any) -> Any:
    return after


class Built(NamedTuple):
    """A model of another library, with its weights.

    Attributes:
        model: images (B, C, H, W) -> what `read` knows.
        blocks: the module at the end of each block.
        tokens: what goes into that module and what comes out -> the block's tokens (B, T, D).
        read: what the model gives -> logits (B, K).
    """

    model: nn.Module
    blocks: Iterable[nn.Module]
    tokens: Callable[[Any, Any], Any] = _output
    read: Callable[[Any], Any] = lambda output: output


@dataclass(frozen=True)
class Foreign:
    """Another library's model of a file, in eval mode and float32; call it with images.

    Attributes:
        library: its name and version, such as `timm 1.0.31`.
        built: the model and how to listen to it.
    """

    library: str
    built: Built

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        """Each block's tokens (B, T, D), and logits (B, K) or pooled features (B, E).

        Tokens stand in our order in all of these libraries: class, distillation, registers,
        patches row by row; before the last norm.

        Args:
            images: (B, C, H, W) float32, normalised, of the size that the spec has.
        """
        model, blocks, tokens, read = self.built
        kept: list[Tensor] = []

        def keep(block: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            kept.append(tokens(inputs[0], output))

        hooks = [block.register_forward_hook(keep) for block in blocks]
        try:
            with _quiet():
                return kept, read(model(images))
        finally:
            for hook in hooks:
                hook.remove()


def foreign(target: str, place: Path, spec: ViTSpec) -> Foreign | str:
    """The model that the target's own library makes of the files written.

    Weights are mapped from the file where the library's classes allow it; none are drawn first.

    Args:
        target: a format, one of `formats()`.
        place: what was written in it: a folder, or one file.
        spec: the model in the files.

    Returns:
        The model; or, in one line, why there is none and how to get one: no package reads the
        format; it is missing, broken or older than what vitkit is tested with; no class of it
        computes such a model (timm's registry has none, torchvision's takes square RGB images).

    Raises:
        CheckpointError: the library does not take the file, to the last tensor, for its own.
    """
    if target not in LIBRARIES:
        return f"no package that could be installed reads the format {target}"
    distribution, oldest, modules, build = LIBRARIES[target]
    needed = f"{distribution}>={'.'.join(map(str, oldest))}"
    with _quiet():
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return f"{distribution} is not installed; pip install '{needed}'"
        library = f"{distribution} {version}"
        try:
            for module in modules:
                importlib.import_module(module)
        except UNUSABLE as error:
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
            return (
                f"{library} cannot be imported ({reason}); mend its installation until "
                f"python -c 'import {modules[-1]}' works"
            )
        if [int(number) for number in re.findall(r"\d+", version)[: len(oldest)]] < [*oldest]:
            return f"{library} is older than what vitkit is tested with; pip install '{needed}'"
        try:
            built = build(place, spec)
        except REFUSALS as error:
            said = textwrap.shorten(str(error), 300, placeholder=" ...")
            raise CheckpointError(
                f"{place}: {library} does not take it for its own: {said}; do not use it, and "
                f"convert to another format"
            ) from None
    if built is None:
        return f"{library} has no class that computes this model"
    return Foreign(library, built._replace(model=built.model.eval().float()))


@contextmanager
def _quiet() -> Iterator[None]:
    """What the libraries log, warn of and draw on the terminal is left out."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with redirect_stderr(io.StringIO()):
                yield
    finally:
        logging.disable(level)


def _weights(place: Path) -> Path:
    return place / WEIGHTS if place.is_dir() else place


def _timm(place: Path, spec: ViTSpec) -> Built | None:
    """By `config.json`, as `timm.create_model("local-dir:FOLDER")` reads it."""
    timm: Any = importlib.import_module("timm")
    if "architecture" not in read_json(place / "config.json"):
        return None
    return _filled_timm(place, lambda: timm.create_model(f"local-dir:{place}"))


def _deit(place: Path, spec: ViTSpec) -> Built | None:
    """DeiT's own code is of timm's classes; LayerScale has other names there since DeiT III."""
    timm: Any = importlib.import_module("timm")
    found = config.architecture(spec)
    if found is None or spec.layer_scale is not None:
        return None
    name, arguments = found
    return _filled_timm(
        place, lambda: timm.create_model(name, num_classes=spec.num_classes, **arguments)
    )


def _filled_timm(place: Path, make: Callable[[], Any]) -> Built:
    models: Any = importlib.import_module("timm.models")
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu")  # for buffers that no file has
    model.load_state_dict(models.load_state_dict(str(_weights(place))), assign=True)
    for module in model.modules():
        if hasattr(module, "init_non_persistent_buffers"):
            module.init_non_persistent_buffers()
    return Built(model, model.blocks)


def _huggingface(place: Path, spec: ViTSpec) -> Built:
    """By the class that `config.json` names, with nothing from the network."""
    transformers: Any = importlib.import_module("transformers")
    task = is_task_model(read_json(place / "config.json")["architectures"][0])
    kind = transformers.AutoModelForImageClassification if task else transformers.AutoModel
    model, report = kind.from_pretrained(
        place, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
    )  # mismatched sizes are in the report, by name
    faults = [f"{what} {sorted(names)}" for what, names in report.items() if names]
    if faults:
        raise ValueError("; ".join(faults))
    body = model.base_model
    blocks = body.layers if hasattr(body, "layers") else body.encoder.layer
    return Built(model, blocks, read=lambda output: output.logits if task else output.pooler_output)


def _torchvision(place: Path, spec: ViTSpec) -> Built | None:
    """By the class of `vit_b_16`; without a head, an identity stands in its place."""
    library: Any = importlib.import_module("torchvision.models.vision_transformer")
    (height, width), (rows, columns) = spec.image_size, spec.patch_size
    if height != width or rows != columns or spec.in_channels != 3:
        return None
    with torch.device("meta"):
        model = library.VisionTransformer(
            image_size=height, patch_size=rows, num_layers=spec.depth, num_heads=spec.num_heads,
            hidden_dim=spec.width, mlp_dim=spec.mlp_width, num_classes=spec.num_classes,
            representation_size=spec.representation_width,
        )  # fmt: skip
    if not spec.num_classes:
        model.heads.head = nn.Identity()
    model.load_state_dict(load_file(_weights(place)), assign=True)
    return Built(model, model.encoder.layers)


def _lucidrains(place: Path, spec: ViTSpec) -> Built | None:
    """By the constructor's arguments in the file's header; a block ends with the sum of its MLP.

    `SimpleViT` keeps its positions beside its parameters, so they are computed once more.
    """
    if release(spec) < LIBRARIES["lucidrains"].oldest:
        return None
    library: Any = importlib.import_module("vit_pytorch")
    with safe_open(_weights(place), framework="pt") as file:
        said = json.loads(file.metadata()["vit_pytorch"])
    make = getattr(library, said.pop("class"))
    arguments = {name: tuple(v) if isinstance(v, list) else v for name, v in said.items()}
    with torch.device("meta"):
        model = make(**arguments)
    if isinstance(model.pos_embedding, nn.Parameter):
        if not spec.num_classes:
            model.mlp_head = nn.Identity()
    else:
        simple: Any = importlib.import_module("vit_pytorch.simple_vit")
        model.pos_embedding = simple.posemb_sincos_2d(*spec.grid, spec.width)
    model.load_state_dict(load_file(_weights(place)), assign=True)
    ends = [mlp for _, mlp in model.transformer.layers]
    return Built(model, ends, tokens=lambda before, after: before + after)


class Library(NamedTuple):
    """Who can read a format.

    Attributes:
        distribution: its name on the package index.
        oldest: the first version that vitkit is tested with.
        modules: what must import.
        build: their model of the files at a place, or None where no class of theirs computes it.
    """

    distribution: str
    oldest: tuple[int, ...]
    modules: tuple[str, ...]
    build: Callable[[Path, ViTSpec], Built | None]


LIBRARIES = {
    "timm": Library("timm", (1, 0, 29), ("timm",), _timm),
    "deit": Library("timm", (1, 0, 29), ("timm",), _deit),
    "huggingface": Library(
        "transformers", (5, 23), ("transformers", "transformers.modeling_utils"), _huggingface
    ),
    "torchvision": Library("torchvision", (0, 26), ("torchvision",), _torchvision),
    "lucidrains": Library("vit-pytorch", (1, 16, 1), ("vit_pytorch",), _lucidrains),
}
"""Format -> its library; the other formats are of code that is not installed as a package."""
