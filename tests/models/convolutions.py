"""Networks of convolutions in plain float32 and without any framework: a ResNet and a U-Net."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

Params = dict[str, Any]
_LAYOUT = ("NHWC", "HWIO", "NHWC")


def _convolve(kernel: Array, x: Array, stride: int = 1) -> Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=_LAYOUT
    )


def _kernel(key: Array, size: int, inside: int, outside: int) -> Array:
    scale = (2 / (size * size * inside)) ** 0.5
    return scale * jax.random.normal(key, (size, size, inside, outside))


def _norm(width: int) -> Params:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _over_batch(norm: Params, x: Array) -> Array:
    """Batch normalization with the batch's own statistics, as it is while training."""
    mean = jnp.mean(x, axis=(0, 1, 2))
    variance = jnp.mean((x - mean) ** 2, axis=(0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * norm["scale"] + norm["bias"]


# A ResNet of bottleneck blocks.

BLOCKS = (3, 4, 6, 3)


def init_resnet(
    *, width: int = 64, blocks: tuple[int, ...] = BLOCKS, classes: int = 1000, key: Array
) -> Params:
    """Parameters of a ResNet; with the standard sizes, those of ResNet-50."""
    keys = iter(jax.random.split(key, 4 + 4 * sum(blocks)))
    params: Params = {"stem": _kernel(next(keys), 7, 3, width), "stem_norm": _norm(width)}
    inside = width
    for stage, count in enumerate(blocks):
        middle = width * 2**stage
        for number in range(count):
            block = {
                "reduce": _kernel(next(keys), 1, inside, middle),
                "spatial": _kernel(next(keys), 3, middle, middle),
                "expand": _kernel(next(keys), 1, middle, 4 * middle),
                "norms": [_norm(middle), _norm(middle), _norm(4 * middle)],
            }
            if inside != 4 * middle:
                block["shortcut"] = _kernel(next(keys), 1, inside, 4 * middle)
                block["shortcut_norm"] = _norm(4 * middle)
            params[f"stage_{stage}_block_{number}"] = block
            inside = 4 * middle
    params["head"] = 0.01 * jax.random.normal(next(keys), (inside, classes))
    return params


def _bottleneck(block: Params, x: Array, stride: int) -> Array:
    norms = block["norms"]
    hidden = jax.nn.relu(_over_batch(norms[0], _convolve(block["reduce"], x)))
    hidden = jax.nn.relu(_over_batch(norms[1], _convolve(block["spatial"], hidden, stride)))
    hidden = _over_batch(norms[2], _convolve(block["expand"], hidden))
    if "shortcut" in block:
        x = _over_batch(block["shortcut_norm"], _convolve(block["shortcut"], x, stride))
    return jax.nn.relu(x + hidden)


def resnet_loss(
    params: Params,
    images: Float[Array, "batch height width channels"],
    labels: Int[Array, " batch"],
    *,
    blocks: tuple[int, ...] = BLOCKS,
) -> Float[Array, ""]:
    """Mean cross-entropy, in float32."""
    x = jax.nn.relu(_over_batch(params["stem_norm"], _convolve(params["stem"], images, 2)))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for stage, count in enumerate(blocks):
        for number in range(count):
            with jax.named_scope(f"stage_{stage}_block_{number}"):
                stride = 2 if stage and not number else 1
                x = _bottleneck(params[f"stage_{stage}_block_{number}"], x, stride)
    scores = jnp.mean(x, axis=(1, 2)) @ params["head"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels))


# A U-Net with attention where the image is smallest.


def _over_groups(norm: Params, x: Array, groups: int = 8) -> Array:
    *image, width = x.shape
    parts = x.reshape(*image, groups, width // groups)
    mean = jnp.mean(parts, axis=(1, 2, 4), keepdims=True)
    variance = jnp.mean((parts - mean) ** 2, axis=(1, 2, 4), keepdims=True)
    normal = ((parts - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return normal * norm["scale"] + norm["bias"]


def _init_residual(key: Array, inside: int, outside: int) -> Params:
    keys = jax.random.split(key, 3)
    return {
        "first_norm": _norm(inside),
        "first": _kernel(keys[0], 3, inside, outside),
        "second_norm": _norm(outside),
        "second": _kernel(keys[1], 3, outside, outside),
        "shortcut": _kernel(keys[2], 1, inside, outside),
    }


def _residual(block: Params, x: Array) -> Array:
    hidden = _convolve(block["first"], jax.nn.silu(_over_groups(block["first_norm"], x)))
    hidden = _convolve(block["second"], jax.nn.silu(_over_groups(block["second_norm"], hidden)))
    return hidden + _convolve(block["shortcut"], x)


def init_unet(*, width: int = 128, levels: int = 3, channels: int = 3, key: Array) -> Params:
    """Parameters of a U-Net; each level has twice the width of the one above."""
    keys = iter(jax.random.split(key, 4 * levels + 8))
    widths = [width * 2**level for level in range(levels)]
    deepest = widths[-1]
    return {
        "stem": _kernel(next(keys), 3, channels, width),
        "down": [
            _init_residual(next(keys), widths[max(level - 1, 0)], widths[level])
            for level in range(levels)
        ],
        "attention_norm": _norm(deepest),
        "qkv": 0.02 * jax.random.normal(next(keys), (deepest, 3 * deepest)),
        "out": 0.02 * jax.random.normal(next(keys), (deepest, deepest)),
        "up": [
            _init_residual(next(keys), 2 * widths[level], widths[max(level - 1, 0)])
            for level in reversed(range(levels))
        ],
        "norm": _norm(width),
        "last": _kernel(next(keys), 3, width, channels),
    }


def _attend(params: Params, x: Array, heads: int = 8) -> Array:
    batch, height, across, width = x.shape
    tokens = _over_groups(params["attention_norm"], x).reshape(batch, height * across, width)
    qkv = (tokens @ params["qkv"]).reshape(batch, height * across, 3, heads, width // heads)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return x + (mixed.reshape(tokens.shape) @ params["out"]).reshape(x.shape)


def unet_loss(
    params: Params,
    images: Float[Array, "batch height width channels"],
    targets: Float[Array, "batch height width channels"],
) -> Float[Array, ""]:
    """Mean square of the difference, as a model that takes noise away is trained."""
    x = _convolve(params["stem"], images)
    kept = []
    for number, block in enumerate(params["down"]):
        with jax.named_scope(f"down_{number}"):
            x = _residual(block, x)
            kept.append(x)
            x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") / 4
    with jax.named_scope("attention"):
        x = _attend(params, x)
    for number, block in enumerate(params["up"]):
        with jax.named_scope(f"up_{number}"):
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = _residual(block, jnp.concatenate([x, kept.pop()], axis=-1))
    made = _convolve(params["last"], jax.nn.silu(_over_groups(params["norm"], x)))
    return jnp.mean((made - targets) ** 2)
