"""The training steps whose bytes `benchmarks.guard` compares with those of an earlier version."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

import halfstep
from benchmarks._models import BASE, DESKTOP, GPT, GPT_REMAT, Model, gpt, vit
from benchmarks._steps import VARIANTS, Variant, with_halfstep
from tests.models import bert as _bert, convolutions, vit as _vit

Group = Literal["same", "rounded", "stored"]
"""Programs that keep every byte; that may be rounded elsewhere; those of `benchmarks.stored`."""
TARGETS = ("h100", "v5e")
STEPS: Mapping[str, Variant] = MappingProxyType(
    {
        "bf16": VARIANTS["halfstep, bf16"],
        "f16": VARIANTS["halfstep, f16"],
        "bf16, all stored": Variant(with_halfstep("bf16,store:op:*=keep"), halfstep.NoLossScaling),
    }
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A step of a model that is compiled at one batch."""

    model: Model
    batch: int
    group: Group
    step: str = "bf16"
    targets: tuple[str, ...] = TARGETS
    steps: Mapping[str, Variant] = STEPS

    @property
    def variant(self) -> Variant:
        """The step that is compiled."""
        return self.steps[self.step]


def images(size: int) -> Callable[[int], tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Batches of square images and labels."""
    return lambda batch: (
        jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


def written_out(model: Model) -> Model:
    """A model without a scan over its layers."""
    return dataclasses.replace(model, loss=functools.partial(model.loss, scan=False))


def bert(name: str, *, heads: int, **sizes: int) -> Model:
    """A post-norm encoder of tokens, some of which are masked."""

    def batch(size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((size, sizes["tokens"]), jnp.int32),) * 2

    init = functools.partial(_bert.init, **sizes)
    loss = functools.partial(_bert.loss, heads=heads)
    return Model(name, {**sizes, "heads": heads}, lambda key: init(key=key), loss, batch)


def resnet(name: str, *, width: int, blocks: tuple[int, ...], image: int) -> Model:
    """A ResNet of 1000 classes."""

    def init(key: Array) -> Any:
        return convolutions.init_resnet(width=width, blocks=blocks, key=key)

    loss = functools.partial(convolutions.resnet_loss, blocks=blocks)
    sizes = {"width": width, "blocks": sum(blocks), "image": image}
    return Model(name, sizes, init, loss, images(image))


def unet(name: str, *, width: int, levels: int, image: int) -> Model:
    """A U-Net of noisy images."""

    def init(key: Array) -> Any:
        return convolutions.init_unet(width=width, levels=levels, key=key)

    def batch(size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((size, image, image, 3), jnp.float32),) * 2

    sizes = {"width": width, "levels": levels, "image": image}
    return Model(name, sizes, init, convolutions.unet_loss, batch)


def remat_of_blocks(saved: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The loss of a vision transformer with `jax.checkpoint` around each layer."""

    def loss(model: _vit.ViT, *batch: Any) -> Any:
        blocks = [eqx.filter_checkpoint(block, policy=saved) for block in model.blocks]
        return _vit.loss(eqx.tree_at(lambda model: model.blocks, model, blocks), *batch)

    return loss


def rounded(model: Model, batch: int, remat: Callable[..., Any]) -> tuple[Program, ...]:
    """A model under the user's own `jax.checkpoint`, by its policy, and with nothing made again."""
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    losses = {"remat": remat(), "remat but dots": remat(saved=dots)}
    models = (
        dataclasses.replace(model, name=f"{model.name}, {name}", loss=loss)
        for name, loss in losses.items()
    )
    without = Program(model, batch, "rounded", "bf16, all stored")
    return (*(Program(one, batch, "rounded") for one in models), without)


def remat_of(model: Model) -> Callable[..., Any]:
    """The losses of a model that takes `remat` and `saved` itself."""
    return lambda **options: functools.partial(model.loss, remat=True, **options)


BASE_3 = vit("ViT-Base of 3 blocks", **{**BASE.sizes, "blocks": 3})
BERT_BASE = bert(
    "BERT-base", vocabulary=30_522, tokens=512, width=768, hidden=3072, layers=12, heads=12
)
# XLA's TPU compiler makes a small program of these within a minute. Their vocabularies are small,
# because the scores of a large one would hide what the layers keep.
SMALL: dict[str, Any] = {"vocabulary": 4096, "tokens": 256, "width": 512, "heads": 8}
SMALL_VIT = vit("ViT", **{**DESKTOP.sizes, "blocks": 2})
SMALL_GPT = gpt("small GPT", layers=4, **SMALL)
GPT_OUT = written_out(gpt("GPT written out", layers=3, **SMALL))
SMALL_BERT = bert("small BERT", layers=4, hidden=2048, **SMALL)
BERT_OUT = written_out(bert("BERT written out", layers=2, hidden=2048, **SMALL))
# XLA's TPU compiler takes minutes for the first one, and more than 8 of them for one of 64 x 64
# images, 3 levels, a width from 128 on and batch 64.
UNET = unet("U-Net", width=64, levels=2, image=32)
UNET_1 = unet("U-Net of 1 level", width=32, levels=1, image=16)
RESNET = resnet("ResNet", width=64, blocks=(1, 1, 1, 1), image=64)
PROGRAMS = (
    # Float16 is for the GPU only, because a TPU converts it.
    Program(DESKTOP, 256, "same"),
    Program(DESKTOP, 256, "same", "f16", targets=("h100",)),
    Program(DESKTOP, 64, "same"),
    Program(DESKTOP, 64, "same", "f16", targets=("h100",)),
    # With its 12 blocks, a compile for a TPU takes minutes.
    Program(BASE, 128, "same", targets=("h100",)),
    Program(BASE_3, 128, "same", targets=("v5e",)),
    Program(GPT, 8, "same"),
    Program(GPT_REMAT, 8, "rounded"),
    Program(GPT_OUT, 8, "same"),
    Program(UNET, 8, "same", targets=("h100",)),
    Program(UNET_1, 8, "same", targets=("v5e",)),
    Program(RESNET, 32, "same"),
    Program(BERT_BASE, 8, "same"),
    Program(BERT_OUT, 8, "same"),
    *rounded(SMALL_GPT, 4, remat_of(SMALL_GPT)),
    *rounded(SMALL_VIT, 64, remat_of_blocks),
    *rounded(SMALL_BERT, 8, remat_of(SMALL_BERT)),
)
"""All that is compiled."""
