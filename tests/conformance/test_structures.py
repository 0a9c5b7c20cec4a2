"""Every structured primitive under every policy and every tool; a row per primitive.

Each row is a loss in plain float32 with a matrix product inside the structure. `label` is what
reports call the place of that product.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec as P

import halfstep
from halfstep import DynamicLossScaling, debug
from halfstep._base import jaxprs_in
from halfstep._program import equations, structure_of
from halfstep._program.structures import Structure

pytestmark = pytest.mark.core
WIDTH, LAYERS = 32, 3


class Row(NamedTuple):
    """A loss, where its product is, and what is not asked of it."""

    loss: Callable[[Any, Any], Any]
    label: str
    low: bool = True
    """Whether the product runs in the policy's precision, and not as it is written."""
    recorded: bool = True
    """Whether values inside are recorded."""


def layer(h, w):
    return jnp.tanh(h @ w)


def scan(w, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (layer(h, w), None), x, w)[0] ** 2)


def remat_in_scan(w, x):
    body = jax.checkpoint(layer)
    return jnp.mean(jax.lax.scan(lambda h, w: (body(h, w), None), x, w)[0] ** 2)


def while_loop(w, x):
    # Reverse mode does not go through a loop of unknown length: the loop makes the data.
    _, h = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, layer(c[1], w[0])), (0, x))
    return jnp.mean(layer(jax.lax.stop_gradient(h), w[1]) ** 2)


def mapped_while(w, x):
    def settled(h):
        turns = jnp.where(h[0] > 0, 3, 1)
        _, h = jax.lax.while_loop(
            lambda c: c[0] < turns, lambda c: (c[0] + 1, layer(c[1], w[0])), (0, h)
        )
        return jax.lax.stop_gradient(h)

    return jnp.mean(layer(jax.vmap(settled)(x), w[1]) ** 2)


def fori_loop(w, x):
    return jnp.mean(jax.lax.fori_loop(0, LAYERS, lambda i, h: layer(h, w[i]), x) ** 2)


def cond(w, x):
    return jnp.mean(jax.lax.cond(x[0, 0] > 5.0, lambda: x, lambda: layer(x, w[0])) ** 2)


@jax.custom_jvp
def _own_jvp(h, w):
    return h @ w


@_own_jvp.defjvp
def _own_jvp_rule(primals, tangents):
    (h, w), (dh, dw) = primals, tangents
    return h @ w, dh @ w + h @ dw


def custom_jvp(w, x):
    return jnp.mean(jnp.tanh(_own_jvp(x, w[0])) ** 2)


@jax.custom_vjp
def _own_vjp(h, w):
    return h @ w


_own_vjp.defvjp(lambda h, w: (h @ w, (h, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


def custom_vjp(w, x):
    return jnp.mean(jnp.tanh(_own_vjp(x, w[0])) ** 2)


def ragged_dot(w, x):
    sizes = jnp.array([1, 2, x.shape[0] - 3], jnp.int32)
    return jnp.mean(jnp.tanh(jax.lax.ragged_dot(x, w, sizes)) ** 2)


def shard_map(w, x):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    return jnp.mean(mapped(x, w[0]) ** 2)


@jax.custom_batching.custom_vmap
def _own_mapping(h, w):
    return layer(h, w)


@_own_mapping.def_vmap
def _own_mapping_rule(size, is_mapped, h, w):
    axes = tuple(0 if mapped else None for mapped in is_mapped)
    return jax.vmap(layer, axes, axis_size=size)(h, w), True


def custom_vmap(w, x):
    # JAX has no reverse mode for it, but where a function with its own derivatives is around it.
    return jnp.mean(layer(_own_mapping(x, jax.lax.stop_gradient(w[0])), w[1]) ** 2)


def _kernel(h, w):
    def multiply(h_ref, w_ref, o_ref):
        o_ref[...] = jnp.dot(h_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    shape = jax.ShapeDtypeStruct((h.shape[0], w.shape[1]), jnp.float32)
    return pl.pallas_call(multiply, out_shape=shape, interpret=True)(h, w)


_pallas_product = jax.custom_vjp(_kernel)
_pallas_product.defvjp(
    lambda h, w: (_kernel(h, w), (h, w)),
    lambda kept, g: (_kernel(g, kept[1].T), _kernel(kept[0].T, g)),
)


def pallas_call(w, x):
    return jnp.mean(jnp.tanh(_pallas_product(x, w[0])) ** 2)


def linear_solve(w, x):
    def times(v):
        return v + 0.01 * w[0] @ v

    def solve(matvec, b):
        return jax.lax.fori_loop(0, 3, lambda _, v: v + (b - matvec(v)), b)

    return jnp.mean(jax.lax.custom_linear_solve(times, x[0], solve, transpose_solve=solve) ** 2)


FEW = ("remat in scan", "vmap of while", "cond", "custom_vjp", "ragged_dot")
ROWS = {
    "scan": Row(scan, "scan x3"),
    "remat in scan": Row(remat_in_scan, "scan x3"),
    "while": Row(while_loop, "while"),
    "vmap of while": Row(mapped_while, "while"),
    "fori": Row(fori_loop, "scan x3"),
    "cond": Row(cond, "branch 0"),
    "custom_jvp": Row(custom_jvp, "custom_jvp_call"),
    "custom_vjp": Row(custom_vjp, "custom_vjp_call"),
    "custom_vmap": Row(custom_vmap, "custom_vmap_call"),
    "ragged_dot": Row(ragged_dot, ""),
    "shard_map": Row(shard_map, "shard_map"),
    "pallas": Row(pallas_call, "custom_vjp_call", low=False, recorded=False),
}
every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
# What records every operation compiles for seconds: a loop, a branch, a rule and a call on every
# change, and all rows before a release.
few_rows = pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if name in FEW else pytest.mark.slow, id=name)
        for name, row in ROWS.items()
    ],
)


def data() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(3))
    w = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / np.sqrt(WIDTH)
    return w, jax.random.normal(keys[1], (WIDTH, WIDTH))


