"""Test-time registers: high norms moved from patches to an extra token, without training.

"Vision Transformers Don't Need Trained Registers" (arXiv 2506.08010).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitkit.errors import MODEL, SettingError, check_type
from vitkit.explaining.model.artefacts import IMAGES, Artefacts, find_artefacts
from vitkit.messages import plural
from vitkit.models.attention import PLAIN, Context
from vitkit.models.layers import LayerScale, eval_mode
from vitkit.models.readout import Features
from vitkit.models.vit import ViT
from vitkit.shapes import Images, Tokens

MOST_NEURONS = 10
"""Most neurons that are moved, by default."""
LEAST_SHARE = 0.1
"""A neuron counts if it writes at least this share of what the strongest one writes."""


@dataclass(frozen=True)
class RegisterNeuron:
    """A hidden neuron of an MLP that fires on patches which get a high norm.

    Attributes:
        layer: its encoder block, from 0.
        neuron: its number among the M inputs of the MLP's second matrix, from 0.
        firing: its mean activation at high-norm patches.
        resting: its mean activation at the other patches.
        written: |firing - resting| times the norm of what it writes into a token.
    """

    layer: int
    neuron: int
    firing: float
    resting: float
    written: float

    def fires(self, activation: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Return True where an activation is nearer to `firing` than to `resting`."""
        return (activation - self.firing).abs() < (activation - self.resting).abs()

    def __str__(self) -> str:
        """Return the numbers of block and neuron."""
        return f"block {self.layer} neuron {self.neuron}"


@dataclass(frozen=True)
class RegisterEffect:
    """High-norm patches of the same images before and with test-time registers.

    Attributes:
        neurons: those whose activations are moved.
        before: the model as it is.
        after: with the extra token, counted with the threshold of `before`.
    """

    neurons: tuple[RegisterNeuron, ...]
    before: Artefacts
    after: Artefacts

    def __str__(self) -> str:
        """Return one line: the neurons moved, and the counts before and after."""
        return (
            f"{plural(len(self.neurons), 'neuron')} moved to an extra token: high-norm patch "
            f"tokens {self.before.count:,} -> {self.after.count:,} (largest norm "
            f"{self.before.norms.max():.3g} -> {self.after.norms.max():.3g}), their share of the "
            f"attention {100 * self.before.attention:.1f} % -> {100 * self.after.attention:.1f} %"
        )

    @property
    def is_strong(self) -> bool:
        """True if what the norms have above the threshold falls by half or more, in their sum."""
        return 2 * _excess(self.after) <= _excess(self.before)


def _excess(found: Artefacts) -> float:
    return float((found.norms - found.threshold).clip(min=0).sum())


def find_register_neurons(
    model: ViT, images: Images, *, count: int = MOST_NEURONS, threshold: float | None = None
) -> tuple[RegisterNeuron, ...]:
    """Find the few MLP neurons that make the high norms of patches.

    The paper ranks neurons by their mean activation at the high-norm patches (arXiv 2506.08010,
    Alg. 1). Here the rank is what a neuron writes there and not elsewhere: the difference of its
    mean activations at high-norm and at other patches, times the norm of its column of the MLP's
    second matrix (times LayerScale). Neurons that write less than a tenth of the first are left
    out, so that ordinary ones are not moved.

    Args:
        model: any ViT, in any mode; it runs in eval mode without gradients, and keeps its mode.
        images: (B, C, H, W) normalised, on the model's device, some with high-norm patches.
        count: neurons at most, 1 or more.
        threshold: a norm above it is high; default as for `find_artefacts`.

    Returns:
        The neurons, the one that writes most first; none where no patch or every patch is high.

    Raises:
        SettingError: not a model, no image, or a count below 1.
    """
    check_type(model, ViT, "find_register_neurons", MODEL)
    check_type(images, Tensor, "find_register_neurons", IMAGES)
    if count < 1:
        raise SettingError.about("count", count, "must be 1 or more")
    high = torch.from_numpy(find_artefacts(model, images, threshold=threshold).high).flatten(1)
    if not 0 < int(high.sum()) < high.numel():
        return ()
    found: list[RegisterNeuron] = []
    for layer, (firing, resting) in enumerate(_mean_activations(model, images, high)):
        # What a neuron adds to a token is its activation times its column.
        written = (firing - resting).abs() * _columns(model.blocks[layer])
        for number in written.topk(min(count, len(written))).indices.tolist():
            means = (float(firing[number]), float(resting[number]))
            found.append(RegisterNeuron(layer, number, *means, float(written[number])))
    # Over all layers; ties stay in the order of the layers.
    found.sort(key=lambda neuron: -neuron.written)
    most = found[0].written
    return tuple(n for n in found[:count] if n.written > 0 and n.written >= LEAST_SHARE * most)


