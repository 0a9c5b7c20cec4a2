"""A step in float64, from the definition of every code, and how far float32 may be from it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfstep.kernels.flash_update import Leaf, Scalars, Spec
from halfstep.kernels.flash_update._rule import noise
from halfstep.quant import Groups, groups_for

EPS = float(np.finfo(np.float32).eps)


def make(
    shape: tuple[int, ...],
    *,
    algorithm: str = "adam",
    param: Any = jnp.bfloat16,
    low: Any = jnp.int8,
    scale: Any = jnp.bfloat16,
    grad: Any = jnp.bfloat16,
    axis: int | None = None,
    seed: int = 0,
    bits: int = 8,
) -> tuple[Leaf, Any, Groups]:
    """A leaf in the middle of training, its gradient, and its groups."""
    draw = np.random.default_rng(seed)
    groups = groups_for(shape) if axis is None else Groups(axis)
    assert groups is not None
    many = groups.scale_shape(shape)

    def moment(dtype: Any, smallest: int, largest: int) -> tuple[Any, Any]:
        many_codes = shape if bits == 8 else _full(shape, groups)
        codes = draw.integers(smallest, largest, many_codes, endpoint=True)
        if bits == 4:
            inside = np.zeros(many_codes, bool)
            inside[tuple(map(slice, shape))] = True
            # A state starts with zeros, and no gradient ever reaches the padding of a last group.
            codes = np.where(inside, codes, int(smallest > 0)).reshape(_grouped(shape, groups))
            halves = np.split(codes, 2, len(shape) + groups.axis + 1)
            codes = ((halves[0] & 15) | (halves[1] & 15) << 4).reshape(_stored(shape, groups))
            dtype = np.uint8
        scales = 1e-3 * draw.uniform(0.5, 2, many)
        return jnp.asarray(codes, dtype), jnp.asarray(scales.astype(scale))

    rest = None
    if low is not None:
        some = np.iinfo(low)
        rest = jnp.asarray(draw.integers(some.min, some.max, shape, endpoint=True), low)
    value = jnp.asarray(draw.normal(size=shape).astype(param))
    has_first, has_second = algorithm != "sgd without momentum", algorithm == "adam"
    most = (127, 255) if bits == 8 else (7, 15)
    first = moment(jnp.int8, -most[0], most[0]) if has_first else (None, None)
    second = moment(jnp.uint8, 1, most[1]) if has_second else (None, None)
    gradient = jnp.asarray((1e-3 * draw.normal(size=shape)).astype(grad))
    return Leaf(value, rest, *first, *second), gradient, groups


def _full(shape: tuple[int, ...], groups: Groups) -> tuple[int, ...]:
    """With a last group that is full."""
    dims = list(shape)
    dims[groups.axis] = groups.count(shape) * groups.size
    return tuple(dims)


def _grouped(shape: tuple[int, ...], groups: Groups) -> tuple[int, ...]:
    axis = len(shape) + groups.axis
    return (*shape[:axis], groups.count(shape), groups.size, *shape[axis + 1 :])


def _stored(shape: tuple[int, ...], groups: Groups) -> tuple[int, ...]:
    dims = list(_full(shape, groups))
    dims[groups.axis] //= 2
    return tuple(dims)


def _codes(array: Any, bits: int, shape: tuple[int, ...], groups: Groups, *, signed: bool) -> Any:
    """One code for each element."""
    if bits == 8:
        return np.asarray(array)
    axis = len(shape) + groups.axis + 1
    dims = list(_grouped(shape, groups))
    dims[axis] //= 2
    both = np.asarray(array).astype(np.int32).reshape(dims)
    codes = np.concatenate([both & 15, both >> 4], axis)
    codes = np.where(codes > 7, codes - 16, codes) if signed else codes
    return codes.reshape(_full(shape, groups))[tuple(map(slice, shape))]


def scalars(keep: float = 1.0) -> Scalars:
    return Scalars(*(jnp.float32(x) for x in (1e-3, 0.9, 0.99, 1e-8, 0.1, 1.5, 1.2, keep, 12345)))


@dataclasses.dataclass
class _Exact:
    value: Any
    error: Any
    """What float32 arithmetic may be away from it."""


def check(old: Leaf, new: Leaf, grad: Any, by: Scalars, spec: Spec) -> None:
    """Assert that a step is the one of float64, and its codes the nearest but for ties.

    A code may be the neighbor of the nearest one where its position is within the error of float32
    arithmetic of the middle between both. Half a unit of rounding (`EPS / 2`) is counted for each
    operation: nine between stored codes and the position of a first moment, whose operands may
    cancel; eight up to that of a second one, where nothing cancels.
    """
    groups, shape = spec.groups, old.param.shape
    f = Scalars(*(float(x) for x in by))
    value = _joined(old)
    g = np.asarray(grad).astype(np.float64)
    first = second = None
    if old.first is not None:
        code = _codes(old.first, spec.first.bits, shape, groups, signed=True).astype(np.float64)
        at = _spread(old.first_scale, groups, shape)
        first = at * code / (2 * spec.first.limit - abs(code))
    if old.second is not None:
        at = _spread(old.second_scale, groups, shape)
        code = _codes(old.second, spec.second.bits, shape, groups, signed=False)
        second = (code.astype(np.float64) * at / spec.second.limit) ** 2
    step, moment, root = _rule(first, second, g, f, spec)
    exact = value - f.rate * (step.value + f.decay * value)
    # Three roundings of what is subtracted, which may cancel the value, and that of the difference.
    error = step.error + 2 * EPS * (abs(step.value) + abs(f.decay * value))
    error = f.rate * error + EPS * abs(exact)
    stored = _joined(new)
    # Of 24 bits 8 are of the exponent and one is the sign: half of the last of 16 is 2**-16.
    half = EPS / 2 if old.param.dtype == jnp.float32 else 2.0**-8
    if old.low is not None:
        half = 0 if old.low.dtype == jnp.int16 else 2.0**-15 if spec.stochastic else 2.0**-16
    assert (abs(stored - exact) <= error + half * abs(exact)).all()
    if moment is not None:
        scale = _spread(new.first_scale, groups, shape)
        _check_scale(moment, new.first_scale, groups)
        limit = spec.first.limit
        place = 2 * limit * moment.value / (scale + abs(moment.value))
        error = 2 * limit * moment.error / scale + 2 * EPS * abs(place)
        codes = _codes(new.first, spec.first.bits, shape, groups, signed=True)
        drawn = _drawn(shape, groups, by.seed, 2) if spec.first.bits == 4 else None
        _check_codes(codes, place, error, drawn, limit, signed=True)
    if root is not None:
        scale = _spread(new.second_scale, groups, shape)
        _check_scale(root, new.second_scale, groups)
        place = root.value * spec.second.limit / scale
        drawn = None
        if spec.stochastic or spec.second.bits == 4:
            drawn = _drawn(shape, groups, by.seed, 1)
        codes = _codes(new.second, spec.second.bits, shape, groups, signed=False)
        _check_codes(codes, place, 5 * EPS * place, drawn, spec.second.limit, signed=False)


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def _drawn(shape: tuple[int, ...], groups: Groups, seed: Any, stream: int) -> Any:
    """The chances of the reference: they depend on where an element is, in groups that are full."""
    full = groups.divided(jnp.zeros(shape)).shape
    words = noise(full, seed, stream=stream) >> 8
    return groups.whole(words.astype(jnp.float32) * 2.0**-24, shape)


def _rule(first: Any, second: Any, g: Any, by: Scalars, spec: Spec) -> Any:
    if spec.algorithm == "adam":
        moment = by.b1 * first + (1 - by.b1) * g
        error = 5 * EPS * (abs(by.b1 * first) + abs((1 - by.b1) * g))
        root = np.sqrt(by.b2 * second + (1 - by.b2) * g * g)
        below = root * by.second_bias + by.eps
        step = moment * by.first_bias / below
        wrong = error * by.first_bias / below + 8 * EPS * abs(step)
        return _Exact(step, wrong), _Exact(moment, error), _Exact(root, 5 * EPS * root)
    if spec.algorithm == "lion":
        mixed = by.b1 * first + (1 - by.b1) * g
        unsure = abs(mixed) <= 5 * EPS * (abs(by.b1 * first) + abs((1 - by.b1) * g))
        moment = by.b2 * first + (1 - by.b2) * g
        error = 5 * EPS * (abs(by.b2 * first) + abs((1 - by.b2) * g))
        return _Exact(np.sign(mixed), 2 * unsure), _Exact(moment, error), None
    if first is None:
        return _Exact(g, 0 * g), None, None
    moment = by.b1 * first + g
    error = 5 * EPS * (abs(by.b1 * first) + abs(g))
    step = by.b1 * moment + g if spec.nesterov else moment
    return _Exact(step, 2 * error + 2 * EPS * abs(g)), _Exact(moment, error), None


def _joined(leaf: Leaf) -> np.ndarray:
    param = np.asarray(leaf.param)
    if leaf.low is None:
        return param.astype(np.float64)
    low = np.asarray(leaf.low, np.int32)
    word = (param.view(np.uint16).astype(np.int32) << 16) + (
        low << 8 if leaf.low.dtype == jnp.int8 else low
    )
    return word.view(np.float32).astype(np.float64)


def _spread(scale: Any, groups: Groups, shape: tuple[int, ...]) -> np.ndarray:
    axis = len(shape) + groups.axis
    wide = np.repeat(np.asarray(scale).astype(np.float64), groups.size, axis)
    return np.take(wide, range(shape[axis]), axis)


def _check_scale(exact: _Exact, scale: Any, groups: Groups) -> None:
    axis = exact.value.ndim + groups.axis
    starts = np.arange(0, exact.value.shape[axis], groups.size)
    largest = np.maximum.reduceat(abs(exact.value), starts, axis)
    error = np.maximum.reduceat(exact.error * np.ones_like(exact.value), starts, axis)
    stored = np.asarray(scale).astype(np.float64)
    # Rounded up, in bfloat16 by less than its epsilon; float32 scales are not rounded.
    up = 0 if scale.dtype == jnp.float32 else 2.0**-7
    assert (stored >= largest - error).all()
    assert (stored <= (largest + error) * (1 + up)).all()


def _check_codes(
    codes: Any, place: Any, error: Any, drawn: Any, limit: int, *, signed: bool
) -> None:
    got = np.asarray(codes, np.float64)
    if drawn is None:
        low, high = np.ceil(place - 0.5 - error), np.floor(place + 0.5 + error)
    else:
        chance = np.asarray(drawn, np.float64)
        chosen = functools.partial(_chosen_signed, limit=limit) if signed else _chosen
        low, high = chosen(place - error, chance, -1), chosen(place + error, chance, 1)
    smallest = -limit if signed else 1
    low, high = np.clip(low, smallest, limit), np.clip(high, smallest, limit)
    assert ((low <= got) & (got <= high)).all()
    # Ties are rare: a check that lets everything pass would show here.
    assert (low != high).mean() < 0.01


def _chosen_signed(place: Any, drawn: Any, way: int, *, limit: int) -> Any:
    """The code of both signs that chance takes: the mean of `code / (2 limit - code)` is right."""
    size, outward = abs(place), way * np.sign(place)
    below = np.floor(size)
    chance = (size - below) * (2 * limit - 1 - below) / (2 * limit - size)
    return np.sign(place) * (below + (drawn < chance * (1 + outward * 4 * EPS)))


def _chosen(place: Any, drawn: Any, way: int) -> Any:
    """The code of a root that chance takes: the mean of its square is right.

    The chance itself takes four roundings.
    """
    below = np.floor(place)
    chance = (place - below) * (place + below) / (2 * below + 1)
    return below + (drawn < chance * (1 + way * 2 * EPS))
