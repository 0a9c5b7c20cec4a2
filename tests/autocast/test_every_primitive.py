"""Every primitive that JAX and the libraries beside it bring has a row in a table."""

import json
import os
import subprocess
import sys

import pytest

from halfstep._autocast.primitives import COLLECTIVES, PASSING, TABLE, Rule
from halfstep._program.control_flow import TABLE as STRUCTURES

pytestmark = pytest.mark.core

# All modules of these are imported, as far as they can be, in a process of its own; and then all
# primitives are asked of the garbage collector, also those that no module has a name for.
PACKAGES = (
    *("jax", "equinox", "optax", "flax.nnx", "flax.linen", "haiku"),
    # Where they are installed.
    *("diffrax", "lineax", "optimistix", "jaxopt", "quax", "distrax", "numpyro", "e3nn_jax"),
    *("tokamax", "penzai", "haliax", "brax", "keras", "ott", "tinygp", "jraph", "jax_md"),
)
# These are only bound within a kernel, which runs as it is written.
KERNELS = (
    *("jax._src.pallas", "jax.experimental.pallas", "jax.experimental.mosaic"),
    *("jax._src.thunky", "jax.experimental.thunky"),
)
WALK = """
import gc, importlib, json, pkgutil, sys

def load(name):
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit):  # It needs something that is not here.
        return None

for package in json.loads(sys.argv[1]):
    for found in pkgutil.walk_packages(getattr(load(package), "__path__", ()), package + "."):
        if not any(part in found.name for part in ("test", "tools", "colab", ".jax2tf")):
            load(found.name)

from jax.extend.core import Primitive

where = {}
for module in list(sys.modules.values()):
    for value in list(vars(module).values()):
        if isinstance(value, Primitive):
            where.setdefault(value.name, []).append(module.__name__)
names = {value.name for value in gc.get_objects() if isinstance(value, Primitive)}
print(json.dumps({name: where.get(name, []) for name in sorted(names)}))
"""


def walked(*packages: str) -> dict[str, list[str]]:
    """The names of all primitives, each with the modules that have it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WALK, json.dumps(packages)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_every_primitive_has_a_row():
    found = walked(*PACKAGES)
    assert len(found) > 300
    missing = {
        name: modules
        for name, modules in found.items()
        if name not in TABLE
        and name not in STRUCTURES
        and not any(module.startswith(KERNELS) for module in modules)
    }
    assert missing == {}, "say in halfstep/_autocast/primitives.py in which precision these run"


def test_a_primitive_that_is_in_no_table_is_found(tmp_path, monkeypatch):
    """The walk sees what a package hides in a function."""
    code = "from jax.extend.core import Primitive\ndef hidden(made=Primitive('of_nobody')): pass\n"
    (tmp_path / "hidden_primitive").mkdir()
    (tmp_path / "hidden_primitive" / "__init__.py").write_text("")
    (tmp_path / "hidden_primitive" / "inside.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert "of_nobody" in walked("hidden_primitive")


def test_collectives_and_what_hands_values_on_are_in_the_table():
    assert TABLE.keys() >= COLLECTIVES
    moves = {name for name, rule in TABLE.items() if rule in (Rule.FOLLOW, Rule.WIDEST)}
    assert moves >= PASSING
