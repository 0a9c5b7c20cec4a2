"""Rows of numbers against NumPy, over every pattern of 8 and 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep.debug._instrument.stats import (
    EMPTY,
    Column,
    after_turn,
    as_rows,
    combined,
    empty,
    is_recorded,
    no_turns,
    numbers,
)

FLOAT16 = np.dtype(np.float16)


def row(value, compute, loops, *, detail=False):
    return as_rows([numbers(value, compute, detail=detail)], loops)[0]


def _oracle(values: np.ndarray, compute: np.dtype) -> dict[Column, float]:
    with np.errstate(invalid="ignore"):  # Of NaN with other bits than NumPy's own.
        wide = values.astype(np.float64)
    size = np.abs(wide)
    known, limits = size[np.isfinite(size)], jnp.finfo(compute)
    nonzero = known[known > 0]
    low, high = float(limits.tiny), float(limits.max)
    return {
        Column.ABSMAX: np.max(size),
        Column.SMALLEST: np.min(nonzero, initial=np.inf),
        Column.BAD: np.sum(~np.isfinite(wide)),
        Column.BELOW: np.sum(nonzero < low) / size.size,
        Column.ABOVE: np.sum(known > high) / size.size,
        Column.LOW: np.min(wide[np.isfinite(wide)], initial=np.inf),
        Column.HIGH: np.max(wide[np.isfinite(wide)], initial=-np.inf),
        Column.ZEROS: np.sum(wide == 0),
        Column.SHARD: -1,
    }


@pytest.mark.rows(5)
@pytest.mark.parametrize("compute", [np.float16, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_every_pattern(dtype, compute):
    dtype, compute = np.dtype(dtype), np.dtype(compute)
    patterns = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):
        by_size = patterns[np.argsort(np.abs(patterns.astype(np.float32)), kind="stable")]
    # Chunks from the smallest on: most have one kind of number only.
    chunks = by_size.reshape(-1, min(256, by_size.size))
    made = np.asarray(jax.jit(jax.vmap(lambda x: row(x, compute, 0, detail=True)))(chunks))
    for chunk, found in zip(chunks, made, strict=True):
        # The rounding of a share is that of float32.
        expected = [_oracle(chunk, compute)[column] for column in list(Column)[:-1]]
        np.testing.assert_allclose(found[:5], expected[:5], rtol=float(np.finfo(np.float32).eps))
        # Compared as numbers, what is below the smallest normal number is zero to a CPU.
        tiny = float(np.finfo(np.float32).tiny)
        np.testing.assert_allclose(found[5:], expected[5:], rtol=0, atol=tiny)


def test_float32_against_a_narrower_dtype():
    values = np.array([1e-7, 1e-4, 0, 1, 65504, 65520, 1e9, -np.inf], np.float32)
    found = np.asarray(jax.jit(lambda x: row(x, FLOAT16, 0))(values))
    assert found[Column.BELOW] == 1 / 8
    assert found[Column.ABOVE] == 2 / 8
    assert found[Column.ABSMAX] == np.inf
    assert found[Column.BAD] == 1
    assert np.isnan(found[Column.LOW])


def test_complex_numbers():
    values = np.array([3 - 4j, complex(0, np.nan)], np.complex64)
    found = np.asarray(jax.jit(lambda x: row(x, FLOAT16, 0))(values))
    assert np.isnan(found[Column.ABSMAX])
    assert (found[Column.SMALLEST], found[Column.BAD]) == (3, 1)


def test_float64_beyond_float32():
    with jax.enable_x64(True):
        values = jnp.asarray([1e300, 1e-3], jnp.float64)
        found = np.asarray(jax.jit(lambda x: row(x, FLOAT16, 0))(values))
    assert found[Column.ABSMAX] == np.finfo(np.float32).max
    assert found[Column.BAD] == 0


def test_what_is_recorded():
    assert is_recorded(jax.ShapeDtypeStruct((2,), jnp.float8_e5m2))
    assert is_recorded(jax.ShapeDtypeStruct((), jnp.complex64))
    assert not is_recorded(jax.ShapeDtypeStruct((2,), jnp.int32))
    assert not is_recorded(jax.ShapeDtypeStruct((0, 3), jnp.float32))


def _rows(*values):
    return jnp.stack([row(jnp.asarray(v, jnp.float32), FLOAT16, 1, detail=True) for v in values])


def test_turns_are_combined():
    rows = _rows([1, 0], [2, 4], [np.inf, 1], [np.nan, np.nan])[:, None]
    found = np.asarray(combined(rows, Column.TURN))[0]
    # That of the first turn which is bad counts.
    assert (found[Column.ABSMAX], found[Column.BAD], found[Column.TURN]) == (np.inf, 1, 2)
    assert found[Column.SMALLEST] == 1
    # And so do the columns of detail.
    assert (found[Column.LOW], found[Column.HIGH], found[Column.ZEROS]) == (1, 1, 0)
    finite = np.asarray(combined(rows[:2], Column.TURN))[0]
    assert (finite[Column.ABSMAX], finite[Column.TURN], finite[Column.ZEROS]) == (4, -1, 1)


@pytest.mark.parametrize(
    "values",
    [
        [[1, 0], [2, 4], [np.inf, 1], [np.nan, np.nan]],
        # Shares of what is too small or too large for float16, and a turn that left the value out.
        [[1, 1e-7], [1, 1], [1e6, 1e-7], None, [1, 1]],
    ],
)
def test_turns_one_by_one_are_all_turns(values):
    given = [empty(1, 1)[0] if value is None else _rows(value)[0] for value in values]
    rows = jnp.stack(given)[:, None]
    state = no_turns(1, 1)
    for one in rows:
        state = after_turn(state, one, Column.TURN)
    # A mean is rounded once in each turn.
    rtol = len(values) * float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(state.rows, combined(rows, Column.TURN), rtol=rtol)


def test_what_was_not_computed_does_not_count():
    rows = jnp.stack([empty(1, 1)[0], *_rows([1, 1e-7])])[:, None]
    found = np.asarray(combined(rows, Column.TURN))[0]
    assert found[Column.BELOW] == 0.5
    np.testing.assert_array_equal(
        np.asarray(combined(jnp.stack([empty(1, 0)] * 2), Column.SHARD))[0], EMPTY
    )
