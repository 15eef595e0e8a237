"""What the model of a run makes of a split, for scores that `vitkit eval` gives again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from vitkit.distributed import World
from vitkit.evaluation.evaluate import Output, outputs
from vitkit.models.vit import ViT
from vitkit.training.parallel.fsdp import has_shards
from vitkit.training.setup import Plan

EVALUATED = 256
"""Images of one evaluation batch of a process, as in `vitkit eval`."""


def judged(
    plan: Plan,
    split: str,
    model: ViT,
    world: World,
    between: Callable[[], object],
    tell_failed: Callable[[Sequence[str]], object],
) -> Iterator[Output]:
    """What a model, in eval mode, makes of this process's images of a split, in float32.

    The run may train in bfloat16: its scores are those that the file of weights has elsewhere.

    Args:
        plan: of the run.
        split: of the data.
        model: whole, or in parts; it is set to eval mode.
        world: the processes that share the images.
        between: called after every batch, by every process as often; may raise.
        tell_failed: told of images that could not be read, a line each.
    """
    images, in_parts = plan.dataset.splits[split], has_shards(model)
    # Starting loader processes takes longer than one batch.
    workers = plan.workers if len(images) > EVALUATED else 0
    made = outputs(model.eval(), images, plan.preprocess, batch_size=EVALUATED, device=plan.device,
                   workers=workers, world=world, collective=in_parts,
                   tell_failed=tell_failed)  # fmt: skip
    most = -(-len(images) // (EVALUATED * world.size))  # some processes have one batch less
    for _ in range(most):
        yield from islice(made, 1)
        between()
    yield from made  # nothing is left; what follows the last batch is done
    if in_parts:
        model.reshard()  # type: ignore[operator]
