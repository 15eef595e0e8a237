"""Distillation: the equations of the papers, the parameters of the wrapper, runs."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peers import peer
from torch import nn
from training import worlds
from training.faulty import on
from training.tiny_runs import end_of, run

import vitkit
from vitkit import TrainResult, cli
from vitkit.training.distillation import Teacher, as_teacher, renormalise

SMALL = {"image_size": 8, "patch_size": 4, "width": 16, "depth": 1, "num_heads": 2,
         "mlp_width": 32, "num_classes": 5}  # fmt: skip
T, ALPHA = 4.0, 0.3


def small(seed: int = 0, **fields) -> vitkit.ViT:
    torch.manual_seed(seed)
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL | fields))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


class Convolutions(nn.Module):
    """A convolutional teacher with batch statistics, which must not change."""

    def __init__(self, classes: int = 5, channels: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)
        )
        self.head = nn.Linear(4, classes)

    def forward(self, images):
        return self.head(self.layers(images).mean((2, 3)))


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 3, 8, 8, generator=generator), torch.arange(6) % 5


def log_softmax(z):
    return z - z.exp().sum(1, keepdim=True).log()


def cross_entropy(z, labels):
    return -log_softmax(z)[range(len(labels)), labels].mean()


@pytest.mark.parametrize("token", [True, False])
@pytest.mark.parametrize("hard", [True, False])
def test_the_loss_is_the_papers(batch, token, hard):
    """Compare with DeiT's Eq. 2 and 3 on the wrapper's own logits; one head learns from both."""
    images, labels = batch
    student, teacher = small(distillation_token=token), Convolutions()
    loss = vitkit.DistillWrapper(student, teacher, T, ALPHA, hard)(images, labels)
    z_t = teacher.eval()(images)
    if token:
        z_s, z_d = student.forward_heads(student.forward_features(images))
        assert not torch.allclose(z_s, z_d)
    else:
        z_s = z_d = student(images)
    if hard:
        part = cross_entropy(z_d, z_t.argmax(1))
    else:
        p, q = log_softmax(z_t / T), log_softmax(z_d / T)
        part = T**2 * (p.exp() * (p - q)).sum(1).mean()
    assert loss.item() == pytest.approx(
        ((1 - ALPHA) * cross_entropy(z_s, labels) + ALPHA * part).item(), rel=1e-5
    )


def test_the_teacher_is_only_asked(batch):
    """It stays in eval mode, gets no gradient, and is in no `state_dict`."""
    student, teacher = small(distillation_token=True), Convolutions()
    before = copy.deepcopy(teacher.state_dict())
    wrapper = vitkit.DistillWrapper(student, teacher).train()
    teacher.train()
    losses = [wrapper(*batch) for _ in range(2)]
    losses[0].backward()
    assert losses[0] == losses[1], "the teacher drops units"
    assert all(torch.equal(v, before[k]) for k, v in teacher.state_dict().items())
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None for p in student.parameters())
    assert {id(p) for p in wrapper.parameters()} == {id(p) for p in student.parameters()}
    assert set(wrapper.state_dict()) == {f"student.{name}" for name in student.state_dict()}


def test_the_teacher_moves_along():
    teacher = Convolutions()
    vitkit.DistillWrapper(small(), teacher).to(torch.float64)
    assert teacher.head.weight.dtype == torch.float64


def test_what_is_set_wrong_is_named(batch):
    with pytest.raises(vitkit.SettingError, match="alpha"):
        vitkit.DistillWrapper(small(), small(), alpha=1.5)
    with pytest.raises(vitkit.SettingError, match="temperature"):
        vitkit.DistillWrapper(small(), small(), temperature=0.0)
    with pytest.raises(vitkit.SettingError, match="the teacher has 7 classes and the student 5"):
        vitkit.DistillWrapper(small(), small(num_classes=7))(*batch)
    with pytest.raises(vitkit.SettingError, match=r"returns Tensor \(6, 4, 6, 6\); expected"):
        vitkit.DistillWrapper(small(), nn.Conv2d(3, 4, 3))(*batch)
    with pytest.raises(vitkit.CheckpointError, match=r"^the teacher: .*nowhere"):
        vitkit.DistillWrapper(small(), "nowhere.safetensors")


@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.Sequential])
def test_heads_that_cannot_be_reached_are_not_averaged_in_silence(batch, wrap):
    with pytest.raises(vitkit.SettingError, match="two heads of the student cannot be reached"):
        vitkit.DistillWrapper(wrap(small(distillation_token=True)), small())(*batch)
    assert vitkit.DistillWrapper(wrap(small()), small())(*batch).isfinite()


def test_images_are_converted_to_what_the_teacher_expects():
    """Compare one image normalised for both models, for several sizes and channels."""
    grey = vitkit.Preprocess(image_size=8, mean=(0.3,), std=(0.2,))
    colour = vitkit.Preprocess(image_size=16, mean=(0.4, 0.5, 0.6), std=(0.1, 0.2, 0.4))
    unit = torch.full((2, 1, 8, 8), 0.7)
    theirs = renormalise((unit - 0.3) / 0.2, grey, colour)
    assert theirs.shape == (2, 3, 16, 16)
    expected = (0.7 - torch.tensor(colour.mean)) / torch.tensor(colour.std)
    torch.testing.assert_close(theirs, expected.view(3, 1, 1).expand(2, 3, 16, 16))
    torch.testing.assert_close(renormalise(theirs, colour, grey), (unit - 0.3) / 0.2)
    red = (torch.tensor([1.0, 0, 0]) - torch.tensor(colour.mean)) / torch.tensor(colour.std)
    assert renormalise(red.view(1, 3, 1, 1), colour, grey.replace(image_size=1)).item() == (
        pytest.approx((0.299 - 0.3) / 0.2, abs=1e-5)
    )


def test_a_checkpoint_s_own_preprocess_is_used(batch, tmp_path):
    model = small(1, image_size=12)
    its = vitkit.Preprocess(image_size=12, mean=(0.2, 0.3, 0.4), std=(0.3, 0.3, 0.3))
    path = vitkit.save(tmp_path / "teacher.safetensors", model, preprocess=its)
    seen = vitkit.Preprocess(image_size=8)
    loss = vitkit.DistillWrapper(small(), path, alpha=1.0, preprocess=seen)(*batch)
    moved = vitkit.DistillWrapper(small(), Teacher(model, its), alpha=1.0, preprocess=seen)(*batch)
    assert loss == moved
    with pytest.warns(UserWarning, match="pass preprocess="):
        vitkit.DistillWrapper(small(), path)


def timm_teacher() -> nn.Module:
    return peer("timm").create_model("resnet10t", num_classes=5)


def transformers_teacher() -> nn.Module:
    config, model = peer("transformers", "ViTConfig", "ViTForImageClassification")
    return model(config(image_size=32, patch_size=16, hidden_size=16, num_hidden_layers=1,
                        num_attention_heads=2, intermediate_size=16, num_labels=5))  # fmt: skip


@pytest.mark.parametrize("make", [timm_teacher, transformers_teacher])
def test_other_libraries_teach(make, batch):
    _, labels = batch
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    teacher = make()
    logits = teacher.eval()(images)
    logits = getattr(logits, "logits", logits)
    seen = vitkit.Preprocess(image_size=32)
    source = Teacher(teacher, seen)
    loss = vitkit.DistillWrapper(
        small(image_size=32), source, alpha=1.0, preprocess=seen, hard=True
    )
    student = small(image_size=32)(images)
    assert loss(images, labels).item() == pytest.approx(
        cross_entropy(student, logits.argmax(1)).item(), rel=1e-4
    )


def test_timm_says_what_its_images_become():
    model = timm_teacher()
    model.pretrained_cfg |= {"interpolation": "lanczos"}
    teacher = as_teacher(model)
    assert teacher.preprocess is not None
    assert teacher.preprocess.interpolation == "bicubic"  # in place of one that vitkit lacks
    assert teacher.preprocess.mean == (0.485, 0.456, 0.406)
    assert teacher.preprocess.image_size == (176, 176)


def test_timm_s_module_wants_the_size_that_it_was_built_for():
    model = peer("timm").create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=10, depth=1
    )
    assert model.pretrained_cfg["input_size"] == (3, 224, 224)
    source = as_teacher(model)
    assert source.preprocess.image_size == (32, 32)
    student, digits = vitkit.Preprocess(image_size=8, mean=(0.5,), std=(0.5,)), tuple("0123456789")
    teacher, _ = source.for_classes(digits, student, torch.device("cpu"))
    assert teacher(torch.zeros(2, 1, 8, 8), student).shape == (2, 10)


def test_a_teacher_that_cannot_take_the_images_names_those_that_it_was_fed():
    wanted = vitkit.Preprocess(image_size=12)
    with pytest.raises(vitkit.SettingError, match=r"cannot take images \(1, 3, 12, 12\)"):
        Teacher(small(in_channels=1), wanted).for_classes(tuple("abcde"), GREY, torch.device("cpu"))
    with pytest.raises(vitkit.SettingError, match=r"cannot take images \(1, 1, 8, 8\)"):
        Teacher(small()).for_classes(tuple("abcde"), GREY, torch.device("cpu"))


def test_timm_s_module_for_other_channels_than_its_mean_sees_what_the_student_sees():
    settings = {"img_size": 8, "patch_size": 4, "num_classes": 10, "depth": 1}
    model = peer("timm").create_model("vit_tiny_patch16_224", in_chans=1, **settings)
    teacher, _ = as_teacher(model).for_classes(tuple("0123456789"), GREY, torch.device("cpu"))
    assert teacher(torch.zeros(2, 1, 8, 8), GREY).shape == (2, 10)


def test_timm_s_distilled_models_are_students_too(batch):
    images, labels = batch
    student = peer("timm.models.deit", "VisionTransformerDistilled")(
        img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=5
    )
    vitkit.DistillWrapper(student, small(1), alpha=1.0)(images, labels).backward()
    assert student.head_dist.weight.grad.abs().max() > 0
    assert student.head.weight.grad.abs().max() == 0


DIGITS = {"image_size": 8, "in_channels": 1, "num_classes": 10}
GREY = vitkit.Preprocess(image_size=8, mean=(0.4,), std=(0.3,))
PLAIN = vitkit.Preprocess(image_size=8, mean=(0.5,), std=(0.5,))
STEPS = 13
"""Of the runs below: into the second of their epochs of 10."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """Save a checkpoint that knows the digits, with a normalisation of its own."""
    path = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    return vitkit.save(path, small(7, **DIGITS), preprocess=GREY, classes=[*"0123456789"])


def taught(
    output: Path,
    teacher: Path | str,
    callback: Callable[[], vitkit.Callback] | None = None,
    **settings,
):
    asked = {"teacher": str(teacher), "max_steps": STEPS, "model_ema": False} | settings
    return run(output, callback, **asked)


def test_a_run_learns_from_the_teacher_and_leaves_the_student_alone(teacher, tmp_path):
    spec = {"class_token": True, "pooling": "cls", "distillation_token": True, "depth": 1,
            "width": 32}  # fmt: skip
    made = taught(tmp_path / "run", teacher, spec=spec, distill_alpha=1.0)
    student = vitkit.load(made.last).model
    assert student.head_dist.weight.abs().max() > 0.01
    assert student.head.weight.abs().max() < 1e-6, "its share of the loss is nothing"
    assert set(student.state_dict()) == set(vitkit.ViT(student.spec).state_dict())


@pytest.mark.parametrize("mixup", [0.0, 1.0])
def test_the_teacher_sees_the_images_of_the_student(teacher, tmp_path, mixup):
    """Mixed images, too, as in DeiT: its targets are those of the mixed image."""

    def check(trainer, batch):
        fed = trainer.training_step.transform(batch, 0, 0)
        plain = batch.images(PLAIN, torch.device("cpu"))
        assert torch.allclose(fed.images, plain) == (mixup == 0.0)
        logits = vitkit.load(teacher).model(renormalise(fed.images, PLAIN, GREY))
        torch.testing.assert_close(fed.soft, (logits / 2.0).softmax(1))
        assert not fed.soft.requires_grad

    taught(tmp_path / "run", teacher, on(before_step=check), mixup=mixup, shift=2,
           distill_temperature=2.0, max_steps=1, epochs=1, warmup_epochs=0.0,
           grad_accum_steps=1)  # fmt: skip


def stopping(step: int) -> Callable[[], vitkit.Callback]:
    def before_step(trainer, batch):
        trainer.training_step.stop.signum = 15 if trainer.progress.step == step else None

    return on(before_step=before_step)


def test_a_resumed_run_ends_with_the_same_bits(teacher, tmp_path):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    taught(straight, teacher)
    with pytest.raises(vitkit.Interrupted):
        taught(stopped, teacher, stopping(7))
    taught(stopped, teacher, resume=str(stopped))
    assert end_of(stopped) == end_of(straight)


@pytest.mark.parametrize("views", [0, 2])
def test_a_stopped_run_of_an_earlier_version_resumes_without_views(
    teacher, tmp_path, views, capsys
):
    """`distill_views: 0` was the default, with which the teacher ran in every step."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    with pytest.raises(vitkit.Interrupted):
        taught(stopped, teacher, stopping(7))
    config = stopped / "config.yaml"
    config.write_text(config.read_text() + f"distill_views: {views}\n")
    code = cli.run(["train", "--resume", str(stopped), "--quiet"])
    if views == 0:
        taught(straight, teacher)
        assert (code, end_of(stopped)) == (0, end_of(straight))
        return
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert "there is no setting 'distill_views'; leave it out: the teacher runs in every" in line


