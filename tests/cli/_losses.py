"""What a user's module has: functions that make a loss."""

from typing import Any

import jax
import jax.numpy as jnp

W = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


def clean() -> tuple[Any, Any]:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jax.nn.softmax(x @ w))

    print("made a loss")
    return loss, (W, W)


def faulty() -> tuple[Any, Any]:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.dot(x, w, precision="highest") @ w)

    return loss, (W, W)


def beyond_float16() -> tuple[Any, Any]:
    return lambda w, x: jnp.mean(x @ w), (160 * jnp.eye(8), jnp.full((8, 8), 512.0))


def only_a_loss() -> Any:
    return clean()[0]


def bare_argument() -> tuple[Any, Any]:
    return clean()[0], W


def with_depth(depth: int) -> tuple[Any, Any]:
    return clean()


def fails() -> tuple[Any, Any]:
    raise ZeroDivisionError("in the user's own code")


def squares() -> tuple[Any, Any]:
    def loss(w: Any, x: Any) -> Any:
        with jax.named_scope("spread"):
            spread = jnp.square(1000 * (x @ w)) / 1e6
        return jnp.mean(spread)

    return loss, [(jnp.eye(4), jnp.linspace(1, 1 + n, 8).reshape(2, 4)) for n in range(2)]


def a_list_of_arrays() -> tuple[Any, Any]:
    return squares()[0], [jnp.ones(2)]


def squares_of_one() -> tuple[Any, Any]:
    loss, batches = squares()
    return loss, batches[0]
