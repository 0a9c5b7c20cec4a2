"""Whatever stands in a tree, every function that walks trees takes it."""

import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import halfstep
from halfstep._training.gate import Gate
from tests.conformance._leaves import ROWS

pytestmark = [pytest.mark.core, pytest.mark.types]

SCALINGS = {
    "dynamic": lambda: halfstep.DynamicLossScaling(2.0**4),
    "static": lambda: halfstep.StaticLossScaling(2.0**4),
    "none": halfstep.NoLossScaling,
}
CASTS = {
    "cast_tree": lambda tree: halfstep.cast_tree(tree, "f16"),
    "cast_to_float16": halfstep.cast_to_float16,
    "cast_to_half_precision": lambda tree: halfstep.cast_to_half_precision(tree, "f16"),
    "cast_function": lambda tree: halfstep.cast_function(lambda x: x, "f16")(tree),
    "return_dtype": lambda tree: halfstep.cast_function(lambda x: x, "f32", "f16")(tree),
    "Policy": lambda tree: halfstep.Policy.parse("f16").cast_to_compute(tree),
}
rows = pytest.mark.parametrize("name", ROWS)


def rows_without(*names: str):
    """The rows for which there is something to check: a row left out is no passed test."""
    return pytest.mark.parametrize("name", [name for name in ROWS if name not in names])


cast_rows = pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.cast])


def same(a, b) -> bool:
    """Whether two leaves are the same value of the same type."""
    if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    if isinstance(a, jax.Array | np.ndarray | np.generic):
        return a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
    return a is b or a == b


@rows
@pytest.mark.parametrize("cast", CASTS)
def test_casts(name: str, cast: str):
    row = ROWS[name]
    leaf = row.make()
    (out,) = CASTS[cast]([leaf])
    if row.cast:
        assert out.dtype == np.float16
        assert out.shape == leaf.shape
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            assert np.array_equal(np.asarray(out, np.float32), np.asarray(leaf, np.float32))
        # NumPy stays NumPy: a cast moves nothing to a device.
        assert isinstance(leaf, jax.Array) == isinstance(out, jax.Array)
    else:
        assert out is leaf or out == leaf  # Empty containers are rebuilt.


@cast_rows
def test_cast_to_own_dtype_is_identity(name: str):
    leaf = ROWS[name].make()
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    once = halfstep.cast_tree(leaf, dtype)
    assert halfstep.cast_tree(once, dtype) is once
    assert (once is leaf) == (leaf.dtype == dtype)


@rows
def test_force_full_precision(name: str):
    leaf = ROWS[name].make()
    seen = []

    @halfstep.force_full_precision
    def identity(x):
        seen.append(x)
        return {"result": [x]}

    out = identity(leaf)["result"][0]
    if ROWS[name].cast:
        assert seen[0].dtype == np.float32
        if leaf.dtype != np.float64:  # which JAX makes float32 of
            assert out.dtype == leaf.dtype
    else:
        assert out is leaf or out == leaf


@rows_without("abstract")
def test_all_finite(name: str):
    leaf = ROWS[name].make()
    assert bool(halfstep.all_finite([leaf, jnp.ones(2)])) is True
    if ROWS[name].inexact and np.size(leaf):
        bad = jtu.tree_map(lambda x: x * float("nan"), leaf)
        assert bool(halfstep.all_finite([bad, jnp.ones(2)])) is False


@rows_without("abstract")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scalings(name: str, scaling: str):
    leaf, scaler = ROWS[name].make(), SCALINGS[scaling]()
    scaled = scaler.scale([leaf])[0]
    if not ROWS[name].inexact:
        assert scaled is leaf or scaled == leaf
        assert scaler.unscale([leaf])[0] is leaf or scaled == leaf
        return
    factor = float(scaler.loss_scaling)
    assert np.array_equal(
        np.asarray(scaled).astype(np.complex64), np.asarray(leaf).astype(np.complex64) * factor
    )
    back = scaler.unscale([scaled])[0]
    assert np.array_equal(
        np.asarray(back).astype(np.complex64), np.asarray(leaf).astype(np.complex64)
    )


