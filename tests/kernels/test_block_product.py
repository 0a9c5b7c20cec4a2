"""Products of blocks of 128 on Hopper: the numbers, by Pallas' interpreter, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
import halfstep.kernels._block_product as block_product
from halfstep._autocast.f8 import blocks
from halfstep.kernels._block_product import BLOCK

needs_kernel = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the kernel takes JAX 0.12"
)
HOPPER = (9, 0)


def interpreted(*operands: jax.Array, out: Any = np.float32) -> jax.Array:
    """The kernel as it is compiled, with its copies and barriers; a race is an error."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    how = plgpu.InterpretGPUParams(detect_races=True)
    return block_product.product(*operands, out=np.dtype(out), interpret=how)


def operands(batch: int, rows: int, columns: int, length: int) -> list[jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    made = []
    for size in (rows, columns):
        elements = 100 * jax.random.normal(next(keys), (batch, size, length))
        made.append(elements.astype(jnp.float8_e4m3fn))
        # Magnitudes far apart, so that a scale in the wrong place is seen.
        power = jax.random.randint(next(keys), (batch, size, length // BLOCK), -20, 20)
        made.append(jnp.exp2(power.astype(jnp.float32)).astype(jnp.float8_e8m0fnu))
    return made


def exact(elements: jax.Array, scale: jax.Array) -> np.ndarray:
    by_element = np.repeat(np.asarray(scale.astype(jnp.float32), np.float64), BLOCK, axis=-1)
    return np.asarray(elements.astype(jnp.float32), np.float64) * by_element


@needs_kernel
@pytest.mark.parametrize(
    "shape",
    [
        # Rows are no multiples of the tile, and not even of the 8 and 16 that copies need.
        pytest.param((2, 5, 137, 128), id="partial tiles"),
        # More blocks than are in shared memory at once.
        pytest.param((1, 8, 16, 5 * 128), id="many blocks", marks=pytest.mark.slow),
    ],
)
def test_numbers(shape: tuple[int, int, int, int]) -> None:
    made = operands(*shape)
    left, right = exact(*made[:2]), exact(*made[2:])
    expected = np.einsum("bmk,bnk->bmn", left, right)
    most = np.einsum("bmk,bnk->bmn", abs(left), abs(right))
    error = np.abs(np.asarray(interpreted(*made), np.float64) - expected)
    assert error.shape == shape[:3]
    # Of a sum of n terms in any order: n roundings of at most the sum of magnitudes.
    assert (error <= shape[-1] * np.finfo(np.float32).eps / 2 * most).all()


@needs_kernel
def test_a_result_in_16_bits_is_rounded_once() -> None:
    made = operands(1, 8, 16, 256)
    wide = interpreted(*made)
    assert np.array_equal(interpreted(*made, out=jnp.bfloat16), wide.astype(jnp.bfloat16))


@needs_kernel
def test_a_block_that_is_nan_makes_its_row_nan() -> None:
    first, scale, *second = operands(1, 8, 16, 256)
    made = interpreted(first, scale.at[0, 3, 1].set(jnp.nan), *second)
    assert np.array_equal(np.isnan(made).all(-1), np.arange(8)[None] == 3)
    assert np.array_equal(np.isnan(made).any(-1), np.arange(8)[None] == 3)


@needs_kernel
@pytest.mark.slow
def test_all_legs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and both gradients call the kernel, and agree with products of decoded factors."""

    def loss(params: Any, x: Any) -> Any:
        hidden = jnp.einsum("bsi,io->bso", x, params["first"])
        return jnp.sum(jnp.tanh(jnp.einsum("bso,oi->bsi", hidden, params["second"])))

    keys = jax.random.split(jax.random.key(1), 3)
    params = {
        "first": jax.random.normal(keys[0], (160, 144)),
        "second": jax.random.normal(keys[1], (144, 160)) / 12,
    }
    x = jax.random.normal(keys[2], (2, 9, 160)) / 12
    gradient = jax.grad(halfstep.autocast(loss, "f8-block"), argnums=(0, 1))
    expected = gradient(params, x)
    shapes = []

    def by_kernel(*values: jax.Array, form: Any) -> jax.Array:
        avals: Any = [jax.typeof(value) for value in values]
        assert block_product.refusal(avals, HOPPER) is None
        shapes.append((values[0].shape, values[2].shape))
        return interpreted(*values, out=form.out)

    monkeypatch.setattr(blocks._blocks, "impl", by_kernel)
    made = gradient(params, x)
    assert len(shapes) == 6
    assert ((1, 160, 128), (1, 144, 128)) in shapes
    # Both round sums of float32 to bfloat16, which may go different ways, and again on each leg.
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        limit = 4 * eps * float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(one, other, rtol=0, atol=limit)


def avals(dtype: Any = jnp.float8_e4m3fn, length: int = 256) -> list[Any]:
    elements = jax.ShapeDtypeStruct((1, 8, length), dtype)
    scale = jax.ShapeDtypeStruct((1, 8, 2), jnp.float8_e8m0fnu)
    return [elements, scale] * 2


@needs_kernel
@pytest.mark.parametrize(
    ("capability", "operands", "reason"),
    [
        (None, avals(), "takes GPUs of compute capability 9 (Hopper); got None"),
        ((8, 9), avals(), "takes GPUs of compute capability 9 (Hopper); got 8.9"),
        (HOPPER, avals(jnp.int8), "takes elements of float8_e4m3fn or float8_e5m2; got int8"),
        (HOPPER, avals(length=64), "takes blocks of 128"),
        (HOPPER, avals(length=0), "takes known sizes other than zero"),
    ],
)
def test_refusals(capability: Any, operands: Any, reason: str) -> None:
    found = block_product.refusal(operands, capability)
    assert found is not None
    assert found.startswith(reason)


def test_accepted_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    old = jax.__version_info__ < (0, 12)
    reason = block_product.refusal(avals(), HOPPER)
    assert reason == (f"takes JAX 0.12 or later; got {jax.__version__}" if old else None)
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "takes JAX 0.12 or later" in (block_product.refusal(avals(), HOPPER) or "")
