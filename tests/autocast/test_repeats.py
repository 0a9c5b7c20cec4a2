"""What layers that are written out repeat is one function, and only that."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep._autocast.recomputed import signatures
from tests._jaxprs import contractions, equations

pytestmark = pytest.mark.core

LAYERS = 4


def recomputed(func: Callable[..., Any], *args: Any) -> list[Any]:
    """The functions that are recomputed for a derivative, in order."""
    return in_trace(lambda *args: jax.jvp(func, args, args), *args)


def in_trace(func: Callable[..., Any], *args: Any) -> list[Any]:
    traced = jax.make_jaxpr(func)(*args)
    return [
        equation.params["jaxpr"]
        for equation in equations(traced)
        if equation.primitive.name in ("checkpoint", "remat", "remat2")
    ]


def distinct(functions: list[Any]) -> int:
    return len({id(function) for function in functions})


def stacked(layer: Callable[[int, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def loss(weights: Any, x: Any) -> Any:
        for number in range(LAYERS):
            x = layer(number, weights[number], x)
        return jnp.sum(x)

    return loss


@pytest.fixture
def given(getkey) -> tuple[Any, Any]:
    weights = jax.random.normal(getkey(), (LAYERS, 8, 8)) / 8**0.5
    return weights, jax.random.normal(getkey(), (4, 8))


def softmax_layer(number: int, weight: Any, x: Any) -> Any:
    return jax.nn.softmax(x @ weight)


def test_layers_share_their_islands(given):
    loss = halfstep.autocast(stacked(softmax_layer), "bf16")
    islands = recomputed(loss, *given)
    # The last softmax is one island with the sum.
    assert len(islands) == LAYERS
    assert distinct(islands) == 2
    # Also what is derived of them.
    backward = in_trace(jax.grad(loss), *given)
    assert len(backward) >= LAYERS
    assert distinct(backward) == 2


def scaled_layer(number: int, weight: Any, x: Any) -> Any:
    return jnp.exp(x @ weight) * (0.125 * (number + 1))


def over_another_axis(number: int, weight: Any, x: Any) -> Any:
    return jax.nn.softmax(x @ weight, axis=number % 2)


def in_its_own_scope(number: int, weight: Any, x: Any) -> Any:
    with jax.named_scope(f"layer_{number}"):
        return jax.nn.softmax(x @ weight)


def on_another_line(number: int, weight: Any, x: Any) -> Any:
    if number % 2:
        return jnp.tanh(x @ weight)
    return jnp.tanh(x @ weight)


@pytest.mark.parametrize(
    ("layer", "count"),
    [(scaled_layer, 4), (over_another_axis, 3), (on_another_line, 3)],
)
def test_what_differs_is_not_shared(layer, count: int, given, monkeypatch):
    def found() -> Any:
        return jax.jit(jax.value_and_grad(halfstep.autocast(stacked(layer), "bf16")))(*given)

    islands = recomputed(halfstep.autocast(stacked(layer), "bf16"), *given)
    assert len(islands) == LAYERS
    assert distinct(islands) == count
    shared = found()
    monkeypatch.setattr(signatures.Signatures, "island", lambda *_: object())
    jax.tree.map(np.testing.assert_array_equal, shared, found())


def test_layers_share_their_islands_and_keep_their_scopes(given):
    loss = halfstep.autocast(stacked(in_its_own_scope), "bf16")
    assert distinct(recomputed(loss, *given)) == 2
    text = jax.jit(jax.grad(loss)).lower(*given).as_text(debug_info=True)
    for number in range(LAYERS):
        found = {
            name
            for name in ("dot_general", "exp", "reduce_max")
            if re.search(rf"layer_{number}\)?/[^\"]*{name}\b", text)
        }
        assert found == {"dot_general", "exp", "reduce_max"}


def test_a_sum_of_operands_in_another_order_is_not_shared(given):
    def layer(number: int, weight: Any, x: Any) -> Any:
        product = x @ weight
        a, b = jnp.exp(product), jnp.sin(product)
        pair = (a, b) if number % 2 else (b, a)
        return jnp.subtract(*pair)

    islands = recomputed(halfstep.autocast(stacked(layer), "bf16"), *given)
    assert distinct(islands) == 3


def test_calls_that_the_user_recomputes_are_shared(given):
    layer = jax.checkpoint(lambda weight, x: jax.nn.softmax(x @ weight))

    def of_product(number: int, weight: Any, x: Any) -> Any:
        return layer(weight, x @ weight if number % 2 else jnp.sin(x))

    for outer, count in ((lambda number, weight, x: layer(weight, x), 1), (of_product, 2)):
        loss = halfstep.autocast(stacked(outer), "bf16")
        calls = [jaxpr for jaxpr in recomputed(loss, *given) if "dot_general" in str(jaxpr)]
        assert len(calls) == LAYERS
        # One for each dtype that the argument is held in.
        assert distinct(calls) == count


def test_what_is_recomputed_can_be_kept_as_written(given):
    layer = jax.checkpoint(lambda weight, x: jax.nn.softmax(x @ weight))

    def kept(number: int, weight: Any, x: Any) -> Any:
        with halfstep.keep_precision():
            return layer(weight, x)

    low = halfstep.autocast(stacked(kept), "bf16")
    assert set(contractions(low, *given)) == {"float32"}