def measure_registers(
    model: ViT,
    images: Images,
    neurons: Sequence[RegisterNeuron],
    *,
    threshold: float | None = None,
) -> RegisterEffect:
    """Count high-norm patches without and with test-time registers.

    Args:
        model: any ViT.
        images: (B, C, H, W) normalised, on the model's device; best others than those in which
            the neurons were found.
        neurons: as `find_register_neurons` returns them.
        threshold: a norm above it is high; default that of `find_artefacts` without registers.

    Raises:
        SettingError: not a model, no image, a threshold that is not positive, or a neuron that the
            model does not have.
    """
    check_type(model, ViT, "measure_registers", MODEL)
    before = find_artefacts(model, images, threshold=threshold)
    with test_time_registers(model, neurons):
        after = find_artefacts(model, images, threshold=before.threshold)
    return RegisterEffect(tuple(neurons), before, after)


@contextmanager
def test_time_registers(model: ViT, neurons: Sequence[RegisterNeuron]) -> Iterator[ViT]:
    """Move the activations of neurons from patches to an extra token, for a `with` block.

    One more token, initially zero, follows the prefix tokens. Where a neuron fires on a patch of an
    image, its largest activation in the image goes to the extra token, and its activation becomes
    zero at all patches (arXiv 2506.08010, Sec. 4). Prefix tokens keep their activations. Unlike in
    the paper, other tokens attend to the extra token only after an activation was moved to it: so
    an image in which no neuron fires gets the same logits as without.

    Within the block the model is in eval mode and its spec has one register more, so that `Record`
    and all methods of explanation put the patches in their places; the head does not read the
    token. Weights are not changed. Do not save the model within the block.

    Args:
        model: any ViT.
        neurons: as `find_register_neurons` returns them; with none, nothing changes.

    Yields:
        The model.

    Raises:
        SettingError: a block or a neuron that the model does not have.

    >>> import vitkit
    >>> model = vitkit.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    >>> images = torch.randn(4, 3, 32, 32)
    >>> neurons = find_register_neurons(model, images)
    >>> with test_time_registers(model, neurons):
    ...     logits = model(images)
    """
    for neuron in neurons:
        _check(model, neuron)
    if not neurons:
        yield model
        return
    spec = model.spec
    mover = _Mover(spec.num_prefix_tokens)
    with eval_mode(model), ExitStack() as hooks:
        for handle in mover.hooks(model, neurons):
            hooks.callback(handle.remove)
        # Whatever reads patches by the spec, such as a `Record`, finds them behind the extra token.
        model.spec = spec.replace(num_registers=spec.num_registers + 1)
        try:
            yield model
        finally:
            model.spec = spec


# pytest would take an imported function of this name for a test
test_time_registers.__test__ = False  # type: ignore[attr-defined]


