"""What gradient release saves, by the compilers of the hardware."""

import pytest

from benchmarks import release
from tests.preflight._compilers import need, own_cache as own_cache

pytestmark = pytest.mark.usefixtures("standard_promotion", "own_cache")

GPU, TPU = ("h100", "cuda"), ("v5e", "tpu")


def peak(model: release.Model, target: str, step: str) -> float:
    """Bytes a parameter."""
    return release.compile_row(release.Runs(model, target, 1, 16, ()), step)["bytes_per_parameter"]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "platform"), [GPU, TPU])
def test_it_takes_less(target: str, platform: str):
    need(platform)
    # A TPU keeps the gradients of a smaller model in its memory on the chip, which does not count.
    model = release.mlp(layers=24, width=1024, hidden=2048)
    released = peak(model, target, release.RELEASED)
    assert released < peak(model, target, release.PLAIN) - 1


@pytest.mark.slow
@pytest.mark.parametrize(("target", "platform"), [GPU, TPU])
def test_a_hundred_million(target: str, platform: str):
    need(platform)
    model = release.mlp()
    limit = {"h100": 6.0, "v5e": 5.5}[target]
    released = peak(model, target, release.RELEASED)
    assert released <= limit
    assert released < peak(model, target, release.PLAIN) - 1
