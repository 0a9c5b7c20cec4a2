"""Autocast of unmodified float32 models of every framework."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import halfstep
from halfstep._autocast.transform import autocast
from tests._jaxprs import equations
from tests._rows import slow_unless
from tests.autocast._frameworks import FRAMEWORKS, SHAPES, Model

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]
every_framework = pytest.mark.parametrize("framework", FRAMEWORKS)
# On every change each framework with two networks, and each network with a framework.
PAIRS = [(framework, network) for framework in FRAMEWORKS for network in SHAPES]
FIRST = next(iter(FRAMEWORKS))
every_pair = pytest.mark.parametrize(
    ("framework", "network"),
    slow_unless(PAIRS, lambda framework, network: framework == FIRST or network in ("mlp", "cnn")),
)

# Roundings to 16 bits on the longest path. A dense layer makes 5: its input, weights and bias as
# they enter, the product, the sum with the bias. A norm, a softmax or an activation is computed in
# float32 and makes 1, its result.
DENSE, WIDE = 5, 1
ROUNDINGS = {
    "mlp": 3 * DENSE + 2 * WIDE,
    # Convolution, norm, activation, head.
    "cnn": DENSE + WIDE + WIDE + DENSE,
    # Norm, query, the scaled product of queries and keys, softmax, weighted values, output, sum;
    # norm, up, activation, down, dropout, sum.
    "transformer": WIDE + DENSE + 4 + WIDE + 3 + DENSE + 1 + WIDE + DENSE + WIDE + DENSE + 2,
    # In each of 6 turns: two dense layers and their sum, gates, state, output; then the head.
    "lstm": 6 * (2 * DENSE + 1 + 3 * WIDE) + DENSE,
}


def tolerance(network: str, policy: str) -> float:
    """How far a gradient may be from float32's, relative to its norm.

    Forward and backward make three times the roundings of forward alone: a backward pass
    multiplies by the rounded derivative of every operation and rounds the product. Each errs by at
    most half an epsilon of its result. The errors of different elements and operations are
    independent, so that over a whole gradient their squares add up. The networks are initialized
    to keep the size of what goes through them, and to amplify nothing.
    """
    return (3 * ROUNDINGS[network]) ** 0.5 * halfstep.FORMATS[policy].eps / 2


def data(network: str) -> tuple[Any, Any]:
    x, key = jax.random.split(jax.random.key(1))
    return jax.random.normal(x, SHAPES[network]), key


@functools.cache
def made(framework: str, network: str) -> Model:
    return FRAMEWORKS[framework](network, jax.random.key(0))


def loss_of(model: Model) -> Any:
    def loss(params: Any, state: Any, x: Any, key: Any) -> tuple[Any, Any]:
        out, state = model.apply(params, state, x, key)
        return jnp.mean((out - 1) ** 2), (state, out == 0)

    return loss


def gradient_of(loss: Any) -> Any:
    return eqx.filter_value_and_grad(loss, has_aux=True)


def fast(func: Any) -> Any:
    # Optimizations are most of the compile time and change nothing here.
    options = {"xla_backend_optimization_level": 0}
    filter_jit: Any = eqx.filter_jit  # Its annotations do not know jit's own options.
    return filter_jit(func, compiler_options=options)


def floats(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jtu.tree_leaves(eqx.filter(tree, eqx.is_inexact_array))]


def distance(ours: Any, theirs: Any) -> float:
    """The distance of two trees relative to the second, all leaves as one vector."""
    a, b = (np.concatenate([x.ravel() for x in floats(tree)]) for tree in (ours, theirs))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def contraction_dtypes(func: Any, *args: Any) -> list[set[str]]:
    jaxpr, _, _ = eqx.filter_make_jaxpr(func)(*args)
    return [
        {str(operand.aval.dtype) for operand in equation.invars[:2]}
        for equation in equations(jaxpr)
        if equation.primitive.name in ("dot_general", "conv_general_dilated")
    ]


@pytest.mark.rows(1)
@every_pair
def test_loss_gradient_and_state(framework: str, network: str):
    model = made(framework, network)
    loss, args = loss_of(model), (model.params, model.state, *data(network))
    (exact, (exact_state, _)), exact_gradient = fast(gradient_of(loss))(*args)
    (ours, (state, _)), gradient = fast(gradient_of(autocast(loss)))(*args)
    allowed = tolerance(network, "bf16")
    assert ours.dtype == np.float32
    assert abs(ours - exact) <= allowed * exact
    assert {x.dtype for x in floats(gradient)} == {np.dtype(np.float32)}
    assert distance(gradient, exact_gradient) <= allowed
    assert jtu.tree_structure(state) == jtu.tree_structure(exact_state)
    for a, b in zip(floats(state), floats(exact_state), strict=True):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=allowed, atol=allowed)
    if network == "cnn":
        assert floats(state)


@functools.cache
def as_written(framework: str, network: str) -> list[set[str]]:
    model = made(framework, network)
    args = (model.params, model.state, *data(network))
    return contraction_dtypes(gradient_of(loss_of(model)), *args)


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("framework", "network", "policy"),
    slow_unless(
        [(*pair, policy) for pair in PAIRS for policy in ("bf16", "f16")],
        lambda framework, network, policy: policy == "bf16" or network == "mlp",
    ),
)
def test_every_contraction_is_low(framework: str, network: str, policy: str):
    model = made(framework, network)
    loss, args = loss_of(model), (model.params, model.state, *data(network))
    low = contraction_dtypes(gradient_of(autocast(loss, policy)), *args)
    # The same contractions, none of them twice.
    assert len(low) == len(as_written(framework, network))
    assert all(dtypes == {str(halfstep.FORMATS[policy].dtype)} for dtypes in low)


@every_framework
def test_statistics_are_never_narrowed(framework: str):
    # Of 1 and 1 + 2**-13 both formats make the same number; a running average, which forgets at
    # most half of itself in a step, must still tell them apart.
    model, shift = made(framework, "cnn"), 2.0**-13
    step = fast(autocast(loss_of(model)))
    after = []
    for value in (1.0, 1.0 + shift):
        state = jtu.tree_map(
            lambda x, value=value: jnp.full_like(x, value) if eqx.is_inexact_array(x) else x,
            model.state,
        )
        after.append(floats(step(model.params, state, *data("cnn"))[1]))
    assert after[0]
    for low, high in zip(*after, strict=True):
        assert (high - low >= shift / 2).all()


@pytest.mark.rows(1)
@every_framework
def test_dropout_drops_the_same(framework: str):
    model = made(framework, "transformer")

    def run(params: Any, state: Any, x: Any, key: Any) -> Any:
        return model.apply(params, state, x, key)[0]

    exact, *ours = (
        np.asarray(fast(func)(model.params, model.state, *data("transformer")))
        for func in (run, autocast(run), autocast(run, "bf16,store:op:*=keep"))
    )
    # Another mask would change a quarter of the elements by their own size.
    for out in ours:
        error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
        assert error <= tolerance("transformer", "bf16")


ATTENTIONS = [
    (options, policy, masked)
    for masked in (False, True)
    for policy in ("bf16", "f16")
    for options in ({}, {"is_causal": True}, {"scale": 0.5})
]


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("options", "policy", "masked"),
    # On every change each option, mask or none, in one of the formats.
    slow_unless(ATTENTIONS, lambda _, policy, masked: masked == (policy == "bf16")),
    ids=str,
)
def test_dot_product_attention(options: Any, policy: str, masked: bool):
    def loss(params: Any, x: Any) -> Any:
        query, key, value = (x @ params[name] for name in ("query", "key", "value"))
        mask = jnp.arange(6)[None, None, None] < 5 if masked else None
        out = jax.nn.dot_product_attention(query, key, value, mask=mask, **options)
        return jnp.mean(out**2)

    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        name: jax.random.normal(k, (8, 8)) / 8**0.5
        for name, k in zip(("query", "key", "value"), keys, strict=False)
    }
    x = jax.random.normal(keys[3], (2, 6, 2, 8))
    func = autocast(loss, policy)
    low = {str(halfstep.FORMATS[policy].dtype)}
    assert all(dtypes == low for dtypes in contraction_dtypes(jax.value_and_grad(func), params, x))
    exact, exact_gradient = fast(jax.value_and_grad(loss))(params, x)
    ours, gradient = fast(jax.value_and_grad(func))(params, x)
    # Query (3), product with the keys (1), softmax (1), product with the values (1), and backward.
    allowed = (3 * 6) ** 0.5 * halfstep.FORMATS[policy].eps / 2
    assert abs(ours - exact) <= allowed * exact
    assert distance(gradient, exact_gradient) <= allowed
