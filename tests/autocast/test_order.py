"""Effects, mutable arrays and callbacks run in the order in which they are written."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import halfstep
from tests.autocast._shared import stored_as

pytestmark = pytest.mark.core
W, X = jnp.eye(3), jnp.ones((2, 3))
every_form = pytest.mark.parametrize("islands", [True, False])


def autocast(func: Any, islands: bool, policy: str = "bf16") -> Any:
    return halfstep.autocast(func, stored_as(policy, islands))


@every_form
@pytest.mark.parametrize("policy", ["bf16", "f16", "f8"])
def test_a_mutable_array_is_written_before_it_is_read(policy: str, islands: bool):
    def func(w, x):
        ref = jax.new_ref(jnp.zeros((2, 3)))
        made = jnp.exp(x @ w)
        ref[...] = made
        first = ref[...]
        ref[0] += 1.0
        return jnp.sum(made + 2 * x), first, jax.freeze(ref)

    for form in (autocast(func, islands, policy), jax.jit(autocast(func, islands, policy))):
        _, first, last = form(W, X)
        assert jnp.allclose(first, jnp.e, rtol=2**-8)
        assert jnp.allclose(last - first, jnp.array([[1.0], [0.0]]), atol=2**-8)


@every_form
def test_ordered_callbacks(islands: bool):
    seen: list[float] = []

    def tick(value: Any) -> Any:
        seen.append(float(np.ravel(value)[0]))
        return np.float32(len(seen))

    def func(w, x):
        def count(value: Any) -> Any:
            return io_callback(tick, jax.ShapeDtypeStruct((), jnp.float32), value, ordered=True)

        made = jnp.exp(x @ w)
        first = count(made)
        second = count(x)
        # A float32 operation of the first island that needs the second callback.
        late = jnp.log(made) + second
        third = count(late)
        return jnp.sum(made + 2 * x), first, second, third

    _, *ticks = jax.jit(autocast(func, islands))(W, X)
    jax.effects_barrier()
    assert [float(tick) for tick in ticks] == [1, 2, 3]
    assert seen[1] == 1.0
    assert seen[2] == 3.0


@every_form
def test_prints_keep_their_order(islands: bool, capfd: pytest.CaptureFixture[str]):
    def func(w, x):
        made = jnp.exp(x @ w)
        jax.debug.print("one {}", made[0, 0], ordered=True)
        jax.debug.print("two {}", x[0, 0], ordered=True)
        jax.debug.print("three {}", jnp.sum(made @ w), ordered=True)
        return jnp.sum(made)

    jax.jit(autocast(func, islands))(W, X)
    jax.effects_barrier()
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == [
        "one",
        "two",
        "three",
    ]


@every_form
@pytest.mark.parametrize("loop", ["fori", "scan", "while"])
def test_a_mutable_array_that_a_loop_closes_over(loop: str, islands: bool):
    def func(w, x):
        ref = jax.new_ref(jnp.zeros(()))

        def body(h):
            h = jnp.tanh(h @ w)
            ref[...] = ref[...] + jnp.sum(h)
            return h

        if loop == "fori":
            h = jax.lax.fori_loop(0, 3, lambda i, h: body(h), x)
        elif loop == "scan":
            h, _ = jax.lax.scan(lambda h, _: (body(h), None), x, None, length=3)
        else:
            _, h = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, body(c[1])), (0, x))
        return jnp.sum(h), ref[...]

    expected = jax.jit(func)(W, X)
    found = jax.jit(autocast(func, islands))(W, X)
    assert all(np.allclose(a, b, rtol=2**-7) for a, b in zip(found, expected, strict=True))


@every_form
@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_a_mapped_loop_that_ends_by_its_data(policy: str, islands: bool):
    def func(w, x):
        def one(x):
            return jax.lax.while_loop(
                lambda c: jnp.sum(c[0]) < 10.0, lambda c: (1.5 * (c[0] @ w), c[1] + 1), (x, 0)
            )

        made, turns = jax.vmap(one)(x)
        return jnp.sum(made @ w), turns

    x = jnp.array([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [4.0, 4.0, 4.0]])
    value, turns = func(W, x)
    found, found_turns = jax.jit(autocast(func, islands, policy))(W, x)
    assert np.asarray(found_turns).tolist() == np.asarray(turns).tolist() == [3, 2, 0]
    assert found == pytest.approx(float(value), rel=2**-7)


@pytest.mark.parametrize("axes", [(0,), (0, 1)])
def test_a_loop_that_is_mapped_twice_and_pushed_forward(axes: tuple[int, ...]):
    def one(x):
        return jax.lax.while_loop(lambda c: c < 10.0, lambda c: 1.5 * c, x)

    mapped = one
    for _ in axes:
        mapped = jax.vmap(mapped)
    x = jnp.arange(1.0, 1.0 + 3 ** len(axes)).reshape((3,) * len(axes))
    func = halfstep.autocast(lambda w, x: w * mapped(x), "bf16", params=())
    made, tangent = jax.jvp(lambda x: func(jnp.float32(2.0), x), (x,), (jnp.ones_like(x),))
    expected, slope = jax.jvp(lambda x: 2.0 * mapped(x), (x,), (jnp.ones_like(x),))
    assert jnp.allclose(made, expected)
    assert jnp.allclose(tangent, slope)
