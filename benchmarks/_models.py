"""The models that the benchmarks train, each as a float32 loss of a tree and a batch."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from tests.models import gpt as _gpt, vit as _vit


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What is trained."""

    name: str
    sizes: Mapping[str, int]
    init: Callable[[Array], Any]
    """The parameters, from a key."""
    loss: Callable[..., Any]
    """Of the parameters and what `batch` returns."""
    batch: Callable[[int], tuple[jax.ShapeDtypeStruct, ...]]
    """The shapes of a batch of a size."""

    def shape(self) -> Any:
        """The parameters without their values: nothing of the model's size is allocated."""
        return eqx.filter_eval_shape(self.init, jax.random.key(0))


def vit(name: str, **sizes: int) -> Model:
    """A vision transformer of images and labels."""
    image = sizes["image"]

    def batch(size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (
            jax.ShapeDtypeStruct((size, image, image, 3), jnp.float32),
            jax.ShapeDtypeStruct((size,), jnp.int32),
        )

    def init(key: Array) -> _vit.ViT:
        return _vit.ViT(**sizes, key=key)

    return Model(name, sizes, init, _vit.loss, batch)


def gpt(name: str, *, remat: bool = False, heads: int, **sizes: int) -> Model:
    """A language model of tokens; with `remat` only what enters a layer is kept of it."""

    def batch(size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((size, sizes["tokens"] + 1), jnp.int32),)

    def init(key: Array) -> _gpt.Params:
        return _gpt.init(**sizes, key=key)

    loss = functools.partial(_gpt.loss, heads=heads, remat=remat)
    return Model(name, {**sizes, "heads": heads, "remat": remat}, init, loss, batch)


DESKTOP = vit(
    "desktop ViT", image=32, patch=4, width=256, hidden=800, heads=8, blocks=6, classes=100
)
BASE = vit(
    "ViT-Base", image=224, patch=16, width=768, hidden=3072, heads=12, blocks=12, classes=1000
)
GPT = gpt("GPT", vocabulary=50_257, tokens=1024, width=768, layers=12, heads=12)
GPT_REMAT = gpt(
    "GPT, remat", vocabulary=50_257, tokens=1024, width=768, layers=12, heads=12, remat=True
)
