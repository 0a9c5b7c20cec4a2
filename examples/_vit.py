"""A vision transformer in plain Equinox. Nothing in it knows of mixed precision.

Matrix products become 16-bit, softmax and norms stay in float32: `halfstep.filter_value_and_grad`
sees to that, also for those that are written by hand.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypedDict

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class Sizes(TypedDict):
    """The sizes of a transformer."""

    patch: int
    width: int
    hidden: int
    heads: int
    blocks: int


PRESETS: Mapping[str, Sizes] = MappingProxyType(
    {
        # Trains on two CPU cores in a minute or two.
        "tiny": Sizes(patch=7, width=64, hidden=128, heads=4, blocks=2),
        # The desktop model of the MPX paper.
        "paper": Sizes(patch=4, width=256, hidden=800, heads=8, blocks=6),
    }
)


class Block(eqx.Module):
    """Attention and a perceptron with one hidden layer, each normalized before and added."""

    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, width: int, hidden: int, heads: int, *, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=attention_key)
        self.mlp_norm = eqx.nn.LayerNorm(width)
        self.mlp = eqx.nn.MLP(width, width, hidden, 1, jax.nn.gelu, key=mlp_key)

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        y = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class ViT(eqx.Module):
    """One image to the logits of its classes; `jax.vmap` it over a batch."""

    embed: eqx.nn.Linear
    position: Float[Array, "tokens width"]
    blocks: tuple[Block, ...]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        *,
        patch: int,
        width: int,
        hidden: int,
        heads: int,
        blocks: int,
        key: PRNGKeyArray,
    ):
        rows, columns, channels = shape
        if rows % patch or columns % patch:
            raise ValueError(
                f"the sides of an image must be multiples of the patch; got images of {rows} x "
                f"{columns} and patch={patch}. For 28 x 28 use 4 or 7, for 32 x 32 use 4 or 8."
            )
        if width % heads:
            raise ValueError(f"the width must be a multiple of the heads; got {width} and {heads}.")
        embed_key, position_key, head_key, *keys = jax.random.split(key, 3 + blocks)
        tokens = (rows // patch) * (columns // patch)
        self.patch = patch
        self.embed = eqx.nn.Linear(patch * patch * channels, width, key=embed_key)
        self.position = 0.02 * jax.random.normal(position_key, (tokens, width))
        self.blocks = tuple(Block(width, hidden, heads, key=k) for k in keys)
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, classes, key=head_key)

    def __call__(self, image: Float[Array, "rows columns channels"]) -> Float[Array, " classes"]:
        x = jax.vmap(self.embed)(patches(image, self.patch)) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(jax.vmap(self.norm)(x), axis=0))


def patches(
    image: Float[Array, "rows columns channels"], patch: int
) -> Float[Array, "tokens pixels"]:
    """Cut an image into squares, row by row, and flatten each."""
    rows, columns, channels = image.shape
    grid = image.reshape(rows // patch, patch, columns // patch, patch, channels)
    return grid.swapaxes(1, 2).reshape(-1, patch * patch * channels)
