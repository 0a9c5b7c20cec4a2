"""Products of experts in blocks: the numbers, against float64 and against a product per group."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import halfstep
from halfstep._autocast.f8.blocks import Form
from halfstep._autocast.f8.experts import Groups
from halfstep.kernels._target import compiling_for
from halfstep.quant._scaled import Blocks, read_blocks, write_blocks

MX = halfstep.Factor(element="e4m3", per="block", size=32)
FP4 = halfstep.Factor(element="e2m1", per="block", size=16, two_level=True)
TILE = halfstep.Factor(element="e2m1", per="tile", size=16, two_level=True)
DEEP = halfstep.Factor(element="e4m3", per="block", size=128)
DEEP_TILE = halfstep.Factor(element="e4m3", per="tile", size=128)
PAIRS = [
    pytest.param((MX, MX), id="mxfp8"),
    pytest.param((FP4, TILE), id="nvfp4"),
    pytest.param((DEEP, DEEP_TILE), id="f8-block"),
]
ROWS, GROUPS, WIDTH, HIDDEN = 700, 4, 80, 48
SIZES = {
    "uneven": (300, 137, 1, 262),
    "empty": (0, 416, 0, 284),
    "aligned": (128, 256, 64, 252),
    "one": (0, 0, 700, 0),
    "rows of no group": (100, 0, 33, 250),
    "none": (0, 0, 0, 0),
    "too many": (400, 200, 200, 100),
}
EPS = float(np.finfo(np.float32).eps) / 2


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def parts(sizes: tuple[int, ...], rows: int = ROWS) -> list[slice]:
    ends = [min(end, rows) for end in np.cumsum(sizes)]
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def read(array: Blocks, factor: halfstep.Factor, length: int) -> np.ndarray:
    return np.asarray(read_blocks(array, factor, length=length, dtype=jnp.float32), np.float64)


FORM = Form(np.dtype(jnp.bfloat16), np.dtype(np.float32), "native", "rounded")


def multiply(first: Blocks, second: Blocks, sizes: Any, *, ways: Any, over_rows: bool) -> jax.Array:
    groups = Groups(sizes, ROWS)
    return groups.multiply(first, second, *ways, over_rows=over_rows, form=FORM)


def on_one_device(func: Any, mesh: jax.sharding.Mesh) -> Any:
    del mesh
    return jax.jit(func)


def on_several(func: Any, mesh: jax.sharding.Mesh) -> Any:
    """Where the compiler divides the program, blocks are decoded for `ragged_dot`."""
    return jax.jit(func, out_shardings=NamedSharding(mesh, P()))


# One program for all sizes.
HOW = [pytest.param(on_one_device, id="tiles"), pytest.param(on_several, id="decoded")]


@pytest.mark.rows(4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ways", PAIRS)
def test_rows_by_the_matrices_of_their_groups(ways: Any, how: Any, mesh: jax.sharding.Mesh):
    # Magnitudes far apart, so that a scale in the wrong place is seen.
    x = normal(0, 1, ROWS, WIDTH) * jnp.exp2(jnp.arange(-20.0, ROWS - 20) % 40 - 20)[None, :, None]
    first = write_blocks(x, ways[0])
    second = write_blocks(normal(1, GROUPS, HIDDEN, WIDTH), ways[1])
    func = how(functools.partial(multiply, ways=ways, over_rows=False), mesh)
    (left,), right = read(first, ways[0], WIDTH), read(second, ways[1], WIDTH)
    for name, sizes in SIZES.items():
        made = np.asarray(func(first, second, jnp.asarray(sizes)), np.float64)
        expected, most = np.zeros((2, ROWS, HIDDEN))
        for group, rows in enumerate(parts(sizes)):
            expected[rows] = left[rows] @ right[group].T
            most[rows] = abs(left[rows]) @ abs(right[group]).T
        # Of a sum of n terms in any order: n roundings of at most the sum of magnitudes.
        assert (abs(made - expected) <= WIDTH * EPS * most).all(), name


@pytest.mark.rows(2)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ways", PAIRS)
def test_sums_over_the_rows_of_each_group(ways: Any, how: Any, mesh: jax.sharding.Mesh):
    ways = (ways[0], dataclasses.replace(ways[1], per="block"))
    func = how(functools.partial(multiply, ways=ways, over_rows=True), mesh)
    for name, sizes in SIZES.items():
        groups = Groups(jnp.asarray(sizes), ROWS)
        # Rows of no group do not matter, whatever they are.
        first, second = (
            write_blocks(
                groups.spread(normal(seed, ROWS, width).at[sum(sizes) :].set(jnp.nan), ways).T[
                    None
                ],
                ways[seed],
            )
            for seed, width in enumerate((WIDTH, HIDDEN))
        )
        made = np.asarray(func(first, second, groups.sizes), np.float64)
        length = first.elements.shape[2] * first.elements.shape[3]
        left, right = (
            np.asarray(groups.gathered(jnp.asarray(read(array, way, length)[0]).T, ways, axis=0))
            for array, way in ((first, ways[0]), (second, ways[1]))
        )
        assert made.shape == (GROUPS, WIDTH, HIDDEN)
        for group, rows in enumerate(parts(sizes)):
            a, b = (value[rows].astype(np.float64) for value in (left, right))
            bound = ROWS * EPS * (abs(a).T @ abs(b))
            assert (abs(made[group] - a.T @ b) <= bound).all(), name


@pytest.mark.parametrize("axis", [0, 1])
def test_no_block_spans_two_groups(axis: int):
    value = jnp.moveaxis(1 + jnp.arange(2.0 * ROWS).reshape(ROWS, 2), 0, axis)
    for sizes in SIZES.values():
        groups = Groups(jnp.asarray(sizes), ROWS)
        found = groups.spread(value, (MX, MX), axis=axis)
        assert found.shape == groups.shape(value.shape, (MX, MX), axis=axis)
        back = groups.gathered(found, (MX, MX), axis=axis)
        expected = np.moveaxis(np.array(value), axis, 0)
        expected[sum(sizes) :] = 0
        assert np.array_equal(np.moveaxis(np.asarray(back), axis, 0), expected)
        owner = np.repeat(np.arange(GROUPS), [part.stop - part.start for part in parts(sizes)])
        for block in np.moveaxis(np.asarray(found), axis, 0).reshape(-1, 32, 2):
            rows = ((block[:, 0] - 1) / 2)[block[:, 0] > 0].astype(int)
            assert len(set(owner[rows])) <= 1


# In a transformed function.


def experts(w: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, w, sizes)


def gradients(func: Any, policy: Any) -> Any:
    """The result, and the gradients of a sum of it that is weighted with what is given."""

    def loss(w: Any, x: Any, sizes: Any, given: Any) -> Any:
        made = func(w, x, sizes)
        return jnp.sum(made.astype(jnp.float32) * given), made

    low = halfstep.autocast(loss, policy)

    def run(w: Any, x: Any, sizes: Any, given: Any) -> Any:
        pulled, (_, made) = (
            jax.grad(low, (0, 1), has_aux=True)(w, x, sizes, given),
            low(w, x, sizes, given),
        )
        return made, *pulled[0]

    return run


W, X = normal(0, GROUPS, 96, 64), normal(1, 200, 96)
GIVEN = normal(2, 200, 64).astype(jnp.bfloat16).astype(jnp.float32)


@pytest.mark.rows(1)
@pytest.mark.parametrize("policy", ["mxfp8", "f8-block"])
def test_like_a_product_for_each_group(policy: str):
    """The same encodings: only the order of sums differs, and float32 is rounded to bfloat16."""
    whole = jax.jit(gradients(experts, policy))
    alone = jax.jit(gradients(lambda w, x, sizes: x @ w, policy))
    for sizes in ((61, 0, 89, 50), (10, 33, 0, 7), (0, 0, 0, 200)):
        made, dw, dx = whole(W, X, jnp.asarray(sizes), GIVEN)
        assert {value.dtype for value in (made, dw, dx)} == {jnp.dtype(jnp.float32)}
        for group, rows in enumerate(parts(sizes, 200)):
            inside = ((jnp.arange(200) >= rows.start) & (jnp.arange(200) < rows.stop))[:, None]
            # The rows of the group come first: blocks along rows begin with its first row.
            x, given = (jnp.roll(jnp.where(inside, v, 0.0), -rows.start, 0) for v in (X, GIVEN))
            expected = alone(W[group], x, None, given)
            count = rows.stop - rows.start
            found = (made[rows], dw[group], dx[rows])
            for got, want in zip(
                found, (expected[0][:count], expected[1], expected[2][:count]), strict=True
            ):
                most = float(abs(want).max(initial=0))
                np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=2.0**-16 * most)
        assert not made[sum(sizes) :].any()
        assert not dx[sum(sizes) :].any()


def test_matrices_that_are_transposed():
    """`ragged_dot_general` with dimensions in another order."""
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (2,)), ((), ())), [1], [1])

    def general(w: Any, x: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot_general(x.T, w.transpose(2, 0, 1), sizes, numbers)

    sizes = jnp.asarray((61, 0, 89, 50))
    found, expected = (
        jax.jit(gradients(func, "mxfp8"))(W, X, sizes, GIVEN) for func in (general, experts)
    )
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_of_gradients(dtype: Any):
    w, x = W.astype(dtype), X.astype(dtype)
    found = jax.eval_shape(gradients(experts, "mxfp8"), w, x, jnp.asarray((61, 0, 89, 50)), GIVEN)
    assert [value.dtype for value in found[1:]] == [dtype, dtype]


def test_what_is_not_finite_stays_in_its_group():
    sizes, given = jnp.asarray((64, 50, 0, 36)), jnp.ones((200, 64))
    # A row of the second group, and a row of none.
    bad = X.at[70, 3].set(jnp.inf).at[180].set(jnp.nan)
    run = jax.jit(gradients(experts, "mxfp8"))
    made, dw, dx = run(W, bad, sizes, given.at[170].set(jnp.nan))
    assert not np.isfinite(made[70]).any()
    assert np.isfinite(np.delete(np.asarray(made), 70, axis=0)).all()
    assert np.array_equal(np.isfinite(dw).all(axis=(1, 2)), [True, False, True, True])
    assert np.isfinite(dx).all()
    assert not dx[150:].any()
    assert not made[150:].any()


AXES = [(None, 0, None), (0, 0, 0), (0, None, None), (None, None, 0), (0, 0, None)]


@pytest.mark.rows(2)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_mapped(axes: tuple[int | None, ...]):
    """JAX itself maps a `ragged_dot` only if all of its operands are mapped."""

    def loss(w: Any, x: Any, sizes: Any) -> Any:
        return jnp.sum(jnp.tanh(experts(w, x, sizes)))

    given = [W, X, jnp.asarray((61, 0, 89, 50))]
    others = [W[::-1], X[::-1], jnp.asarray((0, 61, 50, 89))]
    pairs = zip(given, others, axes, strict=True)
    stacked = [a if axis is None else jnp.stack([a, b]) for a, b, axis in pairs]
    func = jax.grad(halfstep.autocast(loss, "mxfp8"), argnums=(0, 1))
    mapped = jax.jit(jax.vmap(func, in_axes=axes))(*stacked)
    for place in (0, 1):
        one = [a if axis is None else a[place] for a, axis in zip(stacked, axes, strict=True)]
        for got, want in zip(mapped, jax.jit(func)(*one), strict=True):
            np.testing.assert_allclose(got[place], want, rtol=2.0**-7, atol=2.0**-12)


def test_mapped_twice_on_several_devices(mesh: jax.sharding.Mesh):
    first = write_blocks(normal(0, 6, ROWS, WIDTH), MX)
    first = jax.tree.map(
        lambda leaf: leaf.reshape(2, 3, 1, *leaf.shape[1:]), first._replace(outer=jnp.ones(6))
    )
    first = first._replace(outer=jnp.ones((2, 3)))
    second = write_blocks(normal(1, GROUPS, HIDDEN, WIDTH), MX)
    sizes = jnp.asarray([SIZES["uneven"], SIZES["empty"]])
    func = functools.partial(multiply, ways=(MX, MX), over_rows=False)
    twice = jax.vmap(jax.vmap(func, in_axes=(0, None, None)), in_axes=(0, None, 0))
    made = [how(twice, mesh)(first, second, sizes) for how in (on_one_device, on_several)]
    assert made[0].shape == (2, 3, ROWS, HIDDEN)
    np.testing.assert_allclose(*made, rtol=0, atol=WIDTH * EPS * float(abs(made[0]).max()))
    one = jax.tree.map(lambda leaf: leaf[1, 2], first)
    np.testing.assert_array_equal(made[0][1, 2], jax.jit(func)(one, second, sizes[1]))


def layers(w: Any, x: Any, sizes: Any, *, remat: bool) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(experts(w, x, sizes)), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, w)[0])


def test_scanned_and_rematerialized():
    w, sizes = normal(0, 3, GROUPS, 96, 96) / 10, jnp.asarray((61, 0, 89, 50))

    def unrolled(w: Any, x: Any) -> Any:
        for matrices in w:
            x = jnp.tanh(experts(matrices, x, sizes))
        return jnp.sum(x)

    expected = jax.jit(jax.grad(halfstep.autocast(unrolled, "mxfp8")))(w, X)
    for remat in (False, True):
        loss = functools.partial(layers, sizes=sizes, remat=remat)
        found = jax.jit(jax.grad(halfstep.autocast(loss, "mxfp8")))(w, X)
        # Sums of bfloat16 in another order.
        np.testing.assert_allclose(found, expected, atol=2.0**-7 * float(abs(expected).max()))


@pytest.mark.parametrize("sizes", [(61, 0, 89, 50), (10, 33, 0, 7)])
def test_forward_derivatives(sizes: tuple[int, ...]):
    w, x = abs(W), abs(X)
    func = functools.partial(experts, sizes=jnp.asarray(sizes))
    low = halfstep.autocast(func, "mxfp8")
    for moving in ((0,), (1,), (0, 1)):
        tangents = [v if place in moving else jnp.zeros_like(v) for place, v in enumerate((w, x))]
        found, expected = (
            jax.jit(lambda *t, f=f: jax.jvp(f, (w, x), t)[1])(*tangents) for f in (low, func)
        )
        # Nothing cancels: the relative error of two factors in e4m3, on average.
        used = sum(sizes)
        assert not found[used:].any()
        assert abs(jnp.mean(found[:used] / expected[:used]) - 1) < 2.0**-4


# With state.


def stepped(policy: str, x: Any, given: Any, sizes: Any, seed: int = 0) -> Any:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(experts(w["first"], jnp.tanh(x), sizes) * given) + 0 * jnp.sum(w["other"])

    params = {"first": W, "other": jnp.ones(())}
    state = halfstep.RECIPES[policy].init(loss, params, x, key=jax.random.key(seed))
    gradient = halfstep.filter_grad(loss, state, policy=policy)
    state, _, grads = jax.jit(gradient)(params, x)
    (site,) = state.sites.values()
    return grads["first"], site.seen


def test_random_rounding_and_rotation():
    sizes, given = (61, 0, 60, 50), normal(2, 200, 64)
    (found, _), (again, _), (other, _) = (
        stepped("nvfp4", X.at[171:].set(jnp.nan), given, jnp.asarray(sizes), seed)
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(found, again)
    assert (found[0] != other[0]).any()
    x = jnp.tanh(X)
    for group, rows in enumerate(parts(sizes, 200)):
        exact = np.asarray(x[rows].T @ given[rows]).ravel()
        got = np.asarray(found[group]).ravel()
        if not exact.size or not exact.any():
            assert not got.any()
            continue
        # Two factors of 4 bits: neighboring numbers are at most 1/2 apart, relative to the smaller.
        # The error of one is at most 1/4 of it when rounded to the nearest, and 1/2 at random.
        assert exact @ got / np.sqrt((exact @ exact) * (got @ got)) > 1 - (1 / 4**2 + 1 / 2**2) / 2


def test_fractions_are_of_the_rows_themselves():
    """Zeros between groups are not counted, neither as lost nor among all."""
    sizes = jnp.asarray((34, 0, 100, 66))
    rows = jnp.where(jnp.arange(200) % 2, 1.0, 2.0**-20)[:, None]
    _, seen = stepped("mxfp8", X, jnp.broadcast_to(rows, (200, 64)), sizes)
    # Of the gradient, every other row vanishes next to the row after it, as blocks along rows.
    np.testing.assert_array_equal(seen[2], [1, 0, 0.5])
    _, seen = stepped("mxfp8", X, jnp.ones((200, 64)), sizes)
    np.testing.assert_array_equal(seen[2], [1, 0, 0])


# For each platform.


def lowered(platform: str, over_rows: bool, **options: Any) -> str:
    groups = Groups(jnp.asarray(SIZES["uneven"]), ROWS)
    ways = (MX, MX)
    if over_rows:
        factors = [write_blocks(groups.spread(normal(0, ROWS, 64), ways).T[None], MX)] * 2
    else:
        factors = [
            write_blocks(normal(seed, *shape), MX)
            for seed, shape in enumerate(((1, ROWS, 64), (GROUPS, 32, 64)))
        ]
    func = functools.partial(multiply, ways=ways, over_rows=over_rows)
    traced = jax.jit(func, **options).trace(*factors, groups.sizes)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("over_rows", [False, True])
def test_each_platform_has_its_form(over_rows: bool, mesh: jax.sharding.Mesh):
    assert 'composite "xla.scaled_dot"' in lowered("cuda", over_rows)
    assert "ragged_dot" not in lowered("cuda", over_rows)
    assert "ragged_dot" not in lowered("cpu", over_rows)
    assert "ragged_dot" in lowered("tpu", over_rows)
    # A compiler that divides the program is given decoded factors.
    several = lowered("cuda", over_rows, out_shardings=NamedSharding(mesh, P()))
    assert "ragged_dot" in several
    assert "scaled_dot" not in several


def test_every_device_has_its_own_experts(mesh: jax.sharding.Mesh):
    """Inside `shard_map`, each device multiplies its rows by the units that it has."""
    sizes = jnp.asarray([[25, 25, 0, 0], [0, 40, 3, 2], [50, 0, 0, 0], [1, 2, 3, 4]])

    def loss(w: Any, x: Any) -> Any:
        def on_device(w: Any, x: Any, sizes: Any) -> Any:
            return jax.lax.psum(jnp.sum(jnp.tanh(experts(w, x, sizes[0]))), "data")

        specs = (P(), P("data"), P("data"))
        return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P())(w, x, sizes)

    def whole(w: Any, x: Any) -> Any:
        both = zip(jnp.split(x, 4), sizes, strict=True)
        return sum(jnp.sum(jnp.tanh(experts(w, part, size))) for part, size in both)

    found, expected = (
        jax.jit(jax.grad(halfstep.autocast(f, "mxfp8"), argnums=(0, 1)))(W, X)
        for f in (loss, whole)
    )
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2.0**-6, atol=2.0**-7 * float(abs(want).max()))
    with compiling_for((10, 0)):
        traced = jax.jit(jax.grad(halfstep.autocast(loss, "mxfp8"), argnums=(0, 1))).trace(W, X)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__op$block_scaled_dot") == 3
    assert "ragged_dot" not in text
