"""Totals: FLOPs, what is stored, and casts."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl, sparse as jsparse
from jax.extend.core import Primitive

import halfstep
from tests.explain._functions import W, X, shape


def totals(func: Any, *args: Any, policy: Any = "bf16", **options: Any) -> Any:
    return halfstep.explain(func, policy, **options)(*args).totals


DOTS = [
    (lambda w, x: x @ w, (shape(8, 4), shape(2, 8)), 2 * 2 * 8 * 4),
    (lambda w, x: jnp.einsum("bij,bjk->bik", x, w), (shape(5, 8, 4), shape(5, 2, 8)), 640),
    (
        lambda w, x: jax.lax.conv(x, w, (1, 1), "VALID"),
        (shape(6, 3, 3, 3), shape(2, 3, 8, 8)),
        2 * (2 * 6 * 6 * 6) * (3 * 3 * 3),
    ),
    (
        lambda w, x: jax.lax.conv_general_dilated(x, w, (1,), "VALID", feature_group_count=2),
        (shape(6, 2, 3), shape(1, 4, 10)),
        2 * (6 * 8) * (2 * 3),
    ),
    (
        lambda w, x, sizes: jax.lax.ragged_dot(x, w, sizes),
        (shape(3, 8, 4), shape(6, 8), shape(3, dtype=jnp.int32)),
        2 * 6 * 8 * 4,
    ),
]


@pytest.mark.parametrize(("func", "args", "count"), DOTS)
def test_flops_of_contractions(func: Any, args: Any, count: int):
    assert totals(func, *args).contraction_flops == {"bf16": count}


def test_flops_of_all_else():
    found = totals(lambda x: jnp.sum(jnp.exp(x)), X)
    assert found.contraction_flops == {}
    assert found.low == 1
    assert found.other_flops == 2 * X.size


def test_flops_of_all_else_count_as_often_as_a_loop_turns():
    def func(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (jnp.exp(x), None), x, length=3)[0]

    assert totals(func, X).other_flops == 3 * X.size


def mlp(params: Any, x: Any) -> Any:
    hidden = jnp.exp(x @ params["up"])
    return jnp.sum(hidden @ params["down"])


PARAMS = {"up": W, "down": W}


def test_what_is_stored_is_not_float32():
    found = totals(mlp, PARAMS, X)
    # What comes out of the first product, and the exponential that enters the second.
    assert found.stored == {"bf16": 2 * 2 * X.size}
    # The second weight, and the first factor of the first product, are stored as they were cast.
    assert found.stored_casts == {"bf16": 2 * (W.size + X.size)}
    assert found.stored_float32 == {"f32": 4 * X.size}
    # The exponential, and the sum.
    assert (found.islands, found.again_flops) == (2, 2 * X.size)


def test_without_islands_float32_is_stored():
    found = totals(mlp, PARAMS, X, policy="bf16,store:op:*=keep")
    assert found.stored["f32"] == 4 * X.size
    assert (found.islands, found.again_flops) == (0, 0)


def test_arguments_that_are_handed_on_are_not_stored():
    def func(w: Any, x: Any) -> Any:
        return jnp.sum(w * x)

    assert totals(func, X, X, policy="f32").stored == {}


def test_casts_of_weights_in_a_loop_are_told_apart():
    def func(w: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    found = totals(func, shape(3, 1024, 1024), X, policy="bf16,store:op:*=keep")
    assert found.stored_casts == {"bf16": 2 * 3 * W.size}
    # By default they are cast again: the weights live anyway.
    found = totals(func, shape(3, 1024, 1024), X)
    assert found.stored_casts == {}
    assert found.stored.keys() == {"bf16"}


def test_casts():
    # Two factors go down, the result comes up.
    assert totals(lambda w, x: x @ w, W, X).casts == 3
    assert totals(lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), W, X).casts == 0


def test_casts_in_a_loop_count_as_often_as_it_turns():
    def func(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    # In every turn both factors go down, and what is carried comes up.
    assert totals(func, shape(5, 8, 8), shape(8, 8)).casts == 5 * 3


def test_a_function_without_a_gradient_is_explained_all_the_same():
    def func(w: Any, x: Any) -> Any:
        return jnp.sum(jax.pure_callback(lambda y: y, X, x @ w))

    report = halfstep.explain(func)(W, X)
    assert report.totals.stored is None
    assert any("stored for the backward pass is not known" in note for note in report.notes)
    assert report.totals.low == 1


def test_contractions_of_a_solver_count_as_they_run():
    def loss(w, x):
        made, _ = jax.scipy.sparse.linalg.cg(lambda v: w @ (w.T @ v) + v, w @ x, maxiter=20)
        return jnp.sum(made)

    found = halfstep.explain(loss, "bf16")(jnp.eye(64), jnp.ones(64)).totals
    product = 2 * 64 * 64
    # One before the solver; those of the solver run as they are written.
    assert found.contraction_flops["bf16"] == product
    assert found.contraction_flops["f32"] >= 4 * product
    assert found.low == product / sum(found.contraction_flops.values())


def test_contractions_of_functions_with_their_own_mapping_count():
    @jax.custom_batching.custom_vmap
    def multiplied(x, w):
        return x @ w

    @multiplied.def_vmap
    def _(size, batched, x, w):
        raise NotImplementedError

    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda h, _: (multiplied(h, w), None), x, None, length=3)[0])

    found = halfstep.explain(loss, "bf16")(jnp.eye(64), jnp.eye(64)).totals
    assert found.contraction_flops == {"bf16": 3 * 2 * 64**3}
    assert found.low == 1


def test_products_of_sparse_matrices_count():
    sparse = jsparse.BCOO.fromdense(jnp.eye(64), nse=100)

    def loss(w: Any, data: Any, x: Any) -> Any:
        return jnp.sum(jsparse.BCOO((data, sparse.indices), shape=(64, 64)) @ (x @ w))

    found = halfstep.explain(loss, "bf16")(jnp.ones((64, 8)), sparse.data, jnp.eye(64)).totals
    assert found.contraction_flops == {"bf16": 2 * 64 * 64 * 8, "f32": 2 * 100 * 8}
    assert found.low == 64 * 64 / (64 * 64 + 100)


def test_products_of_sampled_places_count():
    indices = jnp.zeros((10, 2), jnp.int32)

    def func(w: Any, x: Any) -> Any:
        numbers = (((1,), (0,)), ((), ()))
        return jsparse.bcoo_dot_general_sampled(x, w, indices, dimension_numbers=numbers)

    assert totals(func, shape(8, 4), shape(2, 8)).contraction_flops == {"f32": 2 * 10 * 8}


def test_complex_products_count():
    def func(w: Any, x: Any) -> Any:
        return jnp.abs((x @ w).astype(jnp.complex64) @ jnp.ones((4, 2), jnp.complex64))

    found = totals(func, shape(8, 4), shape(2, 8))
    assert found.contraction_flops == {"bf16": 2 * 2 * 8 * 4, "complex64": 2 * 2 * 4 * 2}
    assert found.low == 8 / (8 + 2)


def blocks(kernel: Any, x: Any, y: Any) -> Any:
    """A kernel on 4 by 2 blocks of a product of 32 x 32 by 32 x 32."""
    return pl.pallas_call(
        kernel,
        grid=(4, 2),
        in_specs=[
            pl.BlockSpec((8, 32), lambda i, j: (i, 0)),
            pl.BlockSpec((32, 16), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((8, 16), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((32, 32), jnp.float32),
        interpret=True,
    )(x, y)


def test_products_in_kernels_count_as_often_as_their_grid_says():
    def kernel(x: Any, y: Any, out: Any) -> None:
        out[...] = x[...] @ y[...]

    report = halfstep.explain(lambda w, x: jnp.sum(blocks(kernel, x, x @ w)), "bf16")(
        jnp.eye(32), jnp.eye(32)
    )
    assert report.totals.contraction_flops == {"bf16": 2 * 32**3, "f32": 2 * 32**3}
    assert not any("not counted" in note for note in report.notes)


def test_what_is_in_functions_of_unknown_operations_counts():
    called = Primitive("called_by_a_test")
    called.def_abstract_eval(lambda x, *, function: x)
    function = jax.make_jaxpr(lambda x: x @ x)(jnp.eye(16))
    found = totals(lambda x: jnp.sum(called.bind(x, function=function)), jnp.eye(16))
    assert found.contraction_flops == {"f32": 2 * 16**3}
    assert found.low == 0


@pytest.mark.parametrize(("dtype", "low"), [(jnp.bfloat16, 1), (jnp.float32, 0)])
def test_what_is_in_such_functions_counts_as_often_as_a_loop_turns(dtype: Any, low: int):
    called = Primitive("called_by_a_test_in_a_loop")
    called.def_abstract_eval(lambda x, *, function: x)
    function = jax.make_jaxpr(lambda x: x @ x)(jnp.eye(16, dtype=dtype))

    def twice(x: Any, _: Any) -> Any:
        return called.bind(called.bind(x, function=function), function=function), None

    def func(x: Any) -> Any:
        return jax.lax.scan(twice, x.astype(dtype), length=3)[0]

    found = totals(func, jnp.eye(16))
    assert sum(found.contraction_flops.values()) == 3 * 2 * 2 * 16**3
    assert found.low == low


def test_what_cannot_be_seen_is_noted_with_its_size():
    def func(w: Any, x: Any) -> Any:
        return jax.pure_callback(
            lambda y: y @ y, jax.ShapeDtypeStruct((64, 64), jnp.float32), x @ w
        )

    report = halfstep.explain(func, "bf16")(shape(64, 64), shape(64, 64))
    assert (
        "what runs in `pure_callback` is not in the traced program and not counted; it reads and "
        "writes 32.0 KiB"
    ) in report.notes