def test_two_processes_learn_what_one_does(teacher, tmp_path):
    spec = worlds.PLAIN["spec"] | {"distillation_token": True}
    settings = {"teacher": str(teacher), "max_steps": 3, "spec": spec}
    alone = worlds.run(1, tmp_path / "alone", **settings)
    found = worlds.run(2, tmp_path / "both", parallel="fsdp", **settings)
    assert [one["error"] for one in found] == [None, None]
    expected = worlds.numbers(alone)
    for step, numbers in worlds.numbers(found).items():
        assert numbers == pytest.approx(expected[step], rel=1e-5)


def test_a_run_resumes_only_with_its_own_teacher(teacher, tmp_path):
    output = tmp_path / "run"
    with pytest.raises(vitkit.Interrupted):
        taught(output, teacher, stopping(3))
    other = vitkit.save(tmp_path / "o.safetensors", small(8, **DIGITS), preprocess=GREY,
                        classes=[*"0123456789"])  # fmt: skip
    with pytest.raises(vitkit.CheckpointError, match=r"o\.safetensors is not the teacher that"):
        taught(output, other, resume=str(output))
    moved = shutil.copy(teacher, tmp_path / "moved.safetensors")
    taught(output, moved, resume=str(output))


def test_classes_are_matched_by_name(teacher, tmp_path):
    """A teacher with another order of classes, and one more class, has the same targets."""
    order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    model = small(7, **DIGITS | {"num_classes": 11})
    known = small(7, **DIGITS).state_dict()
    head = torch.cat([torch.tensor(order), torch.tensor([0])])
    weights = {n: v[head] if n.startswith("head.") else v for n, v in known.items()}
    model.load_state_dict(weights)

    def student_of(name: str, classes: list[int]) -> torch.Tensor:
        path = vitkit.save(tmp_path / f"{name}.safetensors", model, preprocess=GREY,
                           classes=[*map(str, classes), "ten"])  # fmt: skip
        made = taught(tmp_path / name, path, max_steps=3)
        assert (
            "classes of the teacher that the data lack, left out: 1"
            in (made.run / "train.log").read_text()
        )
        return flat(made)

    def flat(made: TrainResult) -> torch.Tensor:
        return torch.cat([v.flatten() for v in vitkit.load(made.last).model.state_dict().values()])

    expected = flat(taught(tmp_path / "plain", teacher, max_steps=3))
    same, mistaken = student_of("same", order), student_of("mistaken", sorted(order))
    # Not the same bits: a matrix of eleven columns may be multiplied in another order.
    assert (same - expected).norm() < 1e-3 * (mistaken - expected).norm()


