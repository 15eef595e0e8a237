"""`train`: from the settings to the test score, in the order in which a run is built.

Read from top to bottom: the stopped run, if one is resumed; the plan; the folder, the model and the
log; tuning; the optimizer, the state and the step; the loop; the end.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from vitkit import devices, distributed, errors, process
from vitkit.data.loading.loader import Batch, batches
from vitkit.io.results import import_setting
from vitkit.models.attention import use_attention
from vitkit.models.vit import ViT
from vitkit.training import initial_weights, resume, saving, step, tuning
from vitkit.training.callbacks import (
    AverageWeights,
    Evaluate,
    HandleBadNumbers,
    KeepDeadline,
    ReportProgress,
    Stop,
    TrainMode,
)
from vitkit.training.config.passed_objects import how_to_resume, refuse_missing
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.monitoring.run_log import RunLog
from vitkit.training.optimization import optimizers, parameters, precision
from vitkit.training.plan import Plan, make_plan, make_step
from vitkit.training.run import Run, TrainResult, log_model, log_settings
from vitkit.training.run_folder import RunFolder, check_output, locked, new_folder
from vitkit.training.state.registry import (
    ModelPart,
    OptimizerPart,
    Progress,
    Stateful,
    check_all_registered,
)
from vitkit.training.trainer import Callback, Trainer


def train(
    config: TrainConfig,
    callbacks: Sequence[Callable[[], Callback]] = (),
    time_left: Callable[[], float] | None = None,
) -> TrainResult:
    """Train or resume, and evaluate the best weights once on the test split.

    Args:
        config: every setting.
        callbacks: further concerns of the run, called before its own: classes, or functions
            without arguments that build one. With `devices` above 1 the processes import them by
            name: they must be in a module, not in a script or a function.
        time_left: returns the seconds until the run must end: the schedule is shortened to fit;
            of a run of one process.

    Raises:
        UserError: anything wrong with the settings, the data or the place to write, before the
            first step; later an image, a full disk or the user's own code.
        NonFiniteError: the loss or the gradient is not a finite number.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGUSR1 came; everything is saved.
    """
    if config.devices > 1 and not distributed.has_rank():
        from vitkit.training.launch import launch

        result: TrainResult = launch(config, callbacks)
        return result
    with (
        _own_torch_state(),
        distributed.join_process_group(
            devices.resolve_device(config.device), config.timeout
        ) as world,
        ExitStack() as stack,
    ):
        refuse_missing(config)
        stopped = resume.find_stopped_run(config, world, stack)
        if stopped is None:
            world.broadcast_from_main(lambda: check_output(config))
        else:
            config, stopped = resume.settings_to_resume(config, stopped)
        plan = _make_plan_in_turn(config, world, resumes=stopped is not None)
        # before the folder is created, which a wrong callback would leave behind
        further = [*(make() for make in callbacks), *map(_user_callback, config.callbacks)]
        run = _begin(plan, stopped, world, stack)
        run.further = further
        if config.probe:
            return _fit_probe(run)
        return _make_steps(run, stopped, time_left)


@contextmanager
def _own_torch_state() -> Iterator[None]:
    """Restore torch's number of threads and its global generators after the block."""
    threads = torch.get_num_threads()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=gpus):
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _make_plan_in_turn(
    config: TrainConfig, world: distributed.ProcessGroup, *, resumes: bool
) -> Plan:
    """Make the plan on the first process first, so that the other processes read its caches."""
    plans: list[Plan] = []
    world.broadcast_from_main(lambda: plans.append(make_plan(config, world, resumes=resumes)))
    # the first process has it already
    if plans:
        return plans[0]
    return make_plan(config, world, resumes=resumes)


