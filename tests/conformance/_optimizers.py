"""The compressed optimizers, each with what it must follow."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from halfstep import optim


@dataclasses.dataclass(frozen=True)
class Row:
    """One optimizer: how ours is made, how Optax's is, and what its state may take."""

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    rate: float
    bytes_24: float
    """Bytes a parameter, with its state, for a master of 24 bits."""


def _adamw(rate: Any, **options: Any) -> optim.Transformation:
    return optim.flash_adamw(rate, weight_decay=1e-2, **options)


def _adam(rate: Any, **options: Any) -> optim.Transformation:
    return optim.flash_adam(rate, **options)


def _lion(rate: Any, **options: Any) -> optim.Transformation:
    return optim.flash_lion(rate, **options)


def _momentum(rate: Any, **options: Any) -> optim.Transformation:
    return optim.flash_sgd(rate, 0.9, **options)


def _nesterov(rate: Any, **options: Any) -> optim.Transformation:
    return optim.flash_sgd(rate, 0.9, True, **options)


def _sgd(rate: Any, **options: Any) -> optim.Transformation:
    return optim.flash_sgd(rate, **options)


ROWS = (
    ("adamw", Row(_adamw, lambda rate: optax.adamw(rate, weight_decay=1e-2), 1e-3, 5.125)),
    ("adam", Row(_adam, optax.adam, 1e-3, 5.125)),
    ("lion", Row(_lion, optax.lion, 1e-4, 4.0625)),
    ("momentum", Row(_momentum, lambda rate: optax.sgd(rate, 0.9), 1e-2, 4.0625)),
    ("nesterov", Row(_nesterov, lambda rate: optax.sgd(rate, 0.9, True), 1e-2, 4.0625)),
    ("sgd", Row(_sgd, optax.sgd, 1e-2, 3.0)),
)
NAMES = tuple(name for name, _ in ROWS)


def row(name: str) -> Row:
    """An optimizer by its name."""
    return dict(ROWS)[name]
