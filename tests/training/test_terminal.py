"""What a run prints: lines without a terminal, a bar on one."""

from __future__ import annotations

import re

from training.logged_runs import train

from vitkit.training.monitoring import run_log as terminal


def test_without_a_terminal_a_line_comes_now_and_then(tmp_path, monkeypatch, capsys):
    train(tmp_path / "rarely", quiet=False)
    assert "  step " not in capsys.readouterr().out  # the run is shorter than `now and then`
    monkeypatch.setattr(terminal, "PLAIN", 0.0)
    train(tmp_path / "often", quiet=False)
    printed = [line for line in capsys.readouterr().out.splitlines() if "  step " in line]
    assert len(printed) == 30
    assert printed[14].startswith("epoch 2/3  step 15/30  loss ")
    for word in (" images/s  data wait ", "%  ", " GB  ", " left"):
        assert word in printed[14]
    assert printed[-1].endswith("0:00:00 left")


def test_on_a_terminal_there_is_a_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(terminal, "REFRESH", 0.0)
    train(tmp_path / "run", quiet=False, epochs=2)
    shown = capsys.readouterr().out
    assert "\x1b[" in shown
    assert "━" in shown
    assert "19/20" in shown
    assert "images/s  data wait" in shown


def test_the_bar_cuts_neither_steps_nor_the_time_left_on_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    bar = terminal.Display(total=12_510, done=0, quiet=False)
    status = "loss 1.058  3,265 images/s  data wait 13%  10.4 GB"
    bar.show(1234, "epoch 123/160", status, 7204.0)
    bar.start()
    bar.stop()
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert "epoch 123/160" in shown
    assert "1234/12510 2:00:04 left  loss 1.058  3,265 images/s" in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_a_file_name_is_printed_as_it_is(capsys):
    """Colons around a word are not the name of an emoji."""
    terminal.Display(total=1, done=0, quiet=False).print("skipped photos/:cat:/[bold]1.jpg")
    assert capsys.readouterr().out == "skipped photos/:cat:/[bold]1.jpg\n"
