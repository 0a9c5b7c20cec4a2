"""Lines of the user's code, as they are named."""

import sys
import types

import jax.numpy as jnp
import pytest

import halfstep
from halfstep._program.sources import Finder, Frame

CELL = "/tmp/ipykernel_7/2022863338.py"


@pytest.mark.parametrize(
    ("shell", "file"),
    [
        # As IPython's compiler answers.
        ({"compile": lambda name: ("Cell", "In[3]") if name == CELL else None}, "In[3]"),
        ({"compile": lambda name: None}, CELL),
        # An older shell, or none.
        ({}, CELL),
        (None, CELL),
    ],
)
def test_cells_of_notebooks(shell, file: str, monkeypatch: pytest.MonkeyPatch):
    ipython = types.ModuleType("IPython")
    made = None
    if shell is not None:
        compilers = {name: types.SimpleNamespace(format_code_name=f) for name, f in shell.items()}
        made = types.SimpleNamespace(**compilers)
    ipython.get_ipython = lambda: made  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    source = Finder().choose([Frame(CELL, 4, "loss.<locals>.attention")])
    assert (source.file, source.line, source.function) == (file, 4, "attention")
    assert source.short == f"{file.rpartition('/')[2]}:4"
    assert Finder().choose([Frame("train.py", 4, "loss")]).file == "train.py"


def test_a_function_of_jax_itself_has_no_line():
    """JAX keeps the frames from the traced function on, and none of them is the user's."""
    x = jnp.ones((2, 3))
    (product,) = halfstep.explain(jnp.dot, "bf16")(x, x.T).operations
    assert str(product.source) == "-"
