"""The teacher in a run: asked in every step, or once for every view of every image.

With V views an image has V variants in the whole run (`TrainingSteps.cycle`), the teacher looks at
each of them once, before the first step, and its logits are kept in the run folder. They are a
function of the teacher, the data, the seed and the settings, asked in blocks of one size, so that a
run that goes on has the same bits whether they are read back or asked for again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import numpy as np
import torch
from jaxtyping import Float32

from vitkit.data.datasets.dataset import Split
from vitkit.data.loading.batch_transform import BatchTransform, ModelInputs
from vitkit.data.loading.loader import Batch, BatchSource, TrainingSteps, batches
from vitkit.distributed import World
from vitkit.errors import CheckpointError, Interrupted, OutputError
from vitkit.frozen import to_json
from vitkit.io.atomic import output_error, replacing
from vitkit.shapes import Images, Logits
from vitkit.spec import Preprocess
from vitkit.training.distillation.losses import Distillation
from vitkit.training.distillation.teacher import Teacher
from vitkit.training.interrupts import StopFlag
from vitkit.training.optimization.precision import Precision, autocast
from vitkit.training.state.registry import Tensors, Values

BLOCK = 256
"""Images that the teacher looks at at once; the last bits of its logits depend on it."""
Kept = Float32[np.ndarray, "N K"]


@dataclass(frozen=True)
class _Blocks(BatchSource):
    """All images of one view, in the split's order."""

    steps: TrainingSteps
    view: int

    @property
    def split(self) -> Split:  # type: ignore[override]
        return self.steps.split

    def __len__(self) -> int:
        return (len(self.steps.split) + BLOCK - 1) // BLOCK

    def __getitem__(self, number: int) -> Batch:
        last = min((number + 1) * BLOCK, len(self.steps.split))
        return self.steps.variants(np.arange(number * BLOCK, last), self.view)


@dataclass(frozen=True)
class Taught:
    """What a teacher is asked about, and how.

    Attributes:
        steps: every training batch of the run, and how many views an image has.
        preprocess: how the student's images are normalised.
        num_classes: columns of the teacher's logits.
        device: where the teacher is.
        precision: the one that the student trains with.
        workers: loader processes.
        key: what else decides the teacher's logits: the data's fingerprint, the attention kernel.
        source: the setting `teacher`, for messages.
    """

    steps: TrainingSteps
    preprocess: Preprocess
    num_classes: int
    device: torch.device
    precision: Precision
    workers: int
    key: tuple[str, str]
    source: str


