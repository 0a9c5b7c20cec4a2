"""Programs whose tracing is timed: a loss as users write it, and the shapes of its arguments."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks._models import BASE, GPT, Model, gpt, vit
from tests.models import gpt as _gpt, vit as _vit


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A loss and its arguments."""

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    """Returns a new function object, because JAX keeps what it has traced by the function."""


def of_gpt(model: Model, *, scan: bool) -> Program:
    """A language model, in a `scan` or written out by a Python loop."""
    heads = model.sizes["heads"]
    name = f"{model.sizes['layers']}-layer GPT, {'scanned' if scan else 'written out'}"
    return Program(
        name,
        lambda: (
            functools.partial(_gpt.loss, heads=heads, scan=scan),
            (model.shape(), *model.batch(8)),
        ),
    )


def of_vit(model: Model) -> Program:
    """A vision transformer in Equinox, which repeats its blocks in a Python loop."""
    return Program(
        model.name,
        lambda: (functools.partial(_vit.loss), (model.shape(), *model.batch(8))),
    )


def linen_gpt2(*, layers: int, width: int, heads: int, tokens: int, vocabulary: int) -> Program:
    """GPT-2 in Flax Linen, whose modules put every layer into its own named scopes."""
    from flax import linen

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any, mask: Any) -> Any:
            attend = linen.MultiHeadDotProductAttention(heads, name="attn")
            x = x + attend(linen.LayerNorm(epsilon=1e-5, name="ln_1")(x), mask=mask)
            hidden = linen.Dense(4 * width, name="c_fc")(linen.LayerNorm(name="ln_2")(x))
            return x + linen.Dense(width, name="c_proj")(linen.gelu(hidden))

    class GPT2(linen.Module):
        @linen.compact
        def __call__(self, ids: Any) -> Any:
            embed = linen.Embed(vocabulary, width, name="wte")
            places = linen.Embed(tokens, width, name="wpe")(jnp.arange(ids.shape[1]))
            x, mask = embed(ids) + places, linen.make_causal_mask(ids)
            for number in range(layers):
                x = Block(name=f"h_{number}")(x, mask)
            return embed.attend(linen.LayerNorm(epsilon=1e-5, name="ln_f")(x))

    model, ids = GPT2(), jax.ShapeDtypeStruct((8, tokens + 1), jnp.int32)

    def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        params = jax.eval_shape(
            lambda key, ids: model.init(key, ids[:, :-1]), jax.random.key(0), ids
        )

        def loss(params: Any, ids: Any) -> Any:
            scores: Any = model.apply(params, ids[:, :-1])
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, ids[:, 1:]))

        return loss, (params, ids)

    return Program("Linen GPT-2", make)


def pallas_attention(*, tokens: int, heads: int) -> Program:
    """Attention by the Pallas kernel that comes with JAX, interpreted, because there is no GPU."""
    with warnings.catch_warnings():
        # JAX points to Tokamax instead. The module is still the kernel that everybody has.
        warnings.filterwarnings("ignore", "jax.experimental.pallas.ops.gpu.attention is deprecated")
        from jax.experimental.pallas.ops.gpu import attention

    blocks = attention.BlockSizes(
        **dict.fromkeys(
            ("block_q", "block_k", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 16
        )
    )
    width = 16 * heads

    def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        def loss(params: Any, x: Any) -> Any:
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in "qkv")
            mixed = attention.mha(q, k, v, None, causal=True, interpret=True, block_sizes=blocks)
            return jnp.mean((jnp.einsum("btnh,nhd->btd", mixed, params["o"]) - x) ** 2)

        shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        params = {name: shape((width, heads, 16)) for name in "qkv"}
        return loss, (params | {"o": shape((heads, 16, width))}, shape((1, tokens, width)))

    return Program("Pallas attention", make)


def full() -> tuple[Program, ...]:
    """The programs of the benchmark."""
    return (
        of_gpt(GPT, scan=False),
        of_gpt(GPT, scan=True),
        linen_gpt2(layers=12, width=768, heads=12, tokens=1024, vocabulary=50_257),
        of_vit(BASE),
        pallas_attention(tokens=32, heads=2),
    )


def quick() -> tuple[Program, ...]:
    """The same programs, as small as they can be."""
    small = gpt("tiny GPT", vocabulary=16, tokens=8, width=16, layers=3, heads=2)
    tiny = vit("ViT-Base", image=8, patch=4, width=16, hidden=16, heads=2, blocks=3, classes=10)
    return (
        of_gpt(small, scan=False),
        of_gpt(small, scan=True),
        linen_gpt2(layers=3, width=16, heads=2, tokens=8, vocabulary=16),
        of_vit(tiny),
        pallas_attention(tokens=16, heads=1),
    )
