"""Groups divide any axis, of any shape, and never lie on two devices."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep.quant import Groups, groups_for
from halfstep.quant._groups import groups_between

SHAPES = [(1,), (32,), (33,), (64, 3), (5, 40), (2, 65, 3), (3, 1, 2, 7)]


def cases() -> list[tuple[tuple[int, ...], Groups]]:
    """Every axis of every shape, in groups of a few sizes."""
    pairs = itertools.product(SHAPES, (3, 32))
    return [(s, Groups(a, size)) for s, size in pairs for a in range(-len(s), 0)]


@pytest.mark.parametrize(("shape", "groups"), cases())
def test_divided_and_whole_again(shape: tuple[int, ...], groups: Groups):
    value = np.arange(1, np.prod(shape) + 1, dtype=np.int32).reshape(shape)
    divided = np.asarray(groups.divided(jnp.asarray(value)))
    axis = len(shape) + groups.axis
    count = -(-shape[axis] // groups.size)
    assert divided.shape == (*shape[:axis], count, groups.size, *shape[axis + 1 :])
    assert groups.scale_shape(shape) == (*shape[:axis], count, *shape[axis + 1 :])
    # Element by element: number i of the axis is number i % size of group i // size.
    moved = np.moveaxis(value, axis, 0)
    found = np.moveaxis(divided, (axis, axis + 1), (0, 1))
    for i in range(count * groups.size):
        wanted = moved[i] if i < shape[axis] else np.zeros_like(moved[0])
        assert (found[i // groups.size, i % groups.size] == wanted).all()
    assert (np.asarray(groups.whole(jnp.asarray(divided), shape)) == value).all()
    scale = jnp.ones(groups.scale_shape(shape))
    assert groups.aligned(scale).shape == (
        *divided.shape[: axis + 1],
        1,
        *divided.shape[axis + 2 :],
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_the_groups_are_known_from_the_scales(shape: tuple[int, ...]):
    for axis in range(-len(shape), 0):
        scales = Groups(axis).scale_shape(shape)
        if scales != shape:
            assert groups_between(shape, scales) == Groups(axis)
    # Axes of one element have as many groups as elements: no scales, or no axis, could be told.
    assert groups_between(shape, shape) is None
    assert groups_between(shape, (*shape, 2)) is None


@pytest.mark.parametrize(
    ("shape", "shards", "axis"),
    [
        ((128, 64), (), -2),
        ((128, 64), (4, 1), -2),
        ((64, 64), (4, 1), -1),
        ((64, 40), (4, 1), -1),
        ((64, 20), (4, 1), None),
        ((5, 4096), (), -1),
        ((40, 5), (), -2),
        ((33, 64), (), -1),
        ((3, 3, 64, 128), (), -2),
        ((4096, 3, 5), (), -3),
        ((100,), (), -1),
        ((100,), (4,), None),
        ((128,), (4,), -1),
        ((20,), (), None),
        ((32,), (), -1),
        ((), (), None),
        ((0, 64), (), None),
        ((64, 0), (), None),
    ],
)
def test_which_axis_is_divided(shape: tuple[int, ...], shards: tuple[int, ...], axis: int | None):
    assert groups_for(shape, shards=shards) == (None if axis is None else Groups(axis))


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """A shape, into how many parts each axis is divided, and the size of a group."""
    rank = draw(st.integers(1, 4))
    shards = tuple(draw(st.sampled_from([1, 1, 2, 3, 4, 8])) for _ in range(rank))
    shape = tuple(part * draw(st.integers(0, 130)) for part in shards)
    return shape, shards, draw(st.sampled_from([2, 32, 128]))


@hypothesis.settings(max_examples=500, deadline=None)
@hypothesis.given(sharded())
def test_no_group_lies_on_two_devices(case: tuple[tuple[int, ...], tuple[int, ...], int]):
    shape, shards, size = case
    groups = groups_for(shape, shards=shards, size=size)
    if groups is None:
        # Only where every axis would have groups on two devices, or is within one group.
        for length, parts in zip(shape, shards, strict=True):
            assert 0 in shape or length % (size * parts) or length == 0
            assert 0 in shape or parts > 1 or length <= size
        return
    axis = len(shape) + groups.axis
    length = shape[axis] // shards[axis]
    device = np.arange(shape[axis]) // length
    group = np.arange(shape[axis]) // groups.size
    for number in range(groups.count(shape)):
        assert np.unique(device[group == number]).size == 1
    # The scales are divided into as many equal parts.
    assert groups.scale_shape(shape)[axis] % shards[axis] == 0
    if size == 32:
        assert groups_between(shape, groups.scale_shape(shape)) == groups
