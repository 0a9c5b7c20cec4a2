"""Faults of arithmetic, in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from tests._faults._fault import Fault

HALF = jnp.float16


def _log_of_zero():
    def loss(w, x):
        p = jax.nn.softmax(x @ w)
        return -jnp.mean(jnp.log(p)[:, 0])  # fault: log of zero

    return jax.value_and_grad(loss), (jnp.eye(4) * 200, jnp.eye(4)[1:])


def _exp_in_float16():
    def loss(w, x):
        scores = x @ w
        weights = jnp.exp(scores)  # fault: exp overflows in float16
        return jnp.mean(weights / jnp.sum(weights, axis=-1, keepdims=True)).astype(jnp.float32)

    return jax.value_and_grad(loss), (jnp.eye(4, dtype=HALF) * 12, jnp.eye(4, dtype=HALF))


def _mask_in_float16():
    def loss(q, k, mask):
        scores = q @ k.T
        scores = jnp.where(mask, scores, -1e9)  # fault: mask of -1e9 in float16
        return jnp.sum(jax.nn.softmax(scores) @ k).astype(jnp.float32)

    mask = np.tril(np.ones((4, 4), bool), -1)  # The first row is masked as a whole.
    q = jnp.ones((4, 8), HALF)
    return jax.value_and_grad(loss), (q, q, mask)


def _epsilon_of_a_norm():
    def loss(scale, x):
        centered = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(centered**2, axis=-1, keepdims=True)
        inverse = jax.lax.rsqrt(variance + 1e-12)  # fault: epsilon of a norm in float16
        return jnp.sum(scale * centered * inverse).astype(jnp.float32)

    return jax.value_and_grad(loss), (jnp.ones(8, HALF), jnp.full((2, 8), 3, HALF))


def _epsilon_of_adam():
    def step(w, mean, square, x):
        grad = jax.grad(lambda w: jnp.sum(x @ w).astype(jnp.float32))(w)
        mean = 0.9 * mean + 0.1 * grad
        square = 0.99 * square + 0.01 * grad**2
        change = mean / (jnp.sqrt(square) + 1e-8)  # fault: epsilon of Adam in float16
        return w - 1e-3 * change, mean, square

    w = jnp.ones((3, 2), HALF)
    return step, (w, 0 * w, 0 * w, jnp.array([[1, 2, 0]], HALF))


def _zero_by_zero_backward():
    def loss(w, x):
        h = x * w
        length = jnp.linalg.norm(h, axis=-1)  # fault: norm of zero, backward
        return jnp.sum(length)

    return jax.value_and_grad(loss), (jnp.ones(3), jnp.zeros((2, 3)))


def _sqrt_backward():
    def loss(w, x):
        return jnp.sum(jnp.sqrt(x * w))  # fault: sqrt at zero, backward

    return jax.value_and_grad(loss), (jnp.ones(3), jnp.arange(3.0))


def _masked_log_backward():
    def loss(w, x):
        h = x * w
        return jnp.sum(jnp.where(h > 0, jnp.log(h), 0.0))  # fault: log behind a mask, backward

    return jax.value_and_grad(loss), (jnp.ones(3), jnp.arange(3.0))


def _square_in_the_optimizer():
    def step(w, square, x):
        grad = jax.grad(lambda w: jnp.sum(x @ w).astype(jnp.float32))(w)
        square = 0.9 * square + 0.1 * grad * grad  # fault: square overflows in the optimizer
        return w - (1e-3 * grad / (jnp.sqrt(square) + 1e-3)), square

    w = jnp.ones((2, 2), HALF)
    return step, (w, 0 * w, jnp.full((1, 2), 3000, HALF))


def _schedule():
    def step(w, count, x):
        grad = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        rate = 1 / jnp.sqrt(count)  # fault: schedule divides by step zero
        return w - rate * grad, count + 1

    return step, (jnp.ones((2, 2)), jnp.zeros(()), jnp.ones((1, 2)))


def _product_in_float16():
    def loss(w, x):
        h = x @ w  # fault: product overflows in float16
        return jnp.mean(h / 64).astype(jnp.float32)

    return jax.value_and_grad(loss), (jnp.full((64, 2), 60, HALF), jnp.full((2, 64), 60, HALF))


def _cast():
    def loss(w, x):
        h = x * w
        small = h.astype(HALF)  # fault: cast of 70000 to float16
        return jnp.sum(small).astype(jnp.float32)

    return jax.value_and_grad(loss), (jnp.full(2, 700.0), jnp.full((3, 2), 100.0))


def _loss_scale():
    def step(w, x):
        def loss(w):
            h = x @ w  # fault: loss scale too large, backward
            return jnp.sum(h.astype(jnp.float32))

        grads = jax.grad(lambda w: loss(w) * 2.0**14)(w)
        return w - 1e-3 * grads * 2.0**-14

    return step, (jnp.ones((4, 2), HALF), jnp.ones((64, 4), HALF))


def _angle():
    def loss(a, b):
        cosine = jnp.sum(a * b)
        return jnp.arccos(cosine)  # fault: arccos at one, backward

    return jax.value_and_grad(loss), (jnp.array([1.0, 0]), jnp.array([1.0, 0]))


def _negative_power():
    def loss(w, x):
        return jnp.sum((x - w) ** 0.3)  # fault: power of a negative number

    return jax.value_and_grad(loss), (jnp.ones(3), jnp.arange(3.0))


def _gather():
    def loss(table, tokens):
        rows = jnp.take(table, tokens, axis=0, mode="fill")  # fault: token out of range
        return jnp.mean(rows**2)

    return jax.value_and_grad(loss), (jnp.ones((5, 3)), jnp.array([0, 4, 5]))


def _bad_data():
    def loss(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    batch = {"x": jnp.ones((3, 2)).at[1, 0].set(jnp.nan), "y": jnp.zeros(3)}
    return jax.value_and_grad(loss), (jnp.ones(2), batch)


PLAIN = (
    Fault("log of zero", _log_of_zero, "forward", ("log",)),
    Fault("exp overflows in float16", _exp_in_float16, "forward", ("exp",)),
    Fault("mask of -1e9 in float16", _mask_in_float16, "forward", ("select_n",)),
    Fault("epsilon of a norm in float16", _epsilon_of_a_norm, "forward", ("rsqrt",)),
    Fault("epsilon of Adam in float16", _epsilon_of_adam, "update", ("div",)),
    Fault("norm of zero, backward", _zero_by_zero_backward, "backward", ("div",)),
    Fault("sqrt at zero, backward", _sqrt_backward, "backward", ("div",)),
    Fault("log behind a mask, backward", _masked_log_backward, "backward", ("div",)),
    Fault("square overflows in the optimizer", _square_in_the_optimizer, "update", ("mul",)),
    Fault("schedule divides by step zero", _schedule, "update", ("div",)),
    Fault("product overflows in float16", _product_in_float16, "forward", ("dot_general",)),
    Fault("cast of 70000 to float16", _cast, "forward", ("convert_element_type",)),
    Fault("loss scale too large, backward", _loss_scale, "backward", ("dot_general",)),
    Fault("arccos at one, backward", _angle, "backward"),
    Fault("power of a negative number", _negative_power, "forward", ("pow",)),
    Fault("token out of range", _gather, "forward"),
    Fault("bad data", _bad_data, "forward", ("argument",), path="batch/x"),
)
