"""A vision transformer in plain float32 Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int


class Block(eqx.Module):
    """Attention and a two-layer network, each behind a norm and around a residual."""

    attention_norm: eqx.nn.LayerNorm
    mlp_norm: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, hidden: int, heads: int, *, key: Array):
        keys = jax.random.split(key, 4)
        self.attention_norm, self.mlp_norm = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.qkv = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.out = eqx.nn.Linear(width, width, key=keys[1])
        self.up = eqx.nn.Linear(width, hidden, key=keys[2])
        self.down = eqx.nn.Linear(hidden, width, key=keys[3])
        self.heads = heads

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        """Transform one sequence."""
        tokens, width = x.shape
        qkv = jax.vmap(self.qkv)(jax.vmap(self.attention_norm)(x))
        q, k, v = jnp.moveaxis(qkv.reshape(tokens, 3, self.heads, width // self.heads), 0, 2)
        scores = jnp.einsum("hqd,hkd->hqk", q, k) / (width // self.heads) ** 0.5
        mixed = jnp.einsum("hqk,hkd->qhd", jax.nn.softmax(scores), v).reshape(tokens, width)
        x = x + jax.vmap(self.out)(mixed)
        hidden = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.mlp_norm)(x)))
        return x + jax.vmap(self.down)(hidden)


class ViT(eqx.Module):
    """A vision transformer over square images, classifying from the mean token."""

    embed: eqx.nn.Linear
    position: Float[Array, "tokens width"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(
        self,
        *,
        image: int = 32,
        patch: int = 4,
        channels: int = 3,
        width: int = 256,
        hidden: int = 800,
        heads: int = 8,
        blocks: int = 6,
        classes: int = 100,
        key: Array,
    ):
        keys = jax.random.split(key, blocks + 3)
        tokens = (image // patch) ** 2
        self.embed = eqx.nn.Linear(patch * patch * channels, width, key=keys[0])
        self.position = 0.02 * jax.random.normal(keys[1], (tokens, width))
        self.head = eqx.nn.Linear(width, classes, key=keys[2])
        self.blocks = [Block(width, hidden, heads, key=k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.patch = patch

    def __call__(self, image: Float[Array, "height width channels"]) -> Float[Array, " classes"]:
        """Class scores of one image."""
        height, width, channels = image.shape
        p = self.patch
        patches = image.reshape(height // p, p, width // p, p, channels)
        patches = patches.transpose(0, 2, 1, 3, 4).reshape(-1, p * p * channels)
        x = jax.vmap(self.embed)(patches) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(jnp.mean(x, axis=0)))


def loss(
    model: ViT,
    images: Float[Array, "batch height width channels"],
    labels: Int[Array, " batch"],
) -> Float[Array, ""]:
    """Mean cross-entropy, in float32."""
    scores = jax.vmap(model)(images).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels))
