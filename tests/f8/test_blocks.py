"""Products of factors in blocks: the numbers, and the operation that GPUs have for them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep._autocast.f8 import blocks
from halfstep.kernels._target import compiling_for
from halfstep.quant._scaled import Blocks, read_blocks, write_blocks

MX = halfstep.Factor(element="e4m3", per="block", size=32)
WIDE = halfstep.Factor(element="e5m2", per="block", size=32)
FP4 = halfstep.Factor(element="e2m1", per="block", size=16, two_level=True)
TILE = halfstep.Factor(element="e2m1", per="tile", size=16, two_level=True)
DEEP = halfstep.Factor(element="e4m3", per="block", size=128)
DEEP_TILE = halfstep.Factor(element="e4m3", per="tile", size=128)
SMALL = [
    pytest.param(MX, MX, id="mxfp8"),
    pytest.param(WIDE, MX, id="e5m2"),
    pytest.param(FP4, TILE, id="nvfp4"),
]
PAIRS = [*SMALL, pytest.param(DEEP, DEEP_TILE, id="f8-block")]


def factors(*ways: halfstep.Factor, batch: int = 2) -> tuple[Blocks, Blocks]:
    keys = jax.random.split(jax.random.key(0), 2)
    # Rows with magnitudes far apart, so that a scale in the wrong place is seen; and a last block
    # that is not full.
    shapes = ((batch, 48, 80), (batch, 32, 80))
    first, second = (
        jax.random.normal(key, shape) * jnp.exp2(jnp.arange(-20.0, shape[1] - 20.0))[None, :, None]
        for key, shape in zip(keys, shapes, strict=True)
    )
    return write_blocks(first, ways[0]), write_blocks(second, ways[1])


def product(first: Blocks, second: Blocks, *, ways: tuple[halfstep.Factor, halfstep.Factor]):
    return blocks.multiply(
        first,
        second,
        *ways,
        compute=np.dtype(jnp.bfloat16),
        out=np.dtype(np.float32),
        scopes=("native", "rounded"),
    )


@pytest.mark.rows(1)
@pytest.mark.parametrize("ways", [pair.values for pair in PAIRS], ids=[p.id for p in PAIRS])
def test_numbers(ways):
    """Both factors are exact in float64; only the sum of a row is rounded, in float32."""
    first, second = factors(*ways)
    exact = [
        np.asarray(read_blocks(f, way, length=80, dtype=jnp.float32), np.float64)
        for f, way in ((first, ways[0]), (second, ways[1]))
    ]
    expected = np.einsum("bmk,bnk->bmn", *exact)
    most = np.einsum("bmk,bnk->bmn", *map(np.abs, exact))
    error = np.abs(np.asarray(product(first, second, ways=ways), np.float64) - expected)
    # Of a sum of n terms in any order: n roundings of at most the sum of magnitudes.
    assert (error <= 80 * np.finfo(np.float32).eps / 2 * most).all()


@pytest.mark.rows(2)
@pytest.mark.parametrize("ways", [pair.values for pair in PAIRS], ids=[p.id for p in PAIRS])
def test_mapped(ways):
    first, second = factors(*ways)
    func = functools.partial(product, ways=ways)
    more = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1] if leaf.ndim else leaf]), first)
    made = jax.vmap(func, in_axes=(0, None))(more, second)
    for place in (0, 1):
        one = jax.tree.map(lambda leaf, place=place: leaf[place], more)
        assert np.array_equal(made[place], func(one, second))


def lowered(ways, platform: str, **options) -> str:
    first, second = factors(*ways)
    func = functools.partial(product, ways=ways)
    traced = jax.jit(func, **options).trace(first, second)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("ways", [pair.values for pair in SMALL], ids=[p.id for p in SMALL])
def test_gpus_have_an_operation_for_it(ways):
    assert 'composite "xla.scaled_dot"' in lowered(ways, "cuda")
    assert "scaled_dot" not in lowered(ways, "cpu")
    assert "scaled_dot" not in lowered(ways, "tpu")


FP4_WIDE = halfstep.Factor(element="e2m1", per="block", size=128)
KERNEL = "mosaic_gpu" if jax.__version_info__ >= (0, 12) else "stablehlo.dot_general"


@pytest.mark.parametrize(
    ("capability", "form"),
    [
        pytest.param((9, 0), KERNEL, id="Hopper"),
        pytest.param((10, 0), 'composite "xla.scaled_dot"', id="Blackwell"),
        pytest.param((8, 9), "stablehlo.dot_general", id="Ada"),
        pytest.param((8, 0), "stablehlo.dot_general", id="Ampere"),
        pytest.param(None, "stablehlo.dot_general", id="unknown"),
    ],
)
def test_each_generation_has_its_form_of_blocks_of_128(capability, form: str):
    forms = ("mosaic_gpu", 'composite "xla.scaled_dot"', "stablehlo.dot_general")
    with compiling_for(capability) as told:
        text = lowered((DEEP, DEEP_TILE), "cuda")
    # An operation of XLA's brings its decoded form along.
    assert next(name for name in forms if name in text) == form
    assert told.asked


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the kernel takes JAX 0.12")
def test_kernel_where_integers_have_64_bits():
    with jax.enable_x64(True), compiling_for((9, 0)):
        assert "mosaic_gpu" in lowered((DEEP, DEEP_TILE), "cuda")


def test_blocks_of_128_elsewhere():
    for platform in ("cpu", "tpu"):
        text = lowered((DEEP, DEEP_TILE), platform)
        assert "stablehlo.dot_general" in text
        assert "custom_call" not in text


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the kernel takes JAX 0.12")
def test_kernel_is_divided_by_hand_only(mesh: jax.sharding.Mesh):
    """A partitioner cannot divide the kernel; inside `shard_map` there is nothing to divide."""
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    with compiling_for((9, 0)):
        assert "mosaic_gpu" not in lowered((DEEP, DEEP), "cuda", out_shardings=whole)

    # Elements and scales are divided, and the scale of the whole is not.
    parts: Any = (jax.P("data"), jax.P("data"), jax.P())
    specs = Blocks(*parts)
    func = jax.shard_map(
        functools.partial(product, ways=(DEEP, DEEP)),
        mesh=mesh,
        in_specs=(specs, specs),
        out_specs=jax.P("data"),
    )
    with compiling_for((9, 0)):
        traced = jax.jit(func).trace(*factors(DEEP, DEEP, batch=mesh.size))
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_several_devices_multiply_decoded_factors(mesh: jax.sharding.Mesh):
    """XLA's partitioner fails on the operation. Here, it is not known which GPUs they are."""
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    assert "scaled_dot" not in lowered((MX, MX), "cuda", out_shardings=whole)


def test_formats_without_units():
    assert blocks.has_units(MX, WIDE)
    assert blocks.has_units(FP4, TILE)
    assert blocks.has_units(DEEP, DEEP_TILE)
    assert not blocks.has_units(DEEP, MX)
    assert not blocks.has_units(FP4_WIDE, FP4_WIDE)
    assert not blocks.has_units(MX, None)


def test_scales_that_are_powers_of_two_take_one_byte():
    first, _ = factors(MX, MX)
    assert first.scale.dtype == jnp.float8_e8m0fnu
    bad = write_blocks(jnp.full((1, 2, 32), jnp.nan), MX)
    assert np.isnan(np.asarray(read_blocks(bad, MX, length=32), np.float32)).all()