class TeacherTargets:
    """A batch transform that adds the teacher's targets; its digest is part of the run's state.

    Args:
        teacher: on the device, its logits in the order of the data's classes.
        distillation: makes targets of logits.
        taught: what the teacher is asked about.
        transform: how a batch becomes what the model is given.
        folder: where the logits of whole views are kept.
        world: the processes of the run, which share the asking.
        stop: raised by a signal.
    """

    def __init__(
        self,
        teacher: Teacher,
        distillation: Distillation,
        taught: Taught,
        transform: BatchTransform,
        folder: Path,
        world: World,
        stop: StopFlag,
    ) -> None:
        self.distillation = distillation
        self._teacher, self._taught, self._transform = teacher, taught, transform
        self._folder, self._world, self._stop = folder, world, stop
        self._digest = teacher.fingerprint()
        self._views: dict[int, Kept] = {}

    def __call__(self, batch: Batch, step: int, part: int = 0) -> ModelInputs:
        """As `BatchTransform`, with soft targets.

        Asked in every step, the teacher sees the images that the student sees, mixed ones too (as
        in DeiT); of kept views it is the targets that are mixed.
        """
        fed = self._transform(batch, step, part)
        if not self._taught.steps.cycle:
            return replace(fed, soft=self.distillation.targets(self._ask(fed.images)))
        rows = np.asarray(self._views[batch.epoch][batch.indices.numpy()])
        soft = self.distillation.targets(torch.from_numpy(rows).to(self._taught.device))
        return replace(fed, soft=fed.mixture.targets(soft) if fed.mixture else soft)

    def prepare(self, steps: range, say: Callable[[str], object]) -> None:
        """Have at hand what the teacher says of the views that these steps show.

        Raises:
            OutputError: the run folder cannot be written.
            Interrupted: a signal came; views that are whole are kept.
        """
        views = self._taught.steps.cycle
        if not views or not steps:
            return
        each = self._taught.steps.steps_per_epoch
        shown = {epoch % views for epoch in range(steps[0] // each, steps[-1] // each + 1)}
        if self._world.first:
            self._tidy(range(views))
        for view in sorted(shown):
            path = self._path(view)
            if not self._world.decided(path.exists):
                began = monotonic()
                self._look_at(view, path)
                self._world.decided(path.exists)  # the others read it only when it is whole
                say(
                    f"teacher: view {view + 1} of {views}, {len(self._taught.steps.split):,} "
                    f"images, in {monotonic() - began:.0f} s"
                )
            self._views[view] = self._read(path)

    def tensors(self) -> Tensors:
        """None: the teacher is no part of the run."""
        return {}

    def values(self) -> Values:
        """Which teacher it is."""
        return {"sha256": self._digest}

    def restore(self, tensors: Tensors, values: Values) -> None:
        """Raises `CheckpointError` where the run began with another teacher."""
        if values != self.values():
            raise CheckpointError(
                f"the teacher {self._taught.source} is not the one that the run began with; "
                f"bring it back, or start afresh with another --output"
            )

    def _ask(self, images: Images) -> Logits:
        with autocast(self._taught.precision, self._taught.device):
            return self._teacher(images, self._taught.preprocess)

    def _path(self, view: int) -> Path:
        """The file's name holds everything that decides what is in it."""
        steps, (data, attention_kernel) = self._taught.steps, self._taught.key
        known = [self._digest, data, len(steps.split), steps.seed, to_json(self._taught.preprocess),
                 to_json(steps.augmentation), self._taught.precision, attention_kernel,
                 view]  # fmt: skip
        digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
        return self._folder / f"view-{view}-{digest[:16]}.npy"

    def _tidy(self, views: Iterable[int]) -> None:
        """Remove what a killed process left, and views of other settings."""
        wanted = {self._path(view) for view in views}
        for path in self._folder.glob("*") if self._folder.is_dir() else ():
            if path not in wanted:
                path.unlink(missing_ok=True)

    def _look_at(self, view: int, path: Path) -> None:
        """Ask for all of a view; the first process writes."""
        shape = (len(self._taught.steps.split), self._taught.num_classes)
        with ExitStack() as stack:
            file = None
            if self._world.first:
                temporary = stack.enter_context(replacing(path, needed=4 * shape[0] * shape[1]))
                file = stack.enter_context(temporary.open("wb"))
                header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            for rows in self._rows(view):
                if file is not None:
                    file.write(rows.astype("<f4").tobytes())
                if signum := self._world.most(self._stop.signum or 0):
                    raise Interrupted(
                        signum, "stopped while the teacher looked at the images; start again"
                    )

    @torch.no_grad()
    def _rows(self, view: int) -> Iterator[Kept]:
        """What the teacher says, in the split's order; the processes take the blocks in turn."""
        blocks, world = _Blocks(self._taught.steps, view), self._world
        mine = batches(
            blocks, range(world.rank, len(blocks), world.size), workers=self._taught.workers
        )
        count, classes = len(self._taught.steps.split), self._taught.num_classes
        for start in range(0, count, BLOCK * world.size):
            rows = torch.zeros(min(BLOCK * world.size, count - start), classes)
            if (batch := next(mine, None)) is not None:
                place = world.rank * BLOCK
                rows[place : place + BLOCK] = self._ask(self._transform.images(batch)).cpu()
            yield world.summed(rows).numpy()

    def _read(self, path: Path) -> Kept:
        """A view that is kept; it stays on the disk until its rows are asked for."""
        try:
            found: Kept = np.load(path, mmap_mode="r")
        except OSError as error:
            raise output_error(path, error) from error
        except ValueError as error:
            raise OutputError(f"{path}: damaged ({error}); remove it and start again") from None
        return found
