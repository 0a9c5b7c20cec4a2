"""Products with a one-hot factor pick values: neither these nor their cotangents are rounded."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import halfstep
from halfstep._autocast.transform import autocast
from tests.autocast._shared import dots, every_format, traced

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]

W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 12)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(5, 8)), jnp.float32)
LABELS = jnp.array([3, 0, 11, 7, 3])

HOT = {
    "one_hot": lambda labels: jax.nn.one_hot(labels, 12),
    "compared": lambda labels: (labels[:, None] == jnp.arange(12)).astype(jnp.float32),
    "count first": lambda labels: (jnp.arange(12) == labels[:, None]).astype(jnp.float32),
    "moved": lambda labels: jax.nn.one_hot(labels, 12, axis=0).T,
    "shifted": lambda labels: (labels[:, None] + 1 == jnp.arange(12) + 1).astype(jnp.float32),
    "in 8 bits": lambda labels: jax.nn.one_hot(labels.astype(jnp.int8), 12),
    "reshaped": lambda labels: jax.nn.one_hot(labels[None], 12).reshape(5, 12),
    "stopped": lambda labels: lax.stop_gradient(jax.nn.one_hot(labels, 12)),
}


def picked(hot: Callable, w: Any, x: Any, labels: Any) -> Any:
    return jnp.einsum("bk,bk->b", jax.nn.log_softmax(x @ w), hot(labels))


def gathered(w: Any, x: Any, labels: Any) -> Any:
    return jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], axis=1)[:, 0]


@pytest.mark.rows(8)
@every_format
@pytest.mark.parametrize("hot", HOT.values(), ids=HOT)
def test_as_a_gather(hot: Callable, policy: str):
    def ours(*args: Any) -> Any:
        return picked(hot, *args)

    for func, exact in (
        (autocast(ours, policy), autocast(gathered, policy)),
        (
            jax.grad(lambda *args: autocast(ours, policy)(*args).sum()),
            jax.grad(lambda *args: autocast(gathered, policy)(*args).sum()),
        ),
    ):
        np.testing.assert_array_equal(func(W, X, LABELS), exact(W, X, LABELS))


@every_format
def test_products_that_pick_are_asked_for_in_full_precision(policy: str):
    """In the default precision TPUs round float32 factors to bfloat16, and GPUs to TF32."""
    func = jax.grad(lambda *args: autocast(picked, policy)(*args).sum(), argnums=1)
    found = {}
    for equation in traced(lambda *args: func(HOT["one_hot"], *args), W, X, LABELS):
        if equation.primitive.name == "dot_general":
            dtypes = {str(var.aval.dtype) for var in equation.invars}
            found.setdefault(tuple(dtypes), set()).add(equation.params["precision"])
    low = str(halfstep.FORMATS[policy].dtype)
    assert found.pop((low,)) == {None}
    assert found == {("float32",): {(lax.Precision.HIGHEST, lax.Precision.HIGHEST)}}


def low_only(func: Callable, *args: Any) -> bool:
    return {dtype for pair in dots(autocast(func, "bf16"), *args) for dtype in pair} == {"bfloat16"}


def test_values_in_the_compute_dtype_are_picked_in_it():
    """They are exact already: nothing to be gained, and products of 16 bits are faster."""
    assert low_only(lambda w, x: jax.nn.one_hot(LABELS, 12) @ (x @ w).T, W, X)


def test_a_table_of_parameters_is_looked_up_in_the_compute_dtype():
    """As a gather gives it."""
    assert low_only(lambda w, x: jax.nn.one_hot(LABELS, 12) @ w.T, W, X)


def test_what_other_products_read_alone_is_picked_in_the_compute_dtype():
    """They round it anyway; so the tokens of experts are sent by 16-bit products."""

    def dispatch(w: Any, x: Any) -> Any:
        return jnp.einsum("bt,td->bd", jax.nn.one_hot(LABELS % 5, 5), jnp.tanh(x @ w)) @ w.T

    assert low_only(dispatch, W, X)


def test_what_a_product_in_full_precision_reads_is_picked_in_float32():
    def func(w: Any, x: Any) -> Any:
        picked = jnp.einsum("bt,td->bd", jax.nn.one_hot(LABELS % 5, 5), jnp.tanh(x @ w))
        return jnp.dot(picked, w.T, precision="highest")

    pairs = dots(autocast(func, "bf16"), W, X)
    assert sorted(pairs) == [("bfloat16",) * 2, ("float32",) * 2, ("float32",) * 2]


def test_sizes_without_a_number():
    """A product with the identity of a batch, whose size `jax.export` leaves open."""

    def func(w: Any, x: Any) -> Any:
        count = jnp.arange(x.shape[0])
        same = (count[:, None] == count).astype(jnp.float32)
        return jnp.sin(same @ jnp.tanh(x @ w))

    (rows,) = jax.export.symbolic_shape("rows")
    args = W, jax.ShapeDtypeStruct((rows, 8), jnp.float32)
    made = jax.export.export(jax.jit(autocast(func, "bf16")))(*args)
    np.testing.assert_array_equal(made.call(W, X), jax.jit(autocast(func, "bf16"))(W, X))


@pytest.mark.parametrize(
    "func",
    [
        pytest.param(
            lambda w, x: jnp.einsum("bk,bd->kd", jax.nn.one_hot(LABELS, 12), jnp.tanh(x @ w)),
            id="sums of those with one label",
        ),
        pytest.param(
            lambda w, x: jnp.einsum("bk,bk->", jax.nn.one_hot(LABELS, 12), jnp.tanh(x @ w)),
            id="a sum of what is picked",
        ),
        pytest.param(
            lambda w, x: jnp.tanh(x @ w) @ (jnp.arange(12)[:, None] >= LABELS).astype(jnp.float32),
            id="more than one",
        ),
        pytest.param(
            lambda w, x: jnp.tanh(x @ w) @ jnp.ones((12, 3)),
            id="ones",
        ),
        pytest.param(
            lambda w, x: (
                jnp.tile(jnp.tanh(x @ w), 25) @ jax.nn.one_hot(LABELS.astype(jnp.int8), 300).T
            ),
            id="a count that begins anew",
        ),
        pytest.param(
            lambda w, x: (
                jnp.tanh(x @ w)
                @ (jnp.arange(12.0)[:, None] == LABELS.astype(jnp.float32)).astype(jnp.float32)
            ),
            id="floats",
        ),
    ],
)
def test_other_products_are_in_the_compute_dtype(func: Callable):
    assert low_only(lambda w, x: jnp.sin(func(w, x)), W, X)


def test_a_rule_comes_first():
    policy = halfstep.Policy(compute="bf16", rules=("op:dot_general=compute",))

    def func(w: Any, x: Any) -> Any:
        return picked(HOT["one_hot"], w, x, LABELS)

    assert {dtype for pair in dots(autocast(func, policy), W, X) for dtype in pair} == {"bfloat16"}


def test_explain_says_why():
    report = halfstep.explain(lambda w, x: picked(HOT["one_hot"], w, x, LABELS), "bf16")(W, X)
    product, pick = (entry for entry in report.operations if entry.is_contraction)
    assert (product.dtypes, pick.dtypes) == ("bf16 -> bf16", "f32 -> f32")
    assert pick.reason == "it only picks values, by a one-hot factor"
    assert report.findings == ()
    assert report.totals.contraction_flops == {"bf16": 2 * 5 * 8 * 12, "f32": 2 * 5 * 12}


def test_no_recipe_rounds_a_look_up():
    table, labels = jnp.ones((32, 64)), jnp.zeros(16, jnp.int32)
    report = halfstep.explain(lambda table: jax.nn.one_hot(labels, 32) @ table, "f8")(table)
    (entry,) = (entry for entry in report.operations if entry.is_contraction)
    assert not entry.in_f8
    assert entry.refusal == "it only picks values, by a one-hot factor"


@pytest.mark.rows(1)
@every_format
def test_ctc_is_as_exact_as_in_float32(policy: str):
    """The loss rounds nothing but the model's logits, as if it were outside autocast."""
    rng = np.random.default_rng(0)
    labels = jnp.asarray(rng.integers(1, 11, (4, 6)))
    x = jnp.asarray(rng.normal(size=(4, 20, 16)), jnp.float32)
    a = jnp.asarray(rng.normal(size=(16, 32)) / 4, jnp.float32)
    b = jnp.asarray(rng.normal(size=(32, 11)) / 5, jnp.float32)

    def head(params: Any) -> Any:
        return jnp.tanh(x @ params[0]) @ params[1]

    def ctc(logits: Any) -> Any:
        padding = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
        return optax.ctc_loss(logits, padding[0], labels, padding[1]).mean()

    exact = jax.grad(lambda params: ctc(head(params)))((a, b))
    inside = jax.jit(jax.grad(autocast(lambda params: ctc(head(params)), policy)))((a, b))
    outside = jax.jit(jax.grad(lambda params: ctc(autocast(head, policy)(params))))((a, b))

    def error(found: Any) -> float:
        return float(
            sum(jnp.linalg.norm(f - e) for f, e in zip(found, exact, strict=True))
            / sum(map(jnp.linalg.norm, exact))
        )

    assert error(inside) <= error(outside) * (1 + halfstep.FORMATS[policy].eps * 8)
