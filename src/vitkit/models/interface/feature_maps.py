"""`FeatureMaps`: a ViT as the backbone of a detector, with maps of some layers as its result."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from vitkit.errors import SettingError
from vitkit.models.interface.backbone import Backbone, OutputFormat, check_format, take_layers
from vitkit.shapes import Images


class FeatureInfo:
    """The module, channels and pixels per cell of each map, as timm's class of this name.

    Args:
        info: info of every block; `ViT.feature_info`.
        out_indices: the blocks whose maps are returned.
    """

    def __init__(self, info: list[dict[str, Any]], out_indices: Sequence[int]) -> None:
        self.info = info
        self.out_indices = tuple(out_indices)

    def get(self, key: str) -> list[Any]:
        """Return one fact about each map, such as `num_chs`."""
        return [self.info[layer][key] for layer in self.out_indices]

    def channels(self) -> list[int]:
        """Return the channels D of each map."""
        return self.get("num_chs")

    def reduction(self) -> list[int]:
        """Return the pixels per cell of each map, the larger side of a patch."""
        return self.get("reduction")

    def module_name(self) -> list[str]:
        """Return the name of the block that each map is the output of."""
        return self.get("module")

    def get_dicts(self) -> list[dict[str, Any]]:
        """Return all facts about each map."""
        return [self.info[layer] for layer in self.out_indices]

    def __getitem__(self, layer: int) -> dict[str, Any]:
        return self.info[layer]

    def __len__(self) -> int:
        return len(self.info)


class FeatureMaps(nn.Module):
    """A ViT that returns maps of some layers: images (B, C, H, W) -> list of (B, D, gh, gw).

    `create_model(name, features_only=True)` returns it. Blocks after the last map, the last norm
    (unless it is applied) and the head are removed from the model.

    Args:
        model: a ViT, which is changed in place.
        out_indices: the last n blocks, or the numbers of some, from 0, negative ones from the end.
        norm: apply the last norm to each map.
        output_fmt: `NCHW`, or `NLC` for patches row by row (B, N, D).

    Attributes:
        model: the ViT that is left; it can be saved, without its head.
        feature_info: `.channels()`, `.reduction()` and `.module_name()` of the maps.

    Raises:
        SettingError: a block that does not exist, or no ViT.

    >>> import torch
    >>> from vitkit.models.vit import ViT, ViTSpec
    >>> model = ViT(ViTSpec(image_size=32, patch_size=8, width=64, depth=4, num_heads=4,
    ...                     mlp_width=128))
    >>> backbone = FeatureMaps(model, out_indices=[0, 2])
    >>> [tuple(m.shape) for m in backbone(torch.zeros(2, 3, 32, 48))], len(model.blocks)
    ([(2, 64, 4, 6), (2, 64, 4, 6)], 3)
    >>> backbone.feature_info.channels(), backbone.feature_info.reduction()
    ([64, 64], [8, 8])
    """

    def __init__(
        self,
        model: Backbone,
        out_indices: int | Sequence[int] = 3,
        *,
        norm: bool = False,
        output_fmt: OutputFormat = "NCHW",
    ) -> None:
        super().__init__()
        check_format(output_fmt)
        if not isinstance(model, Backbone):
            raise SettingError(f"a {type(model).__name__} is not a vitkit.ViT; pass one")
        self.out_indices = take_layers(out_indices, len(model.blocks))
        _remove_unused(model, self.out_indices[-1] + 1, norm)
        self.feature_info = FeatureInfo(model.feature_info, self.out_indices)
        self.model = model
        self.norm = norm
        self.output_fmt: OutputFormat = output_fmt

    def forward(self, images: Images) -> list[Float[Tensor, "B ..."]]:
        """Return the maps in the order of the blocks.

        Raises:
            ShapeError: another number of channels, or sides that the patch does not divide.
        """
        maps: list[Tensor] = self.model.forward_intermediates(
            images,
            self.out_indices,
            norm=self.norm,
            output_fmt=self.output_fmt,
            intermediates_only=True,
        )
        return maps


def _remove_unused(model: Backbone, depth: int, norm: bool) -> None:
    """Remove everything that maps of the first `depth` blocks do not need, also in the spec."""
    old = model.spec
    drop_path = old.drop_path
    if old.drop_path_schedule == "linear" and old.depth > 1:
        # The drop path rates of the remaining blocks rise to that of the new last block.
        drop_path *= (depth - 1) / (old.depth - 1)
    # A norm after pooling is not a norm of tokens.
    keeps_norm = norm and old.norm_before_pool and old.final_norm
    model.fc_norm, model.pre_logits = nn.Identity(), nn.Identity()
    del model.blocks[depth:]
    if not keeps_norm:
        model.norm = nn.Identity()
    model.spec = old.replace(
        depth=depth,
        drop_path=drop_path,
        representation_width=None,
        final_norm=keeps_norm,
    )
    # Some pooling must be named in the spec; these have no weights.
    model.reset_classifier(0, "token" if old.class_token else "avg")