@pytest.mark.rows(20)
@rows_without("abstract", "float0")
@pytest.mark.parametrize("under_jit", [False, True])
def test_select_and_transaction(name: str, under_jit: bool):
    """A leaf that is not touched by the step survives it in every form of the gate."""
    for gate in typing.get_args(Gate):
        for finite in (True, False):
            state = {"leaf": ROWS[name].make(), "w": jnp.ones(2)}

            def step(finite, gate=gate, state=state):
                commit = lambda s: {"leaf": s["leaf"], "w": s["w"] + 1}  # noqa: E731
                return halfstep.transaction(finite, commit, state, halfstep.Ledger(), gate=gate)

            run = eqx.filter_jit(step) if under_jit else step
            out, ledger = run(jnp.asarray(finite))
            assert float(out["w"][0]) == 1 + finite
            assert int(ledger.applied) == finite
            assert jtu.tree_structure(out) == jtu.tree_structure(state)
            for a, b in zip(jtu.tree_leaves(state), jtu.tree_leaves(out), strict=True):
                if a is not state["w"]:
                    if isinstance(a, np.generic):
                        b = np.asarray(b)[()]
                    assert same(a, b) or (np.asarray(a).dtype == np.float64)


@pytest.mark.rows(27)
@rows_without("abstract", "float0", "float8")
@pytest.mark.parametrize("policy", ["f32", "bf16", "f16"])
def test_gradients_with_the_leaf_in_the_model_and_in_the_batch(name: str, policy: str):
    row = ROWS[name]
    model = {"leaf": row.make(), "w": jnp.ones(2)}

    def loss(model, batch):
        return jnp.sum(model["w"] * batch["x"])

    scaling = halfstep.DynamicLossScaling(2.0**4)
    batch = {"x": jnp.arange(2.0), "leaf": row.make()}
    _, finite, grads = halfstep.filter_grad(loss, scaling, policy=policy)(model, batch)
    assert finite
    assert np.array_equal(grads["w"], [0.0, 1.0])
    expected = eqx.filter_grad(loss)(model, batch)
    assert jtu.tree_structure(grads) == jtu.tree_structure(expected)


@rows_without("abstract", "float0", "float8")
def test_optimizer_update_with_the_leaf_in_the_model(name: str):
    model = {"leaf": ROWS[name].make(), "w": jnp.ones(2)}
    optimizer = optax.sgd(0.5, momentum=0.5)
    state = eqx.filter_jit(lambda m: optimizer.init(eqx.filter(m, eqx.is_inexact_array)))(model)

    @eqx.filter_jit
    def step(model, state, finite):
        grads = jtu.tree_map(jnp.ones_like, eqx.filter(model, eqx.is_inexact_array))
        return halfstep.optimizer_update(model, optimizer, state, grads, finite)

    skipped, _ = step(model, state, jnp.asarray(False))
    assert np.array_equal(skipped["w"], [1.0, 1.0])
    applied, _ = step(model, state, jnp.asarray(True))
    assert np.array_equal(applied["w"], [0.5, 0.5])


def test_tied_parameters_stay_tied():
    weight = jnp.ones(3)
    out = halfstep.cast_tree({"embed": weight, "unembed": weight, "other": jnp.ones(3)}, "bf16")
    assert out["embed"] is out["unembed"]
    assert out["embed"] is not out["other"]


def test_float64_is_cast_only_when_asked_for():
    with jax.enable_x64(True):
        tree = {"wide": jnp.ones(2, jnp.float64), "host": np.ones(2), "w": jnp.ones(2, jnp.float32)}
        out = halfstep.cast_tree(tree, "bf16")
        assert out["wide"] is tree["wide"]
        assert out["host"] is tree["host"]
        assert out["w"].dtype == jnp.bfloat16
        asked = halfstep.cast_tree(tree, "bf16", float64=True)
        assert asked["wide"].dtype == asked["host"].dtype == jnp.bfloat16
        assert halfstep.Policy.parse("p=f64,c=f32").cast_to_compute(tree)["wide"].dtype == "float32"
        assert halfstep.Policy.parse("bf16").cast_to_compute(tree)["wide"].dtype == "float64"
        assert halfstep.cast_tree(tree["w"], "f64").dtype == "float64"


def test_ten_thousand_leaves():
    """Trees of this size are cast, checked and selected, and rules are matched, in seconds."""
    tree = {
        f"layer{i}": {"w": np.ones(2, np.float32), "running_var": np.ones(2, np.float32)}
        for i in range(5000)
    }
    out = halfstep.cast_tree(tree, "bf16", keep=("**/running_var",))
    assert out["layer4999"]["w"].dtype == jnp.bfloat16
    assert out["layer4999"]["running_var"].dtype == np.float32
    jaxpr = jax.make_jaxpr(halfstep.all_finite)(tree)
    assert len(jaxpr.jaxpr.invars) == 10_000
