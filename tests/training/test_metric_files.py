"""Files of metrics: CSV rows and JSON lines."""

from __future__ import annotations

import pytest
from training.logged_runs import lines

from vitkit.training.monitoring import trackers as metric_files
from vitkit.training.run_folder import RunFolder


@pytest.mark.parametrize("left", ["", "epoch,st", "epoch,step,lr"])
def test_a_header_that_was_cut_short_is_written_again(tmp_path, left):
    run = RunFolder(tmp_path)
    run.metrics.write_text(left)
    metric_files.drop_rows_after(run, 10)
    metric_files.add_row(run, {"epoch": 1, "step": 20, "lr": 0.5})
    assert run.metrics.read_text() == "epoch,step,lr\n1,20,0.5\n"


def test_a_number_that_is_not_finite_is_null(tmp_path):
    run = RunFolder(tmp_path)
    metric_files.add_line(run, "step", {"step": 1, "a": float("nan"), "b": float("inf"), "c": 0.5})
    assert lines(tmp_path) == [{"kind": "step", "step": 1, "a": None, "b": None, "c": 0.5}]
