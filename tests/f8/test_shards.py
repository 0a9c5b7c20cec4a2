"""Products of blocks over several devices: how they are divided, and the numbers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import halfstep
from halfstep._autocast.f8 import shards
from halfstep._base import answer_partitioner
from halfstep.quant._scaled import decoded, write_blocks

MESH = AbstractMesh((2, 4), ("x", "y"))
MX = halfstep.Factor(element="e4m3", per="block", size=32)
FP4 = halfstep.Factor(element="e2m1", per="block", size=16, two_level=True)
SIZES = (1, 64, 128, 32)


def specs(first: P, second: P, out: P, sizes: tuple[int, ...] = SIZES) -> tuple[P, P, P]:
    return shards.divide(MESH, first, second, out, sizes).specs


NO = P(None, None, None)


def test_weights_of_fsdp_are_gathered():
    rows = P(None, "y", None)
    for weight in (P(None, None, "y"), P(None, "y", None)):
        assert specs(rows, weight, rows) == (rows, NO, rows)


def test_both_factors_divided_along_the_sum_are_multiplied_where_they_are():
    cut = P(None, None, "y")
    assert specs(cut, cut, NO) == (cut, cut, NO)
    # The gradient of weights that are divided: each device gets the sum of its part.
    for parts, dimension in ((P(None, "y", None), 1), (P(None, None, "y"), 2)):
        found = shards.divide(MESH, cut, cut, parts, SIZES)
        assert found.specs == (cut, cut, parts)
        assert found.scattered == dimension


def test_one_factor_divided_along_the_sum():
    cut = P(None, None, "y")
    assert specs(cut, NO, NO) == (cut, cut, NO)
    assert specs(NO, cut, NO) == (cut, cut, NO)


def test_two_axes():
    assert specs(P(None, "x", "y"), P(None, None, "y"), P(None, "x", None)) == (
        P(None, "x", "y"),
        P(None, None, "y"),
        P(None, "x", None),
    )
    assert specs(P(None, "x", None), P(None, "y", "x"), P(None, "x", "y")) == (
        P(None, "x", None),
        P(None, "y", None),
        P(None, "x", "y"),
    )
    assert (
        specs(P(("x", "y"), None, None), NO, NO, (8, 64, 128, 32))
        == (P(("x", "y"), None, None),) * 3
    )


@pytest.mark.parametrize(
    ("blocks", "expected"), [(8, ("x", "y")), (2, ("x",)), (6, ("x",)), (3, None)]
)
def test_blocks_are_never_cut(blocks: int, expected: tuple[str, ...] | None):
    cut = P(None, None, ("x", "y"))
    left, right, _ = specs(cut, cut, NO, (1, 64, 128, blocks))
    assert left == right == P(None, None, expected)


def test_a_mesh_is_refined():
    assert shards.refined((8,)) == shards.refined((2, 4)) == (2, 2, 2)
    assert shards.refined((6, 1, 4)) == (2, 3, 2, 2)


def test_which_products_are_known():
    def avals(first: str, second: str, scale: str, size: int, length: int = 128) -> list[Any]:
        return [
            ShapedArray((1, 16, length // part), jnp.dtype(dtype))
            for dtype, part in ((first, 1), (scale, size), (second, 1), (scale, size))
        ]

    e8 = "float8_e8m0fnu"
    assert shards.is_known(avals("float8_e4m3fn", "float8_e5m2", e8, 32))
    assert shards.is_known(avals("float4_e2m1fn", "float4_e2m1fn", "float8_e4m3fn", 16))
    assert not shards.is_known(avals("float8_e5m2", "float8_e5m2", e8, 32))
    assert not shards.is_known(avals("float8_e4m3fn", "float8_e4m3fn", e8, 128))
    assert not shards.is_known(avals("float4_e2m1fn", "float4_e2m1fn", e8, 32))
    assert not shards.is_known(avals("float8_e4m3fn", "float8_e4m3fn", e8, 32, 0))


# Numbers, on the devices of a CPU. The product of one device is decoded there.


class Decoded:
    """Stands in for the operation, which only GPUs have."""

    def bind(self, *operands: jax.Array, out: np.dtype) -> jax.Array:
        left, right = (
            decoded(e.reshape(*s.shape, -1), s, np.dtype(jnp.float32)).reshape(e.shape)
            for e, s in (operands[:2], operands[2:])
        )
        return jnp.einsum("bmk,bnk->bmn", left, right, preferred_element_type=out)


def operands(factor: halfstep.Factor, batch: int) -> list[jax.Array]:
    """Elements and scales of small integers, times powers of two: sums of these are exact."""
    keys = jax.random.split(jax.random.key(0), 4)
    made = []
    for number, rows in enumerate((16, 32)):
        shape = (batch, rows, 256 // factor.size, factor.size)
        values = jax.random.choice(keys[number], jnp.array([-4.0, -3, -1, 0, 1, 2, 3, 4, 6]), shape)
        values = values.at[..., 0].set(6)
        powers = jnp.exp2(jax.random.randint(keys[2 + number], shape[:3], 0, 3))
        value = (values * powers[..., None]).reshape(batch, rows, 256)
        blocks = write_blocks(value, factor)
        read = decoded(blocks.elements, blocks.scale.astype(jnp.float32) * blocks.outer, np.float32)
        assert np.array_equal(read.reshape(value.shape), value)
        made += [blocks.elements.reshape(value.shape), blocks.scale]
    return made


CASES = [
    pytest.param(P(None, "x"), NO, P(None, "x"), id="rows"),
    pytest.param(P(None, "x"), P(None, None, "x"), P(None, "x"), id="gathered"),
    pytest.param(NO, P(None, "x"), P(None, None, "x"), id="columns"),
    pytest.param(P("x"), P("x"), P("x"), id="batch"),
    pytest.param(P(None, None, "x"), P(None, None, "x"), NO, id="sum"),
    pytest.param(P(None, None, "x"), P(None, None, "x"), P(None, "x"), id="sum, rows"),
    pytest.param(P(None, None, "x"), P(None, None, "x"), P(None, None, "x"), id="sum, columns"),
    pytest.param(P(None, "y", "x"), P(None, None, "x"), P(None, ("y", "x")), id="two axes"),
]


@pytest.mark.rows(5)
@pytest.mark.parametrize("factor", [MX, FP4], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize(("first", "second", "out"), CASES)
def test_numbers_are_those_of_one_device(
    first: P, second: P, out: P, factor: halfstep.Factor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shards, "product", Decoded())
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    given = operands(factor, batch=2)
    expected = Decoded().bind(*given, out=np.dtype(np.float32))
    full = [P(*spec, *[None] * (3 - len(spec))) for spec in (first, first, second, second, out)]
    shapes = [
        jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, spec))
        for v, spec in zip([*given, expected], full, strict=True)
    ]
    _, on_device, made, parts = shards.partition("float32", mesh, shapes[:4], shapes[4])
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(part.spec for part in parts),
        out_specs=made.spec,
        check_vma=False,
    )
    found = jax.jit(run)(*given)
    assert np.array_equal(found, expected)


def test_an_answer_is_kept_as_long_as_something_refers_to_it():
    answer = functools.partial(answer_partitioner, "halfstep_test", shards.mesh_of((2, 2)))
    first = answer(lambda *_: None, 4)
    assert first is not None
    assert answer(lambda *_: None, 4) is first