def nine_digits() -> nn.Module:
    return Convolutions(9, channels=1)


def ten_digits() -> nn.Module:
    return Convolutions(10, channels=1)


def no_model() -> int:
    return 3


class Unfinished(nn.Module):
    """A model whose forward has a mistake."""

    def forward(self, images):
        return self.missing(images)


def no_file() -> nn.Module:
    return {}["teacher"]


def test_wrong_teachers_are_refused_in_one_line(teacher, tmp_path):
    letters = vitkit.save(tmp_path / "abc.safetensors", small(**DIGITS), preprocess=GREY,
                          classes=[*"abcdefghij"])  # fmt: skip
    twice = vitkit.save(tmp_path / "twice.safetensors", small(**DIGITS), preprocess=GREY,
                        classes=[*"0123456781"])  # fmt: skip
    here = f"{__name__}:"
    for source, message in (
        (twice, "the teacher has several classes called '1'; train it on this data"),
        (letters, "the teacher lacks the classes '0', '1', .* it has 'a', 'b'"),
        (tmp_path / "none.safetensors", "--teacher: .*none.safetensors"),
        (here + "nine_digits", "the teacher has 9 classes and the data have 10"),
        (here + "no_model", "no_model gives int; expected a Teacher or a module"),
        ("nowhere:model", "--teacher nowhere:model cannot be built: .*No module named 'nowhere'"),
        (here + "Convolutions", "cannot take images"),
        (here + "Unfinished", "the teacher Unfinished cannot take images .*no attribute 'missing'"),
        (here + "no_file", "no_file cannot be built: KeyError: 'teacher'; pass a checkpoint"),
    ):
        with pytest.raises((vitkit.SettingError, vitkit.CheckpointError), match=message):
            taught(tmp_path / "run", source)
    with pytest.raises(vitkit.SettingError, match="--distill hard has no effect without --teacher"):
        run(tmp_path / "run", distill="hard")
    with pytest.raises(vitkit.SettingError, match=r"temperature 9 has no effect .* leave one"):
        taught(tmp_path / "run", teacher, distill="hard", distill_temperature=9.0)
    assert not (tmp_path / "run").exists()


def test_a_teacher_without_class_names_is_taken_with_a_line(tmp_path):
    made = taught(tmp_path / "run", f"{__name__}:ten_digits", max_steps=1)
    assert "the teacher has no class names; its 10 logits" in (made.run / "train.log").read_text()
