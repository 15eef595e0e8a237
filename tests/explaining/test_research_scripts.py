"""The scripts in examples/research: each prints what is known of its own model."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak


@pytest.mark.parametrize(
    ("name", "words"),
    [("sanity_checks_of_maps", "'pointing': 1.0, 'positive': 1.0, 'model': 1.0}"),
     ("test_time_registers", "neurons: block 1 neuron 5\n")],
)  # fmt: skip
def test_the_script_prints_what_is_known_of_its_own_model(name, words, capsys):
    script = Path(__file__).parents[2] / f"examples/research/{name}.py"
    runpy.run_path(str(script))["main"]()
    assert words in capsys.readouterr().out
