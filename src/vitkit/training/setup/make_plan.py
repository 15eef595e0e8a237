"""From settings to the plan of a run; errors are found before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vitkit.devices import resolve_device
from vitkit.distributed import ProcessGroup
from vitkit.training.checks.dependent_defaults import resolve_defaults
from vitkit.training.checks.model_and_data import (
    check_data,
    check_head,
    check_model,
    check_warmup,
    note_on_colours,
)
from vitkit.training.checks.settings import check_settings, check_steps
from vitkit.training.checks.unused_settings import notes_on_settings
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.defaults.from_data import chooses_model, decide_settings
from vitkit.training.distillation import as_teacher
from vitkit.training.run_folder import resumed_folder
from vitkit.training.run_plan import Plan
from vitkit.training.setup.initial_weights import (
    InitialWeights,
    from_stored,
    preset_spec,
    random_weights,
    spec_fields,
)
from vitkit.training.setup.pretrained_weights import from_checkpoint, load_initial
from vitkit.training.setup.training_batches import (
    balance_notes,
    loader_processes,
    training_steps,
)
from vitkit.training.setup.training_data import open_training_data


def make_plan(
    config: TrainConfig, world: ProcessGroup | None = None, *, resumes: bool = False
) -> Plan:
    """Open the data, check every image, and build the spec; nothing is written.

    Args:
        config: the settings.
        world: the processes that share the run.
        resumes: a resumed run has its weights, so the initial ones are not needed.

    Raises:
        CheckpointError: weights to start from that cannot be read, or are of another model.
        SettingError, SpecError: settings that contradict each other, a model that cannot exist.
        DataError: data that cannot be trained on.
        DeviceError: a device that is not there.
    """
    world = world or ProcessGroup()
    config, notes = resolve_defaults(config)
    check_settings(config, world.size, resumes=resumes)
    device = world.device(resolve_device(config.device))
    # refuses an impossible model before any image is read
    named = None if chooses_model(config) else _start(config, resumes)
    resumed = resumed_folder(config.resume, config.output) if resumes and config.resume else None
    dataset, data_notes, check = open_training_data(config, resumed)
    # before the head is adapted to the classes
    check_data(config, dataset)
    decided, chosen = decide_settings(config, dataset, world.size)
    check_steps(decided, world.size)
    start = (named or _start(decided, resumes))(dataset.classes)
    check_head(config, decided.opt, start.spec, start.weights)
    train = dataset.splits["train"]
    steps = training_steps(decided, train, start.preprocess, world)
    check_warmup(decided, steps.steps_per_epoch)
    notes += [*data_notes, *start.notes, *balance_notes(config, dataset)]
    notes += notes_on_settings(decided, world.size, steps.steps_per_epoch)
    notes += [] if resumes else note_on_colours(config, start.spec, train)
    workers, worker_notes = loader_processes(config.workers, train, world)
    # last, as it may take long to load
    teacher, teacher_notes = None, list[str]()
    if config.teacher is not None:
        teacher = as_teacher(config.teacher, "--teacher", trust_pickle=config.trust_pickle)
        teacher, teacher_notes = teacher.for_classes(
            dataset.classes, start.preprocess, device, config.progressive
        )
    return Plan(
        config=replace(decided, start=start.facts or None),
        dataset=dataset,
        spec=start.spec,
        preprocess=start.preprocess,
        steps=steps,
        device=device,
        workers=workers,
        notes=(*notes, *worker_notes, *teacher_notes),
        chosen=chosen,
        weights=start.weights,
        teacher=teacher,
        check=check,
    )


def make_plan_in_turn(config: TrainConfig, world: ProcessGroup, *, resumes: bool) -> Plan:
    """Make the plan on the first process first, so that the other processes read its caches."""
    plans: list[Plan] = []
    world.broadcast_from_main(lambda: plans.append(make_plan(config, world, resumes=resumes)))
    # the first process has it already
    return plans[0] if plans else make_plan(config, world, resumes=resumes)


def _start(config: TrainConfig, resumes: bool) -> Callable[[Sequence[str]], InitialWeights]:
    """Return a function from the classes to the initial weights: random, loaded, or resumed."""
    if config.pretrained is None:
        check_model(config, preset_spec(config, num_classes=1))
        return lambda classes: random_weights(config, len(classes), resumes=resumes)
    facts = config.start
    if resumes and facts is not None:
        return lambda classes: from_stored(facts)
    loaded = load_initial(config, spec_fields(config))
    # the data decide the number of classes, and are not open yet
    check_model(config, loaded.checkpoint.model.spec.replace(num_classes=1))
    return lambda classes: from_checkpoint(loaded, classes, keeps_head=config.probe is None)
