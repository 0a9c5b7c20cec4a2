"""The examples of the integrations run."""

import inspect
import pathlib
from types import ModuleType

import pytest

import halfstep.integrations.flax
import halfstep.integrations.nnx
from tests.test_snippets import blocks, run

pytestmark = pytest.mark.core


def documented(module: ModuleType) -> dict[str, str]:
    functions = inspect.getmembers(module, inspect.isfunction)
    own = [(n, f) for n, f in functions if f.__module__ == module.__name__ and n[0] != "_"]
    return {name: inspect.getdoc(thing) or "" for name, thing in [("module", module), *own]}


EXAMPLES = {
    "nnx.value_and_grad": documented(halfstep.integrations.nnx)["value_and_grad"],
    "nnx.grad": documented(halfstep.integrations.nnx)["grad"],
    "nnx.optimizer_update": documented(halfstep.integrations.nnx)["optimizer_update"],
    "flax": documented(halfstep.integrations.flax)["module"],
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, tmp_path: pathlib.Path):
    assert run(blocks(EXAMPLES[name]), name, tmp_path) > 0


def test_every_public_function_has_one():
    assert set(documented(halfstep.integrations.nnx)) - {"module"} == {
        name.removeprefix("nnx.") for name in EXAMPLES if name.startswith("nnx.")
    }
