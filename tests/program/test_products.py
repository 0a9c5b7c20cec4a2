"""Products make their results in the order in which these are read, where that is cheaper."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import halfstep
from halfstep._program import graph_of

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]

SIZES = {"b": 2, "q": 32, "s": 48, "k": 3, "g": 4, "d": 5}


def values(form: str) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        jnp.asarray(random.normal(size=[SIZES[name] for name in factor]), jnp.float32)
        for factor in form.split("->")[0].split(",")
    ]


def names(func: Any, *given: Any) -> list[str]:
    return [node.name for node in graph_of(jax.make_jaxpr(func)(*given)).nodes]


def product(form: str) -> Any:
    return lambda left, right: jnp.sin(jnp.einsum(form, left, right))


@pytest.mark.parametrize(
    ("form", "moved"),
    [
        # The scores of grouped queries, and the same with other orders of batches and factors.
        ("bqkgd,bskd->bkgqs", 1),
        ("bqkgd,bskd->kbgqs", 1),
        ("bqkgd,bskd->bkqgs", 0),
        ("bskd,bqkgd->bkgqs", 1),
        ("bqgd,bskd->bgqks", 2),
    ],
)
def test_factors_are_moved_and_results_are_not(form: str, moved: int):
    func, given = product(form), values(form)
    found = names(func, *given)
    assert found == [*["transpose"] * moved, "dot_general", "sin"]
    np.testing.assert_allclose(
        halfstep.autocast(func, "f32")(*given), func(*given), rtol=0, atol=2.0**-20
    )
    low = jax.grad(lambda left: jnp.sum(halfstep.autocast(func, "bf16")(left, given[1])))
    exact = jax.grad(lambda left: jnp.sum(func(left, given[1])))
    scale = float(jnp.max(jnp.abs(exact(given[0]))))
    np.testing.assert_allclose(low(given[0]), exact(given[0]), rtol=0, atol=2.0**-5 * scale)


@pytest.mark.parametrize("form", ["bqkgd,bskd->bkgsq", "bqkgd,bskd->bqskg"])
def test_an_order_that_no_product_makes(form: str):
    assert names(product(form), *values(form)) == ["dot_general", "transpose", "sin"]


def test_other_products_stay():
    form = "bqkgd,bskd->bkgqs"
    given = values(form)

    def read_twice(left: Any, right: Any) -> Any:
        natural = jax.lax.dot_general(right, left, (([3], [4]), ([0, 2], [0, 2])))
        return natural, natural.transpose(0, 1, 4, 3, 2)

    def with_returned(left: Any, right: Any) -> Any:
        natural, moved = read_twice(left, right)
        return natural.sum(), moved

    # A product without batches, such as a layer's.
    weights = values("sd,qd->qs")
    assert names(lambda w, x: jax.lax.dot_general(w, x, (([1], [1]), ([], []))).T, *weights) == [
        "dot_general",
        "transpose",
    ]
    # A result no larger than its factors, and one that something else reads or returns.
    small = [value[:, :2] for value in given]
    assert names(product(form), *small) == ["dot_general", "transpose", "sin"]
    assert names(read_twice, *given)[-1] == "transpose"
    assert names(with_returned, *given).count("transpose") == 1


def test_a_symbolic_batch_stays_as_it_is():
    left, right = values("bqkgd,bskd->bkgqs")
    (batch,) = export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((batch, *one.shape[1:]), one.dtype) for one in (left, right)]
    func = halfstep.autocast(product("bqkgd,bskd->bkgqs"), "bf16")
    made = export.export(jax.jit(func))(*shapes)
    np.testing.assert_allclose(made.call(left, right), func(left, right), rtol=0, atol=2.0**-6)
