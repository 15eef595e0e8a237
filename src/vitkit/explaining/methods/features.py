"""Maps of the patch features: similarity to what the head reads, and principal components."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitkit.explaining.methods import class_scores
from vitkit.models.layers import eval_mode
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.shapes import Grid, Images


def similarity(
    model: ViT, images: Images, *, layer: int = -1, query: int | None = None
) -> class_scores.Maps:
    """Return the cosine of the class token, or of one patch, and each patch.

    The features are a block's tokens after the model's last norm, as DINOv2's
    `get_intermediate_layers` gives them (arXiv 2304.07193). Where the head does not read the class
    token, the mean of the tokens that it reads takes its place: of the patches, or of the patches
    with the weights of a MAP head (`readout_rows`).

    Args:
        model: in any mode, which it keeps; it runs in eval mode.
        images: (B, C, H, W) normalised, on the model's device.
        layer: block number, from 0; negative ones count from the end.
        query: one patch, from 0, row by row, to which the others are compared.

    Returns:
        (B, gh, gw) in [-1, 1]; the patch `query` itself has 1.

    Raises:
        SettingError: a layer or a patch that does not exist.
        ShapeError: images that do not fit the model.
    """
    layer = class_scores.check_layer(layer, model)
    prefix = model.spec.num_prefix_tokens
    by_map_head = query is None and class_scores.has_map_head(model)
    record = Record(tokens=[layer], pooling=by_map_head)
    with eval_mode(model), torch.inference_mode():
        features = model.forward_features(images, record)
        tokens = class_scores.at_least_float32(model.norm(record.tokens[layer]))  # B T D
        if query is not None:
            compared = tokens[:, prefix + class_scores.check_patch(query, features.grid)]
        else:
            pooling = class_scores.pooling_map(model, features, record) if by_map_head else None
            row = class_scores.readout_row(model, features, pooling)
            compared = torch.einsum("bt,btd->bd", row, tokens)
        cosine = F.cosine_similarity(tokens[:, prefix:], compared.unsqueeze(1), dim=-1)  # B N
    return cosine.unflatten(1, features.grid)


COLOURS = 3


def pca(model: ViT, images: Images, *, layer: int = -1) -> Float[Tensor, "B gh gw 3"]:
    """Return three principal components of the patch features of each image as red, green, blue.

    As in Fig. 1 of "DINOv2" (arXiv 2304.07193): the first component of all patches separates the
    foreground, its positive side, from the background; three components of the foreground's patches
    alone are its colours. The features are a block's patch tokens after the
    model's last norm.

    A component has no sign of its own. That of the first is chosen so that the patches along the
    border of the image have the smaller mean, as most of them are background; where there are no
    others, and in all other components, the largest entry of the direction is positive. Each image
    has components of its own: the same colour in two images means nothing.

    Args:
        model: in any mode, which it keeps; it runs in eval mode.
        images: (B, C, H, W) normalised, on the model's device.
        layer: block number, from 0; negative ones count from the end.

    Returns:
        (B, gh, gw, 3) in [0, 1], each component from 0 to 1 over the foreground; 0 on the
        background. NaN for an image whose features are not all finite.

    Raises:
        SettingError: a layer that does not exist.
        ShapeError: images that do not fit the model.
    """
    record = Record(tokens=[class_scores.check_layer(layer, model)])
    with eval_mode(model), torch.inference_mode():
        features = model.forward_features(images, record)
        (tokens,) = record.tokens.values()
        patches = model.norm(tokens)[:, model.spec.num_prefix_tokens :]  # B N D
        colours = [_colours(one, features.grid) for one in patches.cpu().double()]
    made = torch.stack(colours).to(
        patches.device, torch.promote_types(patches.dtype, torch.float32)
    )
    return made.unflatten(1, features.grid)


def _colours(patches: Float[Tensor, "N D"], grid: Grid) -> Float[Tensor, "N 3"]:
    if not torch.isfinite(patches).all():  # such as overflow in half precision
        return patches.new_full((len(patches), COLOURS), torch.nan)
    first = _projections(patches)[:, 0]
    border = torch.ones(grid, dtype=torch.bool)
    border[1:-1, 1:-1] = False
    border = border.flatten()
    if not border.all() and first[border].mean() > first[~border].mean():
        first = -first
    foreground = first > 0
    colours = patches.new_zeros(len(patches), COLOURS)
    if foreground.any():
        parts = _projections(patches[foreground])
        low, high = parts.amin(dim=0), parts.amax(dim=0)
        span = high - low
        # a component without variance has no colour
        colours[foreground] = torch.where(span > 0, (parts - low) / span, 0.0)
    return colours


def _projections(patches: Float[Tensor, "n D"]) -> Float[Tensor, "n 3"]:
    """Return the coordinates along the first three principal components; 0 for missing ones."""
    centred = patches - patches.mean(dim=0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)  # r D, strongest first
    directions = directions[:COLOURS]
    largest = directions.abs().argmax(dim=1, keepdim=True)
    directions = directions * directions.gather(1, largest).sign()
    made = centred @ directions.T
    return torch.nn.functional.pad(made, (0, COLOURS - made.shape[1]))
