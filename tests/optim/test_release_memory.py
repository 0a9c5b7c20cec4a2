"""What gradient release saves, by the compilers of the hardware."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

import halfstep
from halfstep import optim
from tests.models.stack import Stack, gradients_first, mlp
from tests.preflight._compilers import need, own_cache as own_cache

pytestmark = pytest.mark.usefixtures("standard_promotion", "own_cache")

OPTIMIZER = optim.flash_adamw(1e-3)
TARGETS = [("h100", "cuda"), ("v5e", "tpu")]


def released(model: Stack) -> Any:
    return optim.release(tx=OPTIMIZER, **model.functions)


def peak(model: Stack, target: str, step: Callable[..., Any]) -> float:
    """Bytes per parameter."""
    args = (model.params, jax.eval_shape(released(model).init, model.params), model.batch(16))
    (entry,) = halfstep.preflight(
        lambda *args: step(*args), args, targets=target, donate_argnums=(0, 1), progress=False
    ).entries
    assert entry.peak_bytes is not None
    return entry.peak_bytes / model.count


@pytest.mark.slow
@pytest.mark.parametrize(("target", "platform"), TARGETS)
def test_it_takes_less(target: str, platform: str):
    need(platform)
    # A TPU keeps the gradients of a smaller model in its memory on the chip, which does not count.
    model = mlp(layers=24, width=1024, hidden=2048)
    least = peak(model, target, gradients_first(model, OPTIMIZER)) - 1
    assert peak(model, target, released(model)) < least


@pytest.mark.slow
@pytest.mark.parametrize(("target", "platform"), TARGETS)
def test_a_hundred_million(target: str, platform: str):
    need(platform)
    model = mlp()
    limit = {"h100": 6.0, "v5e": 5.5}[target]
    taken = peak(model, target, released(model))
    assert taken <= limit
    assert taken < peak(model, target, gradients_first(model, OPTIMIZER)) - 1
