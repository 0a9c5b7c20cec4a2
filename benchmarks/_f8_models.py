"""Models whose gradient is compiled for an H100, to see which products are in 8 bits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import halfstep
from benchmarks._models import Model, gpt, vit
from halfstep import RECIPES

AXIS = "fsdp"


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A loss, and the shapes of what it takes."""

    name: str
    loss: Callable[..., Any]
    params: Any
    batch: tuple[Any, ...]
    about: str
    target: str = "h100"

    def arguments(self, policy: str) -> tuple[Any, ...]:
        """The recipe's state, if it has one, parameters and batch."""
        recipe = RECIPES.get(policy)
        state = None
        if recipe is not None and recipe.needs_state:
            # Of magnitudes nothing can be known without values, and nothing has to be.
            options = {"key": jax.random.key(0)} if recipe.is_random else {}
            args = (self.params, *self.batch)
            state = recipe.init(self.loss, *args, calibrate=False, **options)
            state = jax.tree.map(lambda x: self._like(x.shape, x.dtype), state)
        return (state, self.params, *self.batch)

    def _like(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        whole = None if self.mesh is None else NamedSharding(self.mesh, P())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    @property
    def mesh(self) -> Any:
        leaves = jax.tree.leaves(self.params)
        sharding = getattr(leaves[0], "sharding", None)
        return None if sharding is None else sharding.mesh

    def step(self, policy: str) -> Callable[..., Any]:
        """The gradient, divided as the parameters are."""

        def step(state: Any, params: Any, *batch: Any) -> Any:
            made = halfstep.filter_grad(self.loss, state, policy=policy)(params, *batch)
            *rest, grads = made if isinstance(made, tuple) else (made,)
            if self.mesh is not None:
                grads = jax.tree.map(
                    lambda grad, like: jax.lax.with_sharding_constraint(grad, like.sharding),
                    grads,
                    self.params,
                )
            return *rest, grads

        return step


def dense(*, width: int = 1024, hidden: int = 4096, batch: int = 4096) -> Program:
    """Two matrices."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)

    params = {
        "up": jax.ShapeDtypeStruct((width, hidden), jnp.float32),
        "down": jax.ShapeDtypeStruct((hidden, width), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    about = f"{batch:,} rows of {width:,} through {hidden:,}"
    return Program("dense", loss, params, (x,), about)


def of(name: str, model: Model, batch: int, about: str) -> Program:
    """One of the models that other benchmarks train."""
    return Program(name, model.loss, model.shape(), model.batch(batch), about)


def scanned(
    *,
    vocabulary: int = 50_304,
    tokens: int = 1024,
    width: int = 768,
    layers: int = 12,
    heads: int = 12,
    batch: int = 8,
) -> Program:
    """The GPT, scanned and rematerialized; its vocabulary is a multiple of 16."""
    model = gpt(
        "GPT, remat",
        vocabulary=vocabulary,
        tokens=tokens,
        width=width,
        layers=layers,
        heads=heads,
        remat=True,
    )
    about = (
        f"{layers} layers of width {width}, scanned and rematerialized, a vocabulary of "
        f"{vocabulary:,}, batch {batch}"
    )
    return of("GPT, scan + remat", model, batch, about)


def images(*, width: int = 256, hidden: int = 800, blocks: int = 6, batch: int = 256) -> Program:
    """The desktop ViT. Its 100 classes are not a multiple of 16."""
    model = vit(
        "desktop ViT",
        image=32,
        patch=4,
        width=width,
        hidden=hidden,
        heads=8,
        blocks=blocks,
        classes=100,
    )
    about = f"{blocks} blocks of width {width}, hidden {hidden}, 100 classes, batch {batch}"
    return of("desktop ViT", model, batch, about)


def sharded(
    *,
    width: int = 1024,
    heads: int = 16,
    layers: int = 12,
    vocabulary: int = 32_768,
    length: int = 1024,
    devices: int = 4,
    each: int = 2,
) -> Program:
    """A decoder, scanned and rematerialized, whose weights are divided over devices.

    Activations are divided over the batch, so that weights are gathered where they are used.
    """
    mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))

    def array(*shape: int, spec: P, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    rows = P(None, AXIS)
    params = {
        "embed": array(vocabulary, width, spec=P(AXIS)),
        "layers": {
            "qkv": array(layers, width, 3 * width, spec=rows),
            "out": array(layers, width, width, spec=rows),
            "up": array(layers, width, 4 * width, spec=rows),
            "down": array(layers, 4 * width, width, spec=rows),
            "norms": array(layers, 2, width, spec=P()),
        },
        "head": array(width, vocabulary, spec=P(AXIS)),
    }
    tokens = array(devices * each, length + 1, spec=P(AXIS), dtype=jnp.int32)

    def over_batch(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(AXIS)))

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    def block(x: Any, layer: Any) -> Any:
        batch, length, width = x.shape
        qkv = over_batch(norm(x, layer["norms"][0]) @ layer["qkv"])
        q, k, v = jnp.split(qkv.reshape(batch, length, 3 * heads, width // heads), 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(causal, scores, -1e9)), v)
        x = x + over_batch(mixed.reshape(batch, length, width) @ layer["out"])
        hidden = over_batch(jax.nn.gelu(norm(x, layer["norms"][1]) @ layer["up"]))
        return over_batch(x + hidden @ layer["down"]), None

    def loss(params: Any, tokens: Any) -> Any:
        x = over_batch(params["embed"][tokens[:, :-1]])
        x, _ = jax.lax.scan(jax.checkpoint(block), x, params["layers"])
        scores = over_batch(x @ params["head"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()

    about = (
        f"{layers} layers of width {width:,}, scanned and rematerialized, weights divided over "
        f"{devices} devices, {each} sequences of {length:,} tokens on each"
    )
    return Program(f"FSDP x {devices}", loss, params, (tokens,), about, target=f"h100:{devices}")