class _Mover:
    """The hooks of `test_time_registers` on the modules of a model.

    Args:
        place: the number of the extra token among the tokens: after all prefix tokens.
    """

    def __init__(self, place: int) -> None:
        self.place = place
        # images whose extra token has got an activation, (B,); empty before the first block
        self.filled: Bool[Tensor, " B"] = torch.zeros(0, dtype=torch.bool)

    def hooks(self, model: ViT, neurons: Sequence[RegisterNeuron]) -> Iterator[RemovableHandle]:
        """Register the hooks, and yield the handle of each."""
        yield model.embedding.register_forward_hook(self.insert)
        for layer, block in enumerate(model.blocks):
            attention: Any = block.attn
            yield attention.register_forward_pre_hook(
                self.start if layer == 0 else self.hide, with_kwargs=True
            )
            moved = [neuron for neuron in neurons if neuron.layer == layer]
            if moved:
                mlp: Any = block.mlp
                yield mlp.fc2.register_forward_pre_hook(self.move(moved))
        if model.spec.pooling == "mean_all":
            yield model.attn_pool.register_forward_pre_hook(self.leave_out)

    def insert(self, module: nn.Module, inputs: object, tokens: Tokens) -> Float[Tensor, "B _ D"]:
        """Put a token of zeros behind the prefix tokens."""
        before, after = tokens[:, : self.place], tokens[:, self.place :]
        return torch.cat([before, torch.zeros_like(tokens[:, :1]), after], dim=1)

    def start(
        self, module: nn.Module, inputs: tuple[Any, ...], others: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hide the extra token from the others in the first block."""
        tokens = inputs[0]
        self.filled = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        return self.hide(module, inputs, others)

    def hide(
        self, module: nn.Module, inputs: tuple[Any, ...], others: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hide the extra token in the images where nothing was moved to it."""
        tokens = inputs[0]
        context: Context = inputs[1] if len(inputs) > 1 else others.pop("context", PLAIN)
        count = tokens.shape[1]
        visible = torch.ones(len(tokens), 1, count, count, dtype=torch.bool, device=tokens.device)
        # By image: the column of the extra token, as seen by all queries.
        visible[:, :, :, self.place] = self.filled[:, None, None]
        mask = visible if context.mask is None else visible & context.mask
        return (tokens, context._replace(mask=mask)), others

    def move(self, neurons: Sequence[RegisterNeuron]) -> Any:
        """Return a hook that moves activations (B, T, M) from the patches to the extra token."""

        def move(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden = inputs[0].clone()
            for neuron in neurons:
                patches = hidden[:, self.place + 1 :, neuron.neuron].clone()  # B N
                fires = neuron.fires(patches).any(dim=1)
                # the largest away from rest, which is negative in some gated MLPs
                largest = (patches - neuron.resting).abs().argmax(dim=1, keepdim=True)
                own = hidden[:, self.place, neuron.neuron].clone()
                moved = torch.where(fires, patches.gather(1, largest)[:, 0], own)
                hidden[:, self.place, neuron.neuron] = moved
                hidden[:, self.place + 1 :, neuron.neuron] = patches.masked_fill(fires[:, None], 0)
                self.filled = self.filled | fires
            return (hidden, *inputs[1:])

        return move

    def leave_out(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Leave the extra token out of a mean over all tokens."""
        features: Features = inputs[0]
        assert features.registers is not None, "the extra token is the last register"
        registers = features.registers[:, :-1]
        return (replace(features, registers=registers), *inputs[1:])


def _mean_activations(
    model: ViT, images: Images, high: Bool[Tensor, "B N"]
) -> list[tuple[Float[Tensor, " M"], Float[Tensor, " M"]]]:
    """Return the mean inputs of each MLP's second matrix, at high-norm and at other patches."""
    found: list[tuple[Float[Tensor, " M"], Float[Tensor, " M"]]] = []

    def reduce(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        patches = inputs[0][:, model.spec.num_prefix_tokens :].cpu()  # B N M
        found.append((patches[high].double().mean(dim=0), patches[~high].double().mean(dim=0)))

    with eval_mode(model), torch.inference_mode(), ExitStack() as hooks:
        for block in model.blocks:
            mlp: Any = block.mlp
            hooks.callback(mlp.fc2.register_forward_pre_hook(reduce).remove)
        model.forward_features(images)
    return found


def _columns(block: nn.Module) -> Float[Tensor, " M"]:
    """Return the norm of what each neuron writes into a token at an activation of 1."""
    mlp: Any = block.mlp
    weight: Float[Tensor, "D M"] = mlp.fc2.weight.detach().double().cpu()
    scale = block.ls2
    if isinstance(scale, LayerScale):
        weight = weight * scale.gamma.detach().double().cpu()[:, None]
    return weight.norm(dim=0)


def _check(model: ViT, neuron: RegisterNeuron) -> None:
    spec = model.spec
    if not (0 <= neuron.layer < spec.depth and 0 <= neuron.neuron < spec.mlp_width):
        raise SettingError(
            f"{neuron} does not exist; blocks are 0 to {spec.depth - 1}, neurons 0 to "
            f"{spec.mlp_width - 1}"
        )
