"""What the training benchmark trains: a vision transformer and a language model, on real data.

Both losses are plain float32 functions that know nothing of precision.
"""

import dataclasses
import functools
import hashlib
import math
import pathlib
import sysconfig
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from examples._data import FASHION_MNIST, load_fashion_mnist
from tests.models import gpt as _gpt, vit as _vit


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long a task is trained, and how fast."""

    steps: int
    batch: int
    learning_rate: float
    chunk: int = 50
    """Steps in one call; one bar of progress moves by that much."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its loss and its data."""

    name: str
    init: Callable[[Array], Any]
    """The model of a key."""
    loss: Callable[..., Array]
    """The loss of a model and a batch, in float32."""
    batch: Callable[[Any, Int[Array, " batch"]], tuple[Array, ...]]
    """The examples of `train` or `held_out` that begin at the given places."""
    train: Any
    places: int
    """How many places of `train` an example can begin at."""
    held_out: Any
    tested: Int[np.ndarray, "batches batch"]
    """The places of `held_out` that are tested."""
    schedule: Schedule
    about: Mapping[str, Any]
    """Sizes and facts for the report."""
    correct: Callable[..., Array] | None = None
    """The share of a batch that is classified rightly, where there are classes."""


def fashion_mnist(schedule: Schedule, sizes: Mapping[str, int], *, tested: int = 10_000) -> Task:
    """A small ViT on Fashion-MNIST; held out are its test images."""
    data = load_fashion_mnist(FASHION_MNIST)
    mean, deviation = float(data.train_images.mean()), float(data.train_images.std())
    size = data.train_images.shape[1]

    def batch(part: tuple[Array, Array], places: Array) -> tuple[Array, ...]:
        images, labels = part
        return (images[places].astype(jnp.float32) - mean) / deviation, labels[places]

    def correct(model: _vit.ViT, images: Array, labels: Array) -> Array:
        return jnp.mean((jnp.argmax(jax.vmap(model)(images), axis=-1) == labels).astype(float))

    return Task(
        name="ViT on Fashion-MNIST",
        init=lambda key: _vit.ViT(image=size, channels=1, classes=data.classes, **sizes, key=key),
        loss=_vit.loss,
        batch=batch,
        train=(jnp.asarray(data.train_images), jnp.asarray(data.train_labels)),
        places=len(data.train_labels),
        held_out=(jnp.asarray(data.test_images), jnp.asarray(data.test_labels)),
        tested=np.arange(tested).reshape(-1, min(500, tested)),
        schedule=schedule,
        about={"sizes": dict(sizes), "held_out_images": tested, "guessing": math.log(data.classes)},
        correct=correct,
    )


def library_sources(size: int) -> tuple[bytes, bytes]:
    """So many bytes of Python's standard library, nine tenths to train on and one held out.

    The modules that are single files, in the order of their names; every tenth is held out.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    # What the build writes about itself differs between two builds of one Python.
    paths = [path for path in sorted(folder.glob("*.py")) if not path.match("_sysconfigdata*")]
    texts = [path.read_bytes() for path in paths]
    held_out = b"".join(texts[9::10])
    del texts[9::10]
    train = b"".join(texts)
    sizes = size * 9 // 10, size // 10
    if len(train) < sizes[0] or len(held_out) < sizes[1]:
        raise SystemExit(
            f"the *.py files of {folder} must give {sizes[0]:,} bytes to train on and {sizes[1]:,} "
            f"to hold out; they give {len(train):,} and {len(held_out):,}. Use a Python that was "
            "installed with the sources of its library."
        )
    return train[: sizes[0]], held_out[: sizes[1]]


def python_sources(
    schedule: Schedule,
    sizes: Mapping[str, int],
    *,
    heads: int,
    size: int = 4_000_000,
    tested: int = 256,
) -> Task:
    """A small GPT on single bytes of the sources of Python's standard library."""
    texts = library_sources(size)
    seen = np.unique(np.frombuffer(b"".join(texts), np.uint8))
    train, held_out = (np.searchsorted(seen, np.frombuffer(t, np.uint8)) for t in texts)
    tokens = sizes["tokens"]
    share = np.bincount(train) / len(train)
    share = share[share > 0]

    def batch(text: Array, places: Array) -> tuple[Array, ...]:
        return (text[places[:, None] + jnp.arange(tokens + 1)[None, :]],)

    return Task(
        name="GPT on Python's library",
        init=lambda key: _gpt.init(vocabulary=len(seen), **sizes, key=key),
        loss=functools.partial(_gpt.loss, heads=heads),
        batch=batch,
        train=jnp.asarray(train, jnp.int32),
        places=len(train) - tokens,
        held_out=jnp.asarray(held_out, jnp.int32),
        tested=(np.arange(tested) * tokens).reshape(-1, min(32, tested)),
        schedule=schedule,
        about={
            "sizes": {**sizes, "heads": heads, "vocabulary": len(seen)},
            "bytes": size,
            "sha256": hashlib.sha256(b"".join(texts)).hexdigest(),
            "held_out_bytes": tested * tokens,
            "guessing": -float(np.sum(share * np.log(share))),
        },
    )