def _begin(
    plan: Plan, stopped: resume.StoppedRun | None, world: distributed.ProcessGroup, stack: ExitStack
) -> Run:
    """Claim the folder, build the model, open the log, tune, and make the parts of the run.

    Args:
        plan: the resolved inputs.
        stopped: the run that is resumed, if any.
        world: the processes of the run.
        stack: holds the lock of the folder, the log and the signal handlers.
    """
    notes: list[str] = []
    if stopped is None:
        folder = RunFolder(
            Path(world.broadcast_from_main(lambda: str(new_folder(plan.config, notes.append).root)))
        )
        world.broadcast_from_main(lambda: stack.enter_context(locked(folder.root)))
    else:
        folder = RunFolder(stopped.root)
    world.announce(folder.root)
    torch.set_num_threads(plan.config.threads or 1)
    # the initial weights come from this generator, all further draws from (seed, step)
    torch.manual_seed(plan.config.seed)
    model = initial_weights.make_model(plan.spec, plan.weights, plan.config, plan.device)
    plan = replace(plan, weights=None)  # the model has them
    log = stack.enter_context(
        RunLog(
            folder,
            total=plan.last_step,
            done=0 if stopped is None else stopped.step,
            quiet=plan.config.quiet,
            writes=world.is_main,
        )
    )
    resume_hint = partial(folder.resume_hint, how_to_resume(plan.config, folder.root))
    stop = stack.enter_context(process.stop_on_signal(resume_hint))
    if stopped is not None:
        notes += stopped.notes
    for line in (*plan.notes, *notes):
        log.info(line)
    log_model(plan, log, model)
    resumes = stopped is not None
    tune = partial(tuning.tune_settings, plan, model, log.info, resumes=resumes)
    with process.raise_on_signal(resume_hint):
        plan = plan.with_settings(world.broadcast_from_main(tune))
    log.set_total(plan.last_step)
    return make_run(plan, folder, log, model, stop, world)


def make_run(
    plan: Plan,
    folder: RunFolder,
    log: RunLog,
    model: ViT,
    stop: process.StopFlag,
    world: distributed.ProcessGroup | None = None,
) -> Run:
    """Build all parts of a run around a fresh model on the plan's device."""
    config, world = plan.config, world or distributed.ProcessGroup()
    if config.attention_kernel != "auto":
        use_attention(model, config.attention_kernel)
        if plan.teacher is not None:
            use_attention(plan.teacher.model, config.attention_kernel)
    # the EMA is a copy of the model, made before checkpointing of gradients and sharding
    ema = parameters.EMA(model, config.model_ema_decay) if config.model_ema else None
    precision.checkpoint_gradients(model, config.grad_checkpointing)
    if config.parallel == "fsdp" and world.size > 1:
        step.shard(model, world, plan.device)
        if ema is not None:
            step.shard(ema.model, world, plan.device)
    # after sharding, which replaces the parameters
    optimizer = optimizers.configured_optimizer(model, config)
    progress = Progress(data=plan.dataset.identity)
    training_step = make_step(
        plan, model, optimizer, compile=config.compile, world=world, stop=stop
    )
    # everything that decides the next step; unregistered state is not saved
    transform = training_step.transform
    parts: dict[str, Stateful | None] = {
        "model": ModelPart(model),
        "optimizer": OptimizerPart(optimizer),
        "ema": ema,
        "progress": progress,
        # of a run with a teacher, which must be the same when it is resumed
        "teacher": transform if isinstance(transform, Stateful) else None,
        "loss_scale": training_step.scale,
    }
    registry = {name: part for name, part in parts.items() if part is not None}
    return Run(
        plan,
        folder,
        log,
        world,
        stop,
        model,
        optimizer,
        progress,
        registry,
        training_step,
        ema,
    )


def _fit_probe(run: Run) -> TrainResult:
    """Fit a probe on features; the backbone stays as it is."""
    from vitkit.training.finish import evaluate_neighbours, finish_run, fit_linear_probe

    folder = run.folder
    _prepare(run, None)
    with process.raise_on_signal(run.resume_hint):
        if run.plan.config.probe == "knn":
            end = "k-nearest neighbours"
            metrics = evaluate_neighbours(run)
        else:
            end = "a linear probe"
            scores = fit_linear_probe(run)
            for path in (folder.best, folder.last):
                saving.Save(run).save_weights(path, scores)
            metrics = finish_run(run, end)
    return TrainResult(folder.root, folder.best, folder.last, metrics, end)


