"""A small language model as a stack, and the step that computes all gradients first."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import halfstep
from halfstep import optim

WIDTH, HIDDEN, WORDS = 64, 96, 128


def init(key: jax.Array, *, layers: int = 3) -> Any:
    keys = jax.random.split(key, 4)
    return {
        "outer": {
            "embed": jax.random.normal(keys[0], (WORDS, WIDTH)) / 8,
            # Used by all three functions, and too small to be compressed.
            "shift": jax.random.normal(keys[3], (HIDDEN,)) / 8,
            "steps": jnp.asarray(3),
        },
        "layers": {
            "up": jax.random.normal(keys[1], (layers, WIDTH, HIDDEN)) / 8,
            "down": jax.random.normal(keys[2], (layers, HIDDEN, WIDTH)) / 8,
            "bias": jnp.zeros((layers, HIDDEN)),
            "number": jnp.arange(layers),
        },
    }


def batch(key: jax.Array) -> Any:
    return jax.random.randint(key, (4, 9), 0, WORDS)


def first(outer: Any, ids: Any) -> Any:
    return _shifted(outer["embed"][ids[:, :-1]], outer)


def layer(params: Any, x: Any, outer: Any, ids: Any) -> Any:
    del ids
    sign = jnp.where(params["number"] % 2 == 0, 1, -1).astype(x.dtype)
    bias = (params["bias"] + outer["shift"]).astype(x.dtype)
    hidden = jnp.tanh(jnp.einsum("btw,wh->bth", x, params["up"]) + bias[None, None])
    return x + sign * jnp.einsum("bth,hw->btw", hidden, params["down"])


def last(outer: Any, x: Any, ids: Any) -> Any:
    """Mean cross-entropy, with the embedding that `first` has used."""
    x = _shifted(x, outer)
    scores = jnp.einsum("btw,nw->btn", x, outer["embed"]).astype(jnp.float32)
    at = jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - at)


def _shifted(x: Any, outer: Any) -> Any:
    return x + outer["shift"][None, None, :WIDTH].astype(x.dtype)


def squares(grads: Any) -> Any:
    return sum(
        (jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(grads)),
        jnp.float32(0),
    )


def shrunk(grads: Any, norm: Any, limit: Any) -> Any:
    """Gradients times what brings a norm down to a limit."""
    by = jnp.float32(limit) / jnp.maximum(norm, jnp.float32(limit))
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * by).astype(g.dtype), grads)


def stepped(tx: Any, params: Any, state: Any, grads: Any, finite: Any) -> Any:
    if hasattr(tx, "step"):
        return tx.step(params, state, grads, finite=finite)
    updates, new = tx.update(grads, state, params)
    made = optax.apply_updates(params, updates), new
    return made if finite is None else halfstep.select_tree(finite, made, (params, state))


def plain(
    tx: Any,
    *,
    first: Any = first,
    layer: Any = layer,
    last: Any = last,
    clip: float | None = None,
    per_layer_clip: float | None = None,
) -> Any:
    """The step that has all gradients before it changes anything."""

    def step(params: Any, state: Any, ids: Any, scaling: Any = None) -> Any:
        trained, frozen = eqx.partition(params, eqx.is_inexact_array)
        more = ()

        def loss(trained: Any) -> Any:
            params = eqx.combine(trained, frozen)
            body = jax.checkpoint(lambda x, one: (layer(one, x, params["outer"], ids), None))
            x, _ = jax.lax.scan(body, first(params["outer"], ids), params["layers"])
            return last(params["outer"], x, ids)

        if scaling is None:
            value, grads = jax.value_and_grad(loss)(trained)
            finite = None
        else:
            value, grads = jax.value_and_grad(lambda trained: scaling.scale(loss(trained)))(trained)
            value, grads = scaling.unscale((value, grads))
            finite = halfstep.all_finite((value, grads))
            more = scaling.adjust(finite), finite
        by_layer = jax.lax.map(squares, grads["layers"])
        if clip is not None:
            norm = jnp.sqrt(jnp.sum(by_layer) + squares(grads["outer"]))
            grads = shrunk(grads, norm, clip)
            finite = jnp.isfinite(norm) if finite is None else finite & jnp.isfinite(norm)
        if per_layer_clip is not None:
            of_outer = shrunk(grads["outer"], jnp.sqrt(squares(grads["outer"])), per_layer_clip)
            of_layers = jax.vmap(lambda g, n: shrunk(g, n, per_layer_clip))(
                grads["layers"], jnp.sqrt(by_layer)
            )
            grads = {"outer": of_outer, "layers": of_layers}
        outer, outer_state = stepped(tx, trained["outer"], state.outer, grads["outer"], finite)
        # One after the other: a vector of counts may be raised to powers in another way than one.
        layers, layers_state = jax.lax.map(
            lambda one: stepped(tx, *one, finite=finite),
            (trained["layers"], state.layers, grads["layers"]),
        )
        params = eqx.combine({"outer": outer, "layers": layers}, frozen)
        state = optim.ReleaseState(outer_state, layers_state)
        return (value, params, state, *more)

    return step
