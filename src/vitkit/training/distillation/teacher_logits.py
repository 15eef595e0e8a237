"""The teacher's logits as targets, computed in every step, or once per augmented view and cached.

With V views an image has V variants in the whole run (`TrainingSteps.cycle`). The teacher evaluates
each of them once, before the first step, and its logits are cached in the run folder. They are a
function of the teacher, the data, the seed and the settings, and are computed in blocks of one
size: a resumed run has the same bits whether it reads the cache or computes the logits again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from vitkit.data.augmentation.model_inputs import ModelInputs
from vitkit.data.augmentation.pipeline import BatchTransform
from vitkit.data.datasets.split import Split
from vitkit.data.loading.batch import Batch
from vitkit.data.loading.loader import BatchSource, TrainingSteps, batches
from vitkit.distributed import ProcessGroup
from vitkit.errors import CheckpointError, Interrupted, OutputError
from vitkit.frozen import to_json
from vitkit.io.atomic import output_error, remove_temporaries, replacing
from vitkit.spec import Preprocess
from vitkit.training.distillation.losses import Distillation
from vitkit.training.distillation.teacher import Teacher
from vitkit.training.interrupts import StopFlag
from vitkit.training.optimization.precision import Precision, autocast
from vitkit.training.state.registry import Metadata, Tensors

BLOCK = 256
"""Images in a batch of the teacher; the last bits of its logits depend on it."""
VIEW_FILE = re.compile(r"view-\d+-[0-9a-f]{16}\.npy")
"""Names of the files with cached logits; any other file in their folder is left alone."""
CachedLogits = Float32[np.ndarray, "N K"]


@dataclass(frozen=True)
class _ViewBatches(BatchSource):
    """All images of one view, in the order of the split."""

    steps: TrainingSteps
    view: int

    @property
    def split(self) -> Split:  # type: ignore[override]  # a field there, read-only here
        return self.steps.split

    def __len__(self) -> int:
        return (len(self.steps.split) + BLOCK - 1) // BLOCK

    def __getitem__(self, number: int) -> Batch:
        last = min((number + 1) * BLOCK, len(self.steps.split))
        return self.steps.variants(np.arange(number * BLOCK, last), self.view)


@dataclass(frozen=True)
class TeacherInputs:
    """The images that a teacher evaluates, and the settings that its logits depend on.

    Attributes:
        steps: every training batch of the run, and the number of views of an image.
        preprocess: preprocessing of the student's images.
        num_classes: columns of the teacher's logits.
        device: device of the teacher.
        precision: precision of the student's training.
        workers: loader processes.
        key: fingerprint of the data, and attention kernel; the logits depend on them, too.
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
    """A batch transform that adds teacher targets; the teacher's digest is part of the state.

    Args:
        teacher: on the device, its logits in the order of the data's classes.
        distillation: turns logits into targets.
        inputs: images and settings of the teacher.
        transform: batch transform of the student.
        folder: cache of the logits of whole views.
        world: the processes of the run, which share the evaluation.
        stop: set by a signal.
    """

    def __init__(
        self,
        teacher: Teacher,
        distillation: Distillation,
        inputs: TeacherInputs,
        transform: BatchTransform,
        folder: Path,
        world: ProcessGroup,
        stop: StopFlag,
    ) -> None:
        self.distillation = distillation
        self._teacher, self._inputs, self._transform = teacher, inputs, transform
        self._folder, self._world, self._stop = folder, world, stop
        self._digest = teacher.fingerprint()
        self._views: dict[int, CachedLogits] = {}

    def __call__(self, batch: Batch, step: int, part: int = 0) -> ModelInputs:
        """Transform a batch as `BatchTransform` does, and add soft targets, probabilities (B, K).

        Without views, the teacher gets the images of the student, mixed ones included (as in DeiT).
        With views, the cached targets are mixed.
        """
        fed = self._transform(batch, step, part)
        if not self._inputs.steps.cycle:
            return replace(fed, soft=self.distillation.targets(self._logits(fed.images)))
        # Indices of images in the split are rows of the cached array.
        rows = np.asarray(self._views[batch.epoch][batch.indices.numpy()])
        soft = self.distillation.targets(torch.from_numpy(rows).to(self._inputs.device))
        if fed.mixture is not None:
            soft = fed.mixture.targets(soft)
        return replace(fed, soft=soft)

    def prepare(self, steps: range, log: Callable[[str], object]) -> None:
        """Load the cached logits of the views in these steps; compute those that are missing.

        Raises:
            OutputError: the run folder cannot be written.
            Interrupted: a signal came; complete views are kept.
        """
        views = self._inputs.steps.cycle
        if not views or not steps:
            return
        steps_per_epoch = self._inputs.steps.steps_per_epoch
        epochs = range(steps[0] // steps_per_epoch, steps[-1] // steps_per_epoch + 1)
        # Before space on the disk is needed for new files.
        if self._world.is_main:
            self._tidy(range(views))
        for view in sorted({epoch % views for epoch in epochs}):
            path = self._path(view)
            if not self._world.broadcast_from_main(path.exists):
                start = monotonic()
                self._compute(view, path)
                # The other processes read the file only when it is complete.
                self._world.broadcast_from_main(path.exists)
                log(
                    f"teacher: view {view + 1} of {views}, {len(self._inputs.steps.split):,} "
                    f"images, in {monotonic() - start:.0f} s"
                )
            self._views[view] = self._read(path)

    def tensors(self) -> Tensors:
        """Return no tensors: the teacher is not part of the run's state."""
        return {}

    def metadata(self) -> Metadata:
        """Return the teacher's digest."""
        return {"sha256": self._digest}

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Raise `CheckpointError` if the run began with another teacher."""
        if metadata != self.metadata():
            raise CheckpointError(
                f"--teacher {self._inputs.source} is not the teacher that the run started with; "
                "pass that one, or start afresh with another --output"
            )

    def _logits(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B K"]:
        with autocast(self._inputs.precision, self._inputs.device):
            return self._teacher(images, self._inputs.preprocess)

    def _path(self, view: int) -> Path:
        """Return the cache file of a view; its name is a digest of all that decides the logits."""
        steps = self._inputs.steps
        data, attention_kernel = self._inputs.key
        known = [
            self._digest,
            data,
            len(steps.split),
            steps.seed,
            to_json(self._inputs.preprocess),
            to_json(steps.augmentation),
            self._inputs.precision,
            attention_kernel,
            view,
        ]
        digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
        return self._folder / f"view-{view}-{digest[:16]}.npy"

    def _tidy(self, views: Iterable[int]) -> None:
        """Remove unfinished files of a killed process, and views of other settings."""
        if not self._folder.is_dir():
            return
        remove_temporaries(self._folder)
        wanted = {self._path(view) for view in views}
        for path in self._folder.glob("view-*.npy"):
            if path not in wanted and VIEW_FILE.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def _compute(self, view: int, path: Path) -> None:
        """Evaluate the teacher on all images of a view; the first process writes the logits."""
        shape = (len(self._inputs.steps.split), self._inputs.num_classes)
        with ExitStack() as stack:
            file = None
            if self._world.is_main:
                temporary = stack.enter_context(replacing(path, needed=4 * shape[0] * shape[1]))
                file = stack.enter_context(temporary.open("wb"))
                header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                # Rows are written one block after another, so the header comes first.
                np.lib.format.write_array_header_1_0(file, header)
            for rows in self._rows(view):
                if file is not None:
                    file.write(rows.astype("<f4").tobytes())
                # All processes stop after the same block: each of them shares the next one.
                signum = self._world.all_reduce_max(self._stop.signum or 0)
                if signum:
                    raise Interrupted(
                        signum, "stopped while the teacher's logits were computed; start again"
                    )

    @torch.no_grad()
    def _rows(self, view: int) -> Iterator[CachedLogits]:
        """Yield the logits in the order of the split; the processes take blocks in turn."""
        blocks = _ViewBatches(self._inputs.steps, view)
        world = self._world
        own_blocks = range(world.rank, len(blocks), world.size)
        own_batches = batches(blocks, own_blocks, workers=self._inputs.workers)
        count = len(self._inputs.steps.split)
        for start in range(0, count, BLOCK * world.size):
            rows = torch.zeros(min(BLOCK * world.size, count - start), self._inputs.num_classes)
            batch = next(own_batches, None)
            if batch is not None:
                first = world.rank * BLOCK
                logits = self._logits(self._transform.images(batch))
                rows[first : first + BLOCK] = logits.cpu()
            # Each row is zero in all processes but one, so the sum is exact.
            yield world.all_reduce_sum(rows).numpy()

    def _read(self, path: Path) -> CachedLogits:
        """Map a cached view into memory; rows are read from the disk when they are needed."""
        try:
            # Not read at once: the logits of a large dataset may not fit into memory.
            logits: CachedLogits = np.load(path, mmap_mode="r")
        except OSError as error:
            raise output_error(path, error) from error
        except ValueError as error:
            raise OutputError(f"{path}: damaged ({error}); remove it and start again") from None
        return logits