def _make_steps(
    run: Run, stopped: resume.StoppedRun | None, time_left: Callable[[], float] | None = None
) -> TrainResult:
    """Make the remaining steps, and finish."""
    plan, folder, progress = run.plan, run.folder, run.progress
    report, stop, save = ReportProgress(run), Stop(run), saving.Save(run)
    if stopped is not None:
        resume.restore_state(run, stopped)
        save.saved_step = progress.step
    # a run may be over by patience before its last step
    over = progress.step >= plan.last_step or stop.out_of_patience() is not None
    finished = stopped is not None and over and not progress.unvalidated
    _prepare(run, stopped, finished=finished)
    callbacks = callbacks_of(run, report, stop, save, time_left)
    trainer = Trainer(
        run.training_step,
        progress,
        partial(_batches, run, report),
        schedule=plan.learning_rate,
        steps_per_epoch=plan.steps.steps_per_epoch,
        epochs=plan.config.epochs,
        last_step=plan.last_step,
        callbacks=callbacks,
    )
    # state that is not registered would be lost on resume
    for part in (run, *callbacks):
        check_all_registered(part, run.registry)
    run.restart_clock()
    with saving.saved_on_error(run, save):
        trainer.run()
        end = trainer.stopped or run.plan.end_in_words(progress.step)
        from vitkit.training.finish import finish_run  # most of it runs only now

        metrics = finish_run(run, end)
    return TrainResult(folder.root, folder.best, folder.last, metrics, end)


def _prepare(run: Run, stopped: resume.StoppedRun | None, *, finished: bool = False) -> None:
    """Begin the record of the run, and log its settings and how it continues.

    Args:
        run: the run.
        stopped: the run that is resumed in this folder, if any.
        finished: the run has nothing left to train.
    """
    log, world, config = run.log, run.world, run.plan.config
    if stopped is None and config.resume == "auto":
        log.info(f"nothing to resume in {run.folder.root}; starting a new run")
    world.broadcast_from_main(lambda: resume.begin_record(run, stopped, finished=finished))
    if stopped is not None:
        resume.log_changes(run, stopped, finished=finished)
    if not finished:
        log_settings(run)
    # services are started by one process, too
    world.broadcast_from_main(lambda: log.track(config.logger, run.settings_to_store()))


def callbacks_of(
    run: Run,
    report: ReportProgress,
    stop: Stop,
    save: saving.Save,
    time_left: Callable[[], float] | None = None,
) -> list[Callback]:
    """List the callbacks of a run, in the order that exact resuming needs."""
    return [
        *run.further,
        TrainMode(run.model),
        HandleBadNumbers(run),
        *([AverageWeights(run.ema, run.model)] if run.ema else []),
        Evaluate(run, save),
        *([KeepDeadline(run, time_left)] if time_left else []),
        report,
        stop,  # before `save`, which writes the files of an ending run
        save,
    ]


def _batches(run: Run, report: ReportProgress, steps: range) -> Iterable[Batch]:
    """Return the batches of the remaining steps; the time before the first is not training time."""
    plan = run.plan
    arriving = batches(plan.steps, steps, workers=plan.workers)
    run.restart_clock()
    return report.watched(arriving)


def _user_callback(name: str) -> Callback:
    """Return the user's own callback of this name: an object, or made by a class or function."""
    made = import_setting("callbacks", name)
    problem = ""
    if not isinstance(made, Callback):  # an object may be callable as well
        try:
            made = made()
        except errors.Interrupted:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the user's class or function raises
            problem = f"; it raised {type(error).__name__}: {error}"
    if not isinstance(made, Callback):
        raise errors.SettingError(
            f"--callbacks {name} must be a vitkit.Callback, or a class or function without "
            f"arguments that makes one{problem}"
        )
    return made
