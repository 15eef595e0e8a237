"""The origin of a model's weights, and the calls of timm and transformers that read or store it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from torch import nn

from vitkit.spec import Preprocess, ViTSpec

FROM_PRETRAINED = "vitkit.weights.pretrained:from_pretrained"
SAVE_PRETRAINED = "vitkit.weights.publish:save_pretrained"
"""The functions behind the methods of these names, imported when they are called."""
Model = TypeVar("Model", bound="Pretrained")


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a model's weights come from.

    Attributes:
        source: the path, name or address that was read.
        format: one of `vitkit.formats()`.
        preprocess: how images are resized, cropped and normalised for the model.
        classes: the K class names in the order of the logits; empty where they are not known.
        licence: of published weights, as their publisher names it; empty where it is not known.
        left_out: tensors of the file that are not in the model (with `strict=False`).
        missing: tensors of the model that are not in the file, and start at random.
        classes_assumed: True if no file names the classes and they are assumed to be those of
            ImageNet-1k.
    """

    source: str
    format: str
    preprocess: Preprocess
    classes: tuple[str, ...] = ()
    licence: str = ""
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    classes_assumed: bool = False


class Pretrained(nn.Module):
    """The origin of a model's weights, and folders of weights as transformers has them."""

    spec: ViTSpec
    origin: Origin | None

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """The images that the model expects, by timm's names.

        `timm.data.create_transform(**timm.data.resolve_model_data_config(model))` makes timm's
        transform of it. Without pretrained weights: the usual mean and deviation, 0.5.

        >>> from vitkit.models.vit import ViT
        >>> ViT(ViTSpec(width=64, depth=1, num_heads=4, mlp_width=128)).pretrained_cfg["mean"]
        (0.5, 0.5, 0.5)
        """
        origin = self.origin
        if origin is None:
            return pretrained_config(self.spec, default_preprocess(self.spec))
        config = pretrained_config(self.spec, origin.preprocess)
        config |= {"source": origin.source, "license": origin.licence}
        # timm has no such key where they are not known
        if origin.classes and not origin.classes_assumed:
            config["label_names"] = list(origin.classes)
        return config

    @classmethod
    def from_pretrained(
        cls: type[Model],
        source: str | Path,
        *,
        trust_pickle: bool = False,
        strict: bool = True,
        **overrides: Any,
    ) -> Model:
        """Return a model with weights from a file, a folder, a published name or an address.

        Args:
            source: as for `vitkit.load`: `"weights/best.safetensors"`, a folder of transformers or
                timm, `"vit_base_patch16_224"`, `"hf://owner/name"`.
            trust_pickle: as for `vitkit.load`.
            strict: as for `vitkit.load`; `.origin` lists what is left out and missing.
            **overrides: as for `vitkit.create_model`: other sizes, channels or classes, to which
                the weights are adapted, and rates of dropout.

        Returns:
            The model in eval mode; `.origin` has its preprocessing and class names.

        Raises:
            CheckpointError: weights that cannot be read, or of another model.
            SpecError: an unknown field, or sizes that the model cannot have.

        >>> import tempfile
        >>> from vitkit.models.vit import ViT
        >>> model = ViT(ViTSpec(width=64, depth=1, num_heads=1, mlp_width=128, num_classes=2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = model.save_pretrained(f"{folder}/model", classes=["cat", "dog"])
        ...     again = ViT.from_pretrained(f"{folder}/model")
        >>> again.origin.classes, [file.suffix for file in files]
        (('cat', 'dog'), ['.safetensors', '.json', '.json', '.md'])
        """
        # By its name: the architecture knows no files.
        model: Model = resolve_name(FROM_PRETRAINED)(
            source, trust_pickle=trust_pickle, strict=strict, **overrides
        )
        return model

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        to: str = "auto",
        preprocess: Preprocess | None = None,
        classes: Sequence[str] | None = None,
        allow_lossy: bool = False,
    ) -> tuple[Path, ...]:
        """Write the model as a folder with a model card, as `push_to_hub` uploads it.

        Args:
            folder: created; files in it are not replaced.
            to: the format: `huggingface` loads by transformers, `timm` by timm, `vitkit` keeps
                everything. `auto` is the first of these that holds the model without loss.
            preprocess: how images are resized and normalised for it; default that of `origin`, else
                mean and deviation 0.5.
            classes: the class names; default those of `origin`. Names that are only assumed are
                marked so in files of vitkit, and left out of those of other formats.
            allow_lossy: as for `vitkit.convert`.

        Returns:
            The files written.

        Raises:
            CheckpointError: a model that the format cannot hold, as for `vitkit.save`.
            OutputError: a file exists already, or cannot be written.
        """
        files: tuple[Path, ...] = resolve_name(SAVE_PRETRAINED)(
            self, folder, to=to, preprocess=preprocess, classes=classes, allow_lossy=allow_lossy
        )
        return files


def default_preprocess(spec: ViTSpec) -> Preprocess:
    """Return the usual preprocessing of a model's images: a centre crop, mean and deviation 0.5."""
    preprocess = Preprocess(image_size=spec.image_size)
    if spec.in_channels == 1:
        return preprocess.replace(mean=(0.5,), std=(0.5,))
    return preprocess


def pretrained_config(spec: ViTSpec, preprocess: Preprocess) -> dict[str, Any]:
    """Return timm's `pretrained_cfg`: the images, and the layers replaced for new sizes."""
    first_conv = "patch_embed.proj"
    if spec.stem == "resnet":
        # Without stages, the root convolution is the whole backbone.
        first_conv = "patch_embed.backbone.conv"
        if spec.resnet_layers:
            first_conv = "patch_embed.backbone.stem.conv"
    return {
        "num_classes": spec.num_classes,
        "input_size": (spec.in_channels, *spec.image_size),
        "fixed_input_size": True,  # the position table fits one size
        "mean": preprocess.mean,
        "std": preprocess.std,
        "interpolation": preprocess.interpolation,
        "crop_pct": 1.0 if preprocess.fit == "squash" else preprocess.crop_ratio,
        "crop_mode": "center" if preprocess.fit == "crop" else "squash",
        "first_conv": first_conv,
        "classifier": ("head", "head_dist") if spec.distillation_token else "head",
    }
