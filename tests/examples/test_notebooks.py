"""The notebooks run, and what is kept of their outputs names no machine."""

import re
from typing import Any

import pytest

from examples._notebooks import NAMES, execute, read
from tests._rows import slow_unless
from tests.preflight._compilers import need

# The kernel talks to the test over the loopback, and says that it does so unencrypted.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def kinds(notebook: Any) -> list[list[str]]:
    """What each code cell shows: text that is printed, tables, pictures."""
    return [
        sorted(kind for out in cell.outputs for kind in out.get("data", {"printed": ""}))
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_unless(NAMES, lambda name: name == "convert_a_model"))
def test_it_runs_and_shows_what_is_kept(name: str):
    if name == "will_it_fit":
        need("cuda")
        need("tpu")
    made = execute(name, flags="--xla_backend_optimization_level=0")
    assert kinds(made) == kinds(read(name))
    if name == "hunt_a_nan":
        assert re.search(r"an infinity in exp, .* at In\[\d+\]:3 attention", str(made.cells))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_kept_and_name_no_machine(name: str):
    notebook = read(name)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("text/html" in kind for kind in kinds(notebook))
    text = str([cell.outputs for cell in cells])
    # Lines are named by the cell that they are in, and not by the file that it is compiled as.
    assert re.findall(r"\d+\.py:\d+", text) == []
    assert re.findall(r"(?<![\w./])/(?:tmp|work|home|root|usr|Users)/\S*", text) == []


def test_there_are_three():
    assert NAMES == ("convert_a_model", "hunt_a_nan", "will_it_fit")
