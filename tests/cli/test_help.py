"""The help of every verb, other programs' words, completion, and what a verb says at its end."""

import dataclasses
import os
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from own_methods import METHODS
from PIL import Image
from tiny_checkpoint import save_tiny

import vitkit
from vitkit import cli
from vitkit.training.config.merging import programs
from vitkit.training.config.train_config import SECTIONS
from vitkit.weights.catalogue import catalogue


def printed_help(verb: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run([verb, *words, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_names_arguments_and_fits_80_columns(verb, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    text = printed_help(verb, capsys)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(f"usage: vitkit {verb} ")
    for noise in ("{None}", "None", "STR", "default: )"):
        assert noise not in text
    # no line ends early: the next word would not have fitted
    for line, following in zip(text.splitlines(), text.splitlines()[1:], strict=False):
        same = re.match(r" {26}\S", line) and re.match(r" {26}\S", following)
        if same and not line.endswith("."):
            # a default stays on one line with its word
            (word,) = re.findall(r"^\s*(default: \S+|\S+)", following)
            assert len(line) + 1 + len(word) > 80, line
    assert cli.run(["help", verb]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_argument_is_explained_in_its_own_entry(verb):
    command = cli.command_of(verb)
    names = {argument.name for argument in command.arguments}
    for argument in command.arguments:
        assert argument.help, argument.name
        # the text of another argument, which an indented line of the docstring would become
        assert not names & set(re.findall(r"(?:^|\. )(\w+): ", argument.help)), argument.name


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_three_examples_that_can_be_parsed(verb):
    command = cli.command_of(verb)
    assert len(command.examples) >= 3
    for example in command.examples:
        _, _, words = example.partition(f"vitkit {verb}")
        words = words.partition("  #")[0]
        if verb != "completion":  # there the shell's own signs follow
            cli.arguments.parse(command, shlex.split(words))


@pytest.mark.parametrize(
    ("verb", "usage"),
    [("eval", "vitkit eval CHECKPOINT DATA [flags]"),
     ("predict", "vitkit predict CHECKPOINT IMAGES ... [flags]"),
     ("compare", "vitkit compare CHECKPOINT OTHER_CHECKPOINT ... [flags]"),
     ("embed", "vitkit embed CHECKPOINT IMAGES ... --out FILE [flags]"),
     ("convert", "vitkit convert FILE OUT --to FORMAT [flags]"),
     ("models", "vitkit models [PATTERN] [flags]"), ("train", "vitkit train DATA [flags]")],
)  # fmt: skip
def test_positional_arguments_have_names(verb, usage, capsys):
    assert printed_help(verb, capsys).startswith(f"usage: {usage}\n")


def test_the_help_of_train_is_short_and_names_the_whole_one(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    text = printed_help("train", capsys)
    assert len(text.splitlines()) <= 110
    for flag in ("--epochs", "--batch-size", "--lr", "--model", "--pretrained", "--show-batch"):
        assert f" {flag}" in text
    assert "--bce-threshold" not in text
    whole = printed_help("train", capsys, "--help-all")
    assert "--bce-threshold" in whole
    flags = re.findall(r"^  (?:-\w, )?(--[\w.-]+)", whole, flags=re.MULTILINE)
    assert f"`vitkit train --help-all` lists all {len(flags)}." in " ".join(text.split())
    assert set(re.findall(r"^  (?:-\w, )?(--[\w.-]+)", text, flags=re.MULTILINE)) < set(flags)
    assert cli.run(["help", "train", "--help-all"]) == 0
    assert capsys.readouterr().out == whole
    assert cli.run(["train", "photos", "--bacth-size", "4"]) == 2
    assert cli.run(["train", "photos", "--qqqq", "4"]) == 2
    assert "`vitkit train --help-all` lists all" in capsys.readouterr().err
    # the help of the other verbs has all flags
    assert printed_help("predict", capsys, "--help-all") == printed_help("predict", capsys)


def test_settings_of_a_run_stand_in_the_groups_of_their_sections(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    text = printed_help("train", capsys, "--help-all")
    titles = re.findall(r"^([a-z-]+):$", text, flags=re.MULTILINE)
    assert len(titles) == len(SECTIONS) + 2  # arguments and examples
    assert {"data", "model", "augmentation", "distillation", "evaluation", "run"} <= set(titles)
    blocks = re.split(r"^[a-z-]+:$", text, flags=re.MULTILINE)[2:]
    for section, block in zip(SECTIONS, blocks, strict=False):
        for field in dataclasses.fields(section):
            shown = re.search(rf"--{field.name.replace('_', '-')}[ .,\n]", block) is not None
            assert shown == (field.name not in ("data", "start")), field.name
    assert "--spec.FIELD VALUE" in text
    assert "-c, --recipe, --config NAME|FILE" in text
    assert "--sched cosine|linear|constant|rsqrt" in text
    assert "Recipes: digits, mnist" in text


def test_a_recipe_decides_the_defaults_of_the_help(capsys):
    assert "(default: 160)" not in printed_help("train", capsys, "--help-all")
    assert "(default: 160)" in printed_help("train", capsys, "--recipe", "digits")


def test_choices_written_out_are_those_that_exist():
    choices = {
        argument.name: set(argument.choices)
        for verb in ("convert", "explain")
        for argument in cli.command_of(verb).arguments
    }
    assert choices["to"] == vitkit.formats()
    assert choices["method"] == {*METHODS, "all"}


@pytest.mark.parametrize("program", programs())
def test_words_of_other_programs_stand_for_settings_that_exist(program):
    known = {field.name for field in dataclasses.fields(vitkit.TrainConfig)}
    known |= {f"spec.{field.name}" for field in dataclasses.fields(vitkit.ViTSpec)}
    known |= {"top_k", "to", "faithfulness"}  # flags of other verbs
    for word, meaning in programs()[program].items():
        # a setting of train that another verb does not have; in train our own name wins
        shared = ("data", "attention_kernel", "grad_checkpointing", "parallel")
        assert word not in known or word in shared
        if not meaning.endswith("."):
            assert set(meaning.split()) <= known, word


@pytest.mark.parametrize(
    ("word", "ours"),
    [("learning_rate", "'lr'"), ("n_epoch", "'epochs'"), ("imgsz", "'img_size'"),
     ("hidden_size", "'spec.width'"), ("BatchSize", "'batch_size'")],
)  # fmt: skip
def test_python_and_recipes_answer_other_programs_words_too(word, ours, tmp_path, capsys):
    with pytest.raises(vitkit.SettingError, match=f"no setting '{word}'; vitkit calls it {ours}"):
        vitkit.train("digits", **{word: 1})
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"seed: 1\n{word}: 1\n")
    assert cli.run(["train", "digits", "--recipe", str(recipe)]) == 2
    message = f"mine.yaml:2: there is no setting '{word}'; vitkit calls it {ours}\n"
    assert capsys.readouterr().err.endswith(message)


def completions(script: Path, *words: str) -> set[str]:
    """What bash offers for the last of the words."""
    ask = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()\n'
        "$(complete -p vitkit | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(
        ["bash", "-c", ask, "bash", str(script), "vitkit", *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


def test_bash_completes_verbs_flags_and_choices(tmp_path, capsys):
    assert cli.run(["completion", "bash"]) == 0
    script = tmp_path / "vitkit.bash"
    script.write_text(capsys.readouterr().out)
    assert set(cli.VERBS) <= completions(script, "")
    for flag in ("prove_resume", "show_batch"):  # no settings of a run
        assert completions(script, "train", f"--{flag.partition('_')[0]}-") == {
            f"--{flag.replace('_', '-')}"
        }
    assert "--help-all" in completions(script, "train", "--help")
    assert completions(script, "train", "--ba") == {"--bad-images", "--balance", "--batch-size"}
    assert {"auto", "bfloat16"} <= completions(script, "train", "--amp", "")
    assert completions(script, "convert", "a", "b", "--to", "hug") == {"huggingface"}


@pytest.mark.parametrize(("shell", "first"), [("zsh", "#compdef vitkit"), ("fish", "vitkit")])
def test_scripts_of_other_shells(shell, first, capsys):
    assert cli.run(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert first in out
    assert "batch-size" in out


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with weights for the ten digits, twice, and images with a broken one."""
    monkeypatch.chdir(tmp_path)
    for name in ("weights.safetensors", "a-model-with-a-long-name-of-its-own.safetensors"):
        save_tiny(Path(name), list("0123456789"))
    for number in range(8):
        image = np.random.default_rng(number).integers(0, 256, (9, 9, 3), dtype=np.uint8)
        path = Path("photos", f"class-{number % 2}", f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    Path("photos/class-0/9.png").write_bytes(b"words")
    return tmp_path


LONG_NAME = "a-model-with-a-long-name-of-its-own.safetensors"


@pytest.mark.parametrize(
    ("command", "code"),
    [("models vit_*", 0), ("models vit_small* --pretrained", 0), ("summary weights.safetensors", 0),
     ("summary vit_base_r50_s16_384 --depth 2", 0), ("inspect weights.safetensors", 0),
     ("check photos", 2), ("check digits", 0),
     ("eval weights.safetensors digits --batch-size 512", 0),
     (f"compare weights.safetensors {LONG_NAME} --data digits", 0),
     ("convert weights.safetensors out --to timm", 0)],
)  # fmt: skip
def test_output_fits_80_columns(command, code, place, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # counts as a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.run(shlex.split(command)) == code
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    # what is pasted is never broken
    too_long = [line for line in lines if len(line) > 80 and " " in line.strip()]
    assert [line for line in too_long if not line.startswith("next: ")] == []
    assert lines
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)


def test_commands_to_continue_with(place, monkeypatch, capsys):
    Path("photos/class-0/9.png").unlink()
    # data go to stdout, so the next command goes to stderr, and only beside a terminal
    assert cli.run(["eval", "weights.safetensors", "digits"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli.run(["eval", "weights.safetensors", "digits"]) == 0
    follow = "next: vitkit eval weights.safetensors digits --predictions predictions.csv\n"
    assert capsys.readouterr().err == follow
    assert cli.run(shlex.split(follow)[2:]) == 0
    assert "predictions: predictions.csv, 359 rows\n" in capsys.readouterr().out
    assert cli.run(["eval", "weights.safetensors", "digits", "--json"]) == 0
    assert capsys.readouterr().err == ""
    commands = {
        "check photos --follow-links": "vitkit train photos --follow-links",
        "convert weights.safetensors out --to timm": "vitkit inspect out",
        "inspect out": "vitkit summary out",
        "summary vit_tiny_patch16_224": "vitkit models vit_tiny_patch16_224 --pretrained",
        "models vit_tiny*": "vitkit summary vit_tiny_patch14_224",
    }
    for command, following in commands.items():
        assert cli.run(shlex.split(command)) == 0
        assert f"next: {following}" in "".join(capsys.readouterr()), command


def test_a_pickle_is_converted_after_it_was_inspected(place, monkeypatch, capsys):
    torch.save(vitkit.load("weights.safetensors").model.state_dict(), "net.pth")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    stated = "--trust-pickle --spec.num-heads 2"
    assert cli.run(shlex.split(f"inspect net.pth {stated}")) == 0
    follow = f"next: vitkit convert net.pth model.safetensors --to vitkit {stated}\n"
    assert capsys.readouterr().err == follow
    assert cli.run(shlex.split(follow)[2:]) == 0
    assert vitkit.load("model.safetensors").model.spec.num_heads == 2


@pytest.mark.parametrize("model", ["vit_tiny_patch14_224", "vit_small_patch16_224"])
def test_published_weights_are_named_where_there_are_some(model, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    there_are = bool(vitkit.list_models(model, pretrained=True))
    assert there_are == (model == "vit_small_patch16_224")
    for verb in ("summary", "models"):
        assert cli.run([verb, model]) == 0
        assert (f"vitkit models {model} --pretrained\n" in capsys.readouterr().err) == there_are


def test_a_published_pickle_is_inspected_with_trust(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    names = [name for name, entry in catalogue().items() if entry.pickle]
    assert cli.run(["models", names[0], "--pretrained"]) == 0
    address = catalogue()[names[0]].address
    assert capsys.readouterr().err == f"next: vitkit inspect {address} --trust-pickle\n"


def test_place_of_results_and_next_command_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", "--recipe", "digits", "--max-steps", "1", "--amp", "off"]
    words += ["--spec.depth", "1", "--spec.width", "16", "--epochs", "2", "--warmup-epochs", "1"]
    words += ["--no-plots"]
    assert cli.run([*words, "--output", "my run"]) == 0
    results = "results: my run\nreport: my run/report.html\n"
    assert capsys.readouterr().out.endswith(results)  # without an epoch, no best
    assert cli.run(["train", "--resume", "my run", "--max-steps", "10"]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"{results}next: vitkit explain 'my run' --model\n")
    follow = shlex.split(out.splitlines()[-1].removeprefix("next: vitkit "))
    assert cli.run(follow) == 0
    assert sorted(os.listdir()) == ["explanations", "my run"]
