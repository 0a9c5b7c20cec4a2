"""Steps that are compiled both through the package and directly; nothing of halfstep's."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from tests.models.vit import ViT, loss

Case = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]
"""A step, its arguments and which of them it may reuse."""


def images(batch: int, *, size: int = 32, channels: int = 3) -> tuple[Any, Any]:
    return (
        jax.ShapeDtypeStruct((batch, size, size, channels), jnp.float32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


def arrays(tree: Any) -> Any:
    return eqx.filter(tree, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))


def vit(batch: int, **sizes: int) -> Case:
    """The paper's desktop ViT in float32 under AdamW."""
    model = eqx.filter_eval_shape(ViT, key=jax.random.key(0), **sizes)
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    optimizer = optax.adamw(1e-3)

    def step(params: Any, opt_state: Any, images: Any, labels: Any) -> Any:
        def objective(params: Any) -> Any:
            return loss(eqx.combine(params, static), images, labels)

        value, grads = jax.value_and_grad(objective)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step, (params, jax.eval_shape(optimizer.init, params), *images(batch)), (0, 1)


def classifier(batch: int) -> Case:
    """Two dense layers in float32 under AdamW: seconds to compile."""
    params = {
        "up": jax.ShapeDtypeStruct((32 * 32 * 3, 256), jnp.float32),
        "down": jax.ShapeDtypeStruct((256, 100), jnp.float32),
    }
    optimizer = optax.adamw(1e-3)

    def step(params: Any, opt_state: Any, images: Any, labels: Any) -> Any:
        def objective(params: Any) -> Any:
            hidden = jax.nn.gelu(images.reshape(batch, -1) @ params["up"])
            scores = hidden @ params["down"]
            return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

        value, grads = jax.value_and_grad(objective)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step, (params, jax.eval_shape(optimizer.init, params), *images(batch)), (0, 1)


def vit_mpx(batch: int, **sizes: int) -> Case:
    """The same through mpx in float16."""
    import mpx

    model = eqx.filter_eval_shape(ViT, key=jax.random.key(0), **sizes)
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    optimizer = optax.adamw(1e-3)
    mpx.set_half_precision_datatype(jnp.float16)
    scaling = eqx.filter_eval_shape(
        lambda: mpx.DynamicLossScaling(
            loss_scaling=jnp.asarray(2.0**15, jnp.float32),
            min_loss_scaling=jnp.asarray(1.0, jnp.float32),
            period=2000,
        )
    )
    scaling, static_scaling = eqx.partition(
        scaling, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )

    def step(params: Any, opt_state: Any, scaling: Any, images: Any, labels: Any) -> Any:
        model = eqx.combine(params, static)
        value, scaling, finite, grads = mpx.filter_value_and_grad(
            loss, eqx.combine(scaling, static_scaling)
        )(model, images, labels)
        model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
        return (
            eqx.filter(model, eqx.is_array),
            opt_state,
            eqx.filter(scaling, eqx.is_array),
            value,
        )

    state = jax.eval_shape(optimizer.init, params)
    return step, (params, state, scaling, *images(batch)), (0, 1, 2)


def transformer(
    mesh: AbstractMesh | Mesh,
    *,
    width: int = 2048,
    heads: int = 16,
    layers: int = 21,
    vocabulary: int = 32768,
    length: int = 1024,
) -> Case:
    """A decoder of 1.1 billion parameters: scanned, rematerialized, fully sharded over `mesh`."""
    (axis,) = mesh.axis_names

    def array(*shape: int, spec: P, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {
        "embedding": array(vocabulary, width, spec=P(axis)),
        "layers": {
            "qkv": array(layers, width, 3 * width, spec=P(None, axis)),
            "out": array(layers, width, width, spec=P(None, axis)),
            "up": array(layers, width, 4 * width, spec=P(None, axis)),
            "down": array(layers, 4 * width, width, spec=P(None, axis)),
            "norms": array(layers, 2, width, spec=P()),
        },
    }
    optimizer = optax.adamw(1e-3)
    adam, *rest = jax.eval_shape(optimizer.init, params)
    count = array(spec=P(), dtype=jnp.int32)
    state = (adam._replace(count=count, mu=params, nu=params), *rest)
    tokens = array(mesh.size, length + 1, spec=P(axis), dtype=jnp.int32)

    def over_batch(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(axis)))

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    def block(x: Any, layer: Any) -> Any:
        batch, length, width = x.shape
        qkv = norm(x, layer["norms"][0]) @ layer["qkv"]
        q, k, v = jnp.split(qkv.reshape(batch, length, 3 * heads, width // heads), 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(causal, scores, -1e9)), v)
        x = x + mixed.reshape(batch, length, width) @ layer["out"]
        x = x + jax.nn.gelu(norm(x, layer["norms"][1]) @ layer["up"]) @ layer["down"]
        return over_batch(x), None

    def objective(params: Any, tokens: Any) -> Any:
        x = over_batch(params["embedding"][tokens[:, :-1]])
        x, _ = jax.lax.scan(jax.checkpoint(block), x, params["layers"])
        scores = x @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()

    def step(params: Any, opt_state: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(objective)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step, (params, state, tokens), (0, 1)
