"""Test-time registers (arXiv 2506.08010): high norms moved from patches to an extra token.

    python examples/research/test_time_registers.py [CHECKPOINT IMAGES]

Large models without registers write very high norms into a few background patches, and their maps
have spots there. A few neurons of the MLPs make these norms. They are found, and their activations
moved to a token that is added behind the prefix tokens, without training. Without arguments the
script plants such a neuron in a small model.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import vitkit
from vitkit.models.attention import PLAIN
from vitkit.models.layers import LayerScale, eval_mode

LEAST_SHARE = 0.1  # a neuron counts if it writes this share of what the strongest one writes


@dataclass(frozen=True)
class RegisterNeuron:
    """A hidden neuron of a block's MLP, with its mean activations at high-norm and other patches.

    `written` is the difference of these means times the norm of what it writes into a token.
    """

    layer: int
    neuron: int
    firing: float
    resting: float
    written: float

    def __str__(self) -> str:
        return f"block {self.layer} neuron {self.neuron}"


def find_register_neurons(
    model: vitkit.ViT, images: Tensor, count: int = 10, threshold: float | None = None
) -> tuple[RegisterNeuron, ...]:
    """Return the neurons that make the high norms, the one that writes most first.

    The paper ranks neurons by their mean activation at the high-norm patches (Alg. 1). Here the
    rank is what a neuron writes there and not elsewhere. `threshold` is that of `find_artefacts`.
    """
    high = torch.from_numpy(vitkit.find_artefacts(model, images, threshold=threshold).high)
    high = high.flatten(1)
    if not 0 < int(high.sum()) < high.numel():
        return ()
    means: list[tuple[Tensor, Tensor]] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        patches = inputs[0][:, model.spec.num_prefix_tokens :].cpu()  # B N M
        means.append((patches[high].double().mean(dim=0), patches[~high].double().mean(dim=0)))

    with eval_mode(model), torch.inference_mode(), ExitStack() as hooks:
        for block in model.blocks:
            hooks.callback(block.mlp.fc2.register_forward_pre_hook(keep).remove)
        model.forward_features(images)
    found = []
    for layer, (block, (firing, resting)) in enumerate(zip(model.blocks, means, strict=True)):
        columns = block.mlp.fc2.weight.detach().double().cpu()
        if isinstance(block.ls2, LayerScale):
            columns = columns * block.ls2.gamma.detach().double().cpu()[:, None]
        written = (firing - resting).abs() * columns.norm(dim=0)
        for number in written.topk(min(count, len(written))).indices.tolist():
            values = (float(part[number]) for part in (firing, resting, written))
            found.append(RegisterNeuron(layer, number, *values))
    found.sort(key=lambda neuron: -neuron.written)
    least = LEAST_SHARE * found[0].written
    return tuple(neuron for neuron in found[:count] if neuron.written >= max(least, 1e-12))


@contextmanager
def test_time_registers(
    model: vitkit.ViT, neurons: Sequence[RegisterNeuron]
) -> Iterator[vitkit.ViT]:
    """Move the activations of neurons from patches to an extra token, for a `with` block.

    Where a neuron fires on a patch of an image, its largest activation in the image goes to the
    extra token, and its activation becomes zero at all patches (Sec. 4). Unlike in the paper, other
    tokens attend to the extra token only after an activation was moved to it: an image in which no
    neuron fires gets the same logits as without. Within the block the model is in eval mode and has
    one register more, so that all methods of explanation work. Do not save it there.
    """
    if not neurons:
        yield model
        return
    spec = model.spec
    mover = _Mover(spec.num_prefix_tokens)
    with eval_mode(model), ExitStack() as hooks:
        for handle in mover.hooks(model, neurons):
            hooks.callback(handle.remove)
        # whatever reads patches by the spec, such as a `Record`, finds them behind the extra token
        model.spec = spec.replace(num_registers=spec.num_registers + 1)
        try:
            yield model
        finally:
            model.spec = spec


class _Mover:
    """The hooks on the modules of a model; `place` is the number of the extra token."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.filled = torch.zeros(0, dtype=torch.bool)  # images whose extra token got an activation

    def hooks(self, model: vitkit.ViT, neurons: Sequence[RegisterNeuron]) -> Iterator[Any]:
        yield model.embedding.register_forward_hook(self.insert)
        for layer, block in enumerate(model.blocks):
            hook = self.start if layer == 0 else self.hide
            yield block.attn.register_forward_pre_hook(hook, with_kwargs=True)
            moved = [neuron for neuron in neurons if neuron.layer == layer]
            if moved:
                yield block.mlp.fc2.register_forward_pre_hook(self.move(moved))
        if model.spec.pooling == "mean_all":
            yield model.attn_pool.register_forward_pre_hook(self.leave_out)

    def insert(self, module: nn.Module, inputs: object, tokens: Tensor) -> Tensor:
        """Put a token of zeros behind the prefix tokens."""
        before, after = tokens[:, : self.place], tokens[:, self.place :]
        return torch.cat([before, torch.zeros_like(tokens[:, :1]), after], dim=1)

    def start(self, module: nn.Module, inputs: tuple[Any, ...], others: dict[str, Any]) -> Any:
        """Hide the extra token from the others in the first block."""
        self.filled = torch.zeros(len(inputs[0]), dtype=torch.bool, device=inputs[0].device)
        return self.hide(module, inputs, others)

    def hide(self, module: nn.Module, inputs: tuple[Any, ...], others: dict[str, Any]) -> Any:
        """Hide the extra token from all queries in images where nothing was moved to it."""
        tokens = inputs[0]
        context = inputs[1] if len(inputs) > 1 else others.pop("context", PLAIN)
        count = tokens.shape[1]
        visible = torch.ones(len(tokens), 1, count, count, dtype=torch.bool, device=tokens.device)
        visible[:, :, :, self.place] = self.filled[:, None, None]
        mask = visible if context.mask is None else visible & context.mask
        return (tokens, context._replace(mask=mask)), others

    def move(self, neurons: Sequence[RegisterNeuron]) -> Any:
        """Return a hook that moves activations (B, T, M) from the patches to the extra token."""

        def move(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden = inputs[0].clone()
            for neuron in neurons:
                patches = hidden[:, self.place + 1 :, neuron.neuron].clone()  # B N
                from_rest = (patches - neuron.resting).abs()
                fires = ((patches - neuron.firing).abs() < from_rest).any(dim=1)
                # the largest away from rest, which is negative in some gated MLPs
                largest = from_rest.argmax(dim=1, keepdim=True)
                own = hidden[:, self.place, neuron.neuron].clone()
                moved = torch.where(fires, patches.gather(1, largest)[:, 0], own)
                hidden[:, self.place, neuron.neuron] = moved
                hidden[:, self.place + 1 :, neuron.neuron] = patches.masked_fill(fires[:, None], 0)
                self.filled = self.filled | fires
            return (hidden, *inputs[1:])

        return move

    def leave_out(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Leave the extra token out of a mean over all tokens."""
        features = inputs[0]
        return (replace(features, registers=features.registers[:, :-1]), *inputs[1:])


def effect_of_registers(
    model: vitkit.ViT,
    images: Tensor,
    neurons: Sequence[RegisterNeuron],
    threshold: float | None = None,
) -> str:
    """Count high-norm patches without and with test-time registers, and return one line."""
    before = vitkit.find_artefacts(model, images, threshold=threshold)
    with test_time_registers(model, neurons):
        after = vitkit.find_artefacts(model, images, threshold=before.threshold)
    counts = f"high-norm patch tokens {before.count:,} -> {after.count:,}"
    norms = f"largest norm {before.norms.max():.3g} -> {after.norms.max():.3g}"
    shares = f"{100 * before.attention:.1f} % -> {100 * after.attention:.1f} %"
    return f"{counts} ({norms}), their share of the attention {shares}"


def planted_model() -> tuple[vitkit.ViT, Tensor]:
    """Return a model with a neuron that writes a high norm into bright patches, and images."""
    torch.manual_seed(0)
    model = vitkit.create_model("vit_tiny_patch16_224", image_size=64, depth=3, num_classes=10)
    mlp = model.blocks[1].mlp
    images = 0.1 * torch.randn(8, 3, 64, 64)
    images[:4, :, :16, 16:32] += 3  # a bright patch in four of them
    inputs: list[Tensor] = []
    handle = mlp.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    with torch.no_grad():
        model.eval()(images)
        handle.remove()
        direction = inputs[0][0, 2] - inputs[0][:, 3:].mean((0, 1))  # of the bright patch
        mlp.fc1.weight[5] = direction
        mlp.fc1.bias[5] = -0.7 * inputs[0][0, 2] @ direction
        mlp.fc2.weight[:, 5] = 3.0
        model.head.weight.normal_()
    return model, images


def main(checkpoint: str = "", images: str = "") -> None:
    """Find the neurons, and print what moving them changes."""
    model, inputs = planted_model()
    threshold = None if checkpoint else 100.0
    if checkpoint:
        loaded = vitkit.load(checkpoint)
        found = [loaded.preprocess(image.read()) for image in vitkit.find_images(images)]
        model, inputs = loaded.model.eval(), torch.stack(found)
    neurons = find_register_neurons(model, inputs, threshold=threshold)
    print("neurons:", ", ".join(map(str, neurons)) or "none, as no patch has a high norm")
    print(effect_of_registers(model, inputs, neurons, threshold))
    with torch.inference_mode():
        plain = model(inputs)
        with test_time_registers(model, neurons):
            moved = model(inputs)
    print(f"largest change of a logit {(moved - plain).abs().max():.2g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
