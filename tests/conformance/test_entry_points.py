"""Every kind of leaf beside the parameters, through everything that traces a function."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep
from halfstep import debug
from halfstep._preflight.compile.lowering import lower
from tests.conformance._leaves import ROWS
from tests.preflight._compilers import need

pytestmark = pytest.mark.core

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def _params(leaf: Any = None) -> dict[str, Any]:
    return {"w": jnp.linspace(0, 1, 8).reshape(4, 2), "other": leaf}


def _loss(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)


def _autocast(params: Any) -> Any:
    return halfstep.autocast(_loss, "bf16")(params, X)


def _gradient(params: Any) -> Any:
    value, _, finite, grads = halfstep.filter_value_and_grad(
        _loss, halfstep.DynamicLossScaling(2.0**4), policy="f16"
    )(params, X)
    return value, finite.finite, grads["w"]


def _explain(params: Any) -> Any:
    report = halfstep.explain(_loss, "bf16")(params, X)
    return [(entry.name, entry.ins, entry.outs, entry.reason) for entry in report.operations]


def _first_nonfinite(params: Any) -> Any:
    assert debug.first_nonfinite(_loss, params, X) is None
    found = debug.first_nonfinite(_loss, params, X * np.float32(np.nan))
    assert found is not None
    return str(found)


def _record(params: Any) -> Any:
    def step(params: Any, x: Any) -> Any:
        return {**params, "w": params["w"] - _loss(params, x)}

    recorder = debug.record(step, sites=lambda site: site.op in ("tanh", "sub"))
    log, made = recorder(recorder.init(params, X), params, X)
    other = params["other"]
    if isinstance(other, np.ndarray) and other.dtype == np.float64:
        # As `jax.jit` of this JAX has it: float64 of NumPy's, or float32.
        np.testing.assert_array_equal(made["other"], other)
    else:
        _assert_same(made["other"], other)
    return np.asarray(log.rows), made["w"]


def _update(params: Any) -> Any:
    optimizer, trained = optax.sgd(0.1), {"w": params["w"]}
    grads = {"w": jnp.ones((4, 2))}
    state = optimizer.init(trained)
    new, _ = halfstep.optimizer_update(trained, optimizer, state, grads, jnp.asarray(True))
    made = halfstep.select_tree(jnp.asarray(False), {**params, **new}, params)
    _assert_same(made["other"], params["other"])
    return new["w"], made["w"]


def _assert_same(got: Any, given: Any) -> None:
    if hasattr(given, "dtype"):
        assert got.dtype == given.dtype
        if jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
            got, given = jax.random.key_data(got), jax.random.key_data(given)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(given))
    else:
        assert got is given or got == given


ENTRY_POINTS = {
    "autocast": _autocast,
    "gradient": _gradient,
    "explain": _explain,
    "first_nonfinite": _first_nonfinite,
    "record": _record,
    "update": _update,
}
# What has no value cannot be run with.
NEEDS_VALUES = tuple(name for name in ENTRY_POINTS if name != "explain")


@pytest.fixture(scope="module")
def without():
    """What each gives without such a leaf."""
    return {name: entry(_params()) for name, entry in ENTRY_POINTS.items()}


@pytest.mark.rows(57)
@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("name", ROWS)
def test_a_leaf_that_is_not_used_changes_nothing(name: str, entry: str, without: dict[str, Any]):
    if name == "abstract" and entry in NEEDS_VALUES:
        pytest.skip("has no value")
    found = ENTRY_POINTS[entry](_params(ROWS[name].make()))
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(without[entry]), strict=True):
        np.testing.assert_array_equal(got, expected)


def _step(params: Any, x: Any) -> Any:
    return {**params, "w": params["w"] - jnp.mean(x @ params["w"])}


@pytest.mark.parametrize("name", ROWS)
def test_preflight_counts_what_takes_memory(name: str):
    leaf = ROWS[name].make()
    program = lower(_step, (_params(leaf), X), platform="cuda")
    found = {leaf.name: leaf for leaf in program.leaves}
    takes_memory = hasattr(leaf, "dtype") and leaf.dtype != jax.dtypes.float0
    assert ("params/other" in found) == takes_memory
    if takes_memory:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        bits = jax.dtypes.itemsize_bits(jax.dtypes.canonicalize_dtype(leaf.dtype))
        assert found["params/other"].bytes == -(-leaf.size * bits // 8)


def test_the_compiler_takes_all_of_them_at_once():
    need("cuda")
    params = {"w": jnp.ones((4, 2)), "other": {name: ROWS[name].make() for name in ROWS}}
    entry = halfstep.preflight(_step, (params, X), targets="h100", progress=False)["h100"]
    listed = lower(_step, (params, X), platform="cuda").leaves
    assert entry.fits
    assert entry.argument_bytes == sum(leaf.bytes for leaf in listed)