def relative(found: Any, expected: Any) -> float:
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


def test_every_operation_that_holds_functions_is_read():
    """A kind that `control_flow` does not read would run as it is written, in silence."""
    losses = [linear_solve, *(row.loss for row in ROWS.values())]
    programs = [jax.make_jaxpr(loss)(*data()).jaxpr for loss in losses]
    found = {
        eqn.primitive.name: structure_of(eqn.primitive.name, eqn.params)
        for program in programs
        for eqn in equations(program)
        if any(jaxprs_in(eqn.params))
    }
    assert [name for name, structure in found.items() if structure is None] == []
    bases = (Structure, *Structure.__subclasses__())
    kinds = {kind for base in bases for kind in base.__subclasses__() if kind.names}
    assert {type(structure) for structure in found.values()} == kinds


@pytest.mark.rows(4)
@every_row
@pytest.mark.parametrize("policy", ["bf16", "f16", "f8"])
def test_gradients(row: Row, policy: str):
    w, x = data()
    expected, wanted = jax.jit(jax.value_and_grad(row.loss))(w, x)
    options: Any = {"scaling": DynamicLossScaling(2.0**10)} if policy == "f16" else {}
    func = halfstep.filter_value_and_grad(row.loss, policy=policy, check_finite=True, **options)
    value, _, finite, grads = jax.jit(func)(w, x)
    # Of at most six products in a row, each rounds its factors and its result once.
    rounding = float(jnp.finfo(jnp.float8_e5m2).eps)
    if policy != "f8":
        rounding = halfstep.FORMATS[policy].eps
    assert bool(finite)
    assert grads.dtype == w.dtype
    assert relative(grads, wanted) < 6 * rounding
    assert abs(float(value - expected)) < 6 * rounding * abs(float(expected))


@pytest.mark.rows(6)
@every_row
def test_gradients_are_not_those_of_float32(row: Row):
    """What the row is for does happen: the structure's inside is rewritten."""
    w, x = data()
    wanted = jax.jit(jax.grad(row.loss))(w, x)
    found = jax.jit(jax.grad(halfstep.autocast(row.loss, "bf16")))(w, x)
    assert (relative(found, wanted) > halfstep.FORMATS["bf16"].eps / 64) == row.low


@pytest.mark.rows(12)
@every_row
@pytest.mark.parametrize("policy", ["bf16", "f8"])
def test_explain(row: Row, policy: str):
    report = halfstep.explain(row.loss, policy)(*data())
    inside = [
        entry
        for entry in report.operations
        if not row.label or any(label == row.label for label in entry.within)
    ]
    assert inside
    products = [entry for entry in inside if entry.is_contraction]
    if row.low:
        assert products
        assert {entry.ins[0].dtype for entry in products} <= {"bf16", "e4m3"}
        assert policy != "f8" or any(entry.in_f8 for entry in products)
    else:
        assert [entry.name for entry in inside if entry.name == "pallas_call"]


@pytest.mark.rows(3)
@few_rows
def test_record(row: Row):
    args = data()
    recorder = debug.record(jax.value_and_grad(row.loss), sites="ops")
    log, (value, grads) = jax.jit(recorder)(recorder.init(*args), *args)
    expected, wanted = jax.jit(jax.value_and_grad(row.loss))(*args)
    np.testing.assert_allclose(value, expected, rtol=8 * np.finfo(np.float32).eps)
    np.testing.assert_allclose(grads, wanted, rtol=1e-4, atol=1e-6 * float(jnp.abs(wanted).max()))
    places = {label for site in log.sites for label in site.within}
    # Of a function with a derivative of its own only the derivative is left.
    own = row.label in ("custom_jvp_call", "custom_vjp_call")
    assert (row.label in places) == (bool(row.label) and row.recorded and not own)


@pytest.mark.rows(2)
@few_rows
def test_first_nonfinite(row: Row):
    w, x = data()
    assert debug.first_nonfinite(row.loss, w, x) is None
    # Finite operands whose product is not: the product inside is where the infinity begins.
    found = debug.first_nonfinite(row.loss, w * 2.0**100, x * 2.0**100)
    assert found is not None
    assert found.site.op in ("dot_general", "ragged_dot_general", "pallas_call")
    if row.label and row.recorded:
        assert row.label in found.site.within


@pytest.mark.rows(2)
@few_rows
def test_compare(row: Row):
    report = debug.compare(row.loss, "bf16", sites="ops")(*data())
    rounding = halfstep.FORMATS["bf16"].eps
    assert (report.results.error > 0) == row.low
    assert report.results.error < 6 * rounding
    assert all(gradient.error < 6 * rounding for gradient in report.gradients)
    if row.label and row.recorded:
        within = {label for deviation in report.sites for label in deviation.site.within}
        assert row.label in within
