"""How little is imported before it is needed, and that what is imported later does no harm."""

import json
import pathlib
import subprocess
import sys
from typing import get_args

import pytest

import halfstep
from halfstep._preflight import Gemm
from halfstep.cli._preflight import GEMMS

pytestmark = [pytest.mark.core, pytest.mark.types]

ROOT = pathlib.Path(__file__).parents[1]
# What takes long to import.
SLOW = ("jax", "jaxlib", "equinox", "optax", "jaxtyping", "numpy", "ml_dtypes", "scipy")
COMMANDS = ("explain", "lint", "bisect", "replay", "preflight", "plan", "formats")
QUICK = [
    ["--help"],
    ["--version"],
    *([name, "--help"] for name in (*COMMANDS, "doctor")),
    ["formats"],
    ["formats", "0.1", "-1e-8", "--json", "-"],
    # A mistake is reported as quickly.
    ["preflght"],
    ["formats", "many"],
]
STARTED = {
    # As the console script starts it, and as `python -m`.
    "script": ["-c", "import sys; sys.argv[0] = '/bin/halfstep'; {}; main(sys.argv[1:])"],
    "module": ["-m", "halfstep"],
}


def _python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )


def _last(code: str) -> object:
    """What a program prints last, as JSON."""
    done = _python("-c", f"import json\n{code}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _imported(text: str) -> set[str]:
    """The packages that `-X importtime` lists."""
    rows = [line.split("|") for line in text.splitlines() if line.startswith("import time:")]
    return {row[2].strip().split(".")[0] for row in rows[1:]}


# The command.


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
@pytest.mark.parametrize("how", STARTED)
def test_the_command_imports_jax_only_for_work(how: str, words: list[str]):
    started = [word.format("from halfstep.cli import main") for word in STARTED[how]]
    done = _python("-X", "importtime", *started, *words)
    found = _imported(done.stderr)
    assert "argparse" in found, done.stderr
    assert found.isdisjoint(SLOW), sorted(found.intersection(SLOW))


def test_the_command_imports_jax_for_work():
    """The list above is not empty for a reason of its own."""
    done = _python("-X", "importtime", "-m", "halfstep", "doctor")
    assert {"jax", "numpy"} <= _imported(done.stderr)


def test_choices_that_the_command_repeats():
    assert get_args(Gemm) == GEMMS


# The library.


def test_autocast_needs_neither_equinox_nor_optax():
    code = """
import sys, halfstep, jax, jax.numpy as jnp

def loss(w, x):
    with halfstep.keep_precision():
        x = halfstep.cast_to_float32(x)
    return jnp.sum(jnp.tanh(x @ w)) + halfstep.force_full_precision(jnp.sum)(w)

for policy in ("bf16", "f8"):
    cast = halfstep.autocast(loss, policy)
    jax.make_jaxpr(jax.grad(cast))(jnp.ones((16, 16)), jnp.ones((16, 16)))
print(json.dumps([name for name in ("equinox", "optax") if name in sys.modules]))
"""
    assert _last(code) == []


def test_star_has_every_name():
    code = "from halfstep import *\nprint(json.dumps(sorted(n for n in globals() if n[0] != '_')))"
    names = {name for name in dir(halfstep) if not name.startswith("_")}
    assert _last(code) == sorted({*names, "json"})


def test_a_name_that_is_not_there():
    said = (
        r"module 'halfstep' has no attribute 'autocats'; write dir\(halfstep\) to see what it has"
    )
    with pytest.raises(AttributeError, match=said) as got:
        halfstep.autocats  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    assert (got.value.name, got.value.obj) == ("autocats", halfstep)


def test_names_used_later_compile_nothing_again():
    """JAX's caches are keyed by its configuration, which some imports extend."""
    code = """
import halfstep, jax, jax.numpy as jnp

traced = []
@jax.jit
def before(x):
    traced.append("before")
    return x + 1

@jax.jit
def step(x):
    traced.append("step")
    for name in dir(halfstep):
        getattr(halfstep, name)
    with halfstep.half_precision("f16"):
        return halfstep.autocast(lambda w: w @ w, "bf16")(x)

x = jnp.ones((4, 4))
for _ in range(3):
    before(x), step(x)
print(json.dumps(traced))
"""
    assert _last(code) == ["before", "step"]


def test_a_first_use_inside_jit_makes_no_tracers():
    """An array that a dependency makes when it is imported is a number, not part of the program."""
    code = """
import importlib, halfstep, jax, jax.numpy as jnp

found, real = [], importlib.import_module
def imported(name):
    # JAX imports its plugins in the same way.
    if name.startswith("halfstep"):
        found.append(isinstance(jnp.zeros(()) + 1, jax.core.Tracer))
    return real(name)
importlib.import_module = imported
jax.jit(lambda x: halfstep.autocast(jnp.tanh, "bf16")(x))(jnp.ones(3))
print(json.dumps(found))
"""
    assert _last(code) == [False]


def test_a_recipe_from_a_pickle_makes_its_state():
    code = """
import pickle, halfstep
print(json.dumps(pickle.dumps(halfstep.RECIPES["f8-delayed"]).hex()))
"""
    data = _last(code)
    code = f"""
import pickle, sys
recipe = pickle.loads(bytes.fromhex("{data}"))
assert "halfstep._training" not in sys.modules
import jax.numpy as jnp
state = recipe.init(lambda w, x: jnp.sum(x @ w), jnp.ones((16, 16)), jnp.ones((16, 16)))
print(json.dumps(type(state).__name__))
"""
    assert _last(code) == "F8Scaling"


def test_wrapped_modules_are_pickled():
    eqx = pytest.importorskip("equinox")
    code = """
import pickle, equinox as eqx, halfstep, jax
linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
made = [halfstep.keep_precision(linear), halfstep.force_full_precision(linear)]
again = pickle.loads(pickle.dumps(made))
print(json.dumps(bool(eqx.tree_equal(made, again))))
"""
    assert eqx
    assert _last(code) is True
