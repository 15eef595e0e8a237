"""Do the weights matter? A map must change when the model is made random from the top."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from vitkit.errors import SettingError
from vitkit.explaining.truth.maps import MapMaker, rank_correlations
from vitkit.explaining.truth.statistics import mean_or_none
from vitkit.models.vit import ViT
from vitkit.shapes import Images

STRONGEST = 0.5
"""A method whose maps correlate more than this with those of a random model hardly looks at it."""


def weights_matter(
    maps: MapMaker,
    model: ViT,
    images: Images,
    classes: Int64[Tensor, " B"],
    *,
    blocks: int | None = None,
    seed: int = 0,
) -> float | None:
    """Return the mean Spearman correlation of maps before and after the top becomes random.

    "Sanity Checks for Saliency Maps" (arXiv 1810.03292), one step of its cascade. Below 0.5 is
    good.

    Args:
        maps: the method.
        model: stays as it is; a copy of it is changed.
        images: (B, C, H, W) normalised, on the model's device.
        classes: explained on both models, (B,).
        blocks: the number of last blocks that become random; default half of them.
        seed: of the random weights.

    Returns:
        In [-1, 1]; None if the maps of all images are constant before or after.

    Raises:
        SettingError: more blocks than there are.
    """
    random = with_random_top(model, blocks, seed)
    before = maps(model, images, classes)
    return mean_or_none(rank_correlations(before, maps(random, images, classes)))


def with_random_top(model: ViT, blocks: int | None = None, seed: int = 0) -> ViT:
    """Return a copy of a model whose last blocks and all that follows them are random.

    Each tensor keeps its own values in a random order: their scale stays, so that activations
    neither vanish nor explode, while a head drawn by the initialisation could be all zeros.

    Args:
        model: stays as it is.
        blocks: how many of the last blocks; default half of them, rounded up.
        seed: of the orders.

    Raises:
        SettingError: more blocks than there are, or a negative number.
    """
    depth = len(model.blocks)
    top = -(-depth // 2) if blocks is None else blocks
    if not 0 <= top <= depth:
        raise SettingError.about("blocks", top, f"must be from 0 to {depth}")
    random = copy.deepcopy(model).requires_grad_(False)
    # On the CPU, so that every device has the same order.
    generator = torch.Generator().manual_seed(seed)
    parts: list[nn.Module] = [*random.blocks[depth - top :], random.norm, random.attn_pool]
    parts += [random.fc_norm, random.pre_logits, random.head, random.head_dist]
    for part in parts:
        for parameter in part.parameters():
            order = torch.randperm(parameter.numel(), generator=generator)
            shuffled = parameter.detach().flatten()[order.to(parameter.device)]
            parameter.copy_(shuffled.view_as(parameter))
    return random
