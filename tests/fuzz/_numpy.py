"""What JAX's operations mean, in NumPy: the rules of the second implementation."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy import special

Rule = Callable[..., Any]

EXACT_MOVES = frozenset(
    [
        "abs",
        "all_gather",
        "argmax",
        "argmin",
        "broadcast_in_dim",
        "clamp",
        "concatenate",
        "copy",
        "copy_p",
        "cummax",
        "cummin",
        "dynamic_slice",
        "dynamic_update_slice",
        "expand_dims",
        "gather",
        "halfstep_one_of_row",
        "iota",
        "max",
        "min",
        "name",
        "neg",
        "optimization_barrier",
        "pad",
        "ppermute",
        "pvary",
        "reduce_max",
        "reduce_min",
        "reshape",
        "rev",
        "select_n",
        "sign",
        "slice",
        "sort",
        "split",
        "squeeze",
        "stack",
        "stop_gradient",
        "tile",
        "top_k",
        "transpose",
        "unstack",
        "scatter",
    ]
)
"""Operations whose results are among their operands: nothing is rounded."""


def _elementwise(function: Callable[..., Any]) -> Rule:
    return lambda *values, **_: function(*values)


def _convert(value: np.ndarray, *, new_dtype: np.dtype, **_: Any) -> np.ndarray:
    if value.dtype.kind == "f" and new_dtype.kind in "iu":
        limits = np.iinfo(new_dtype)
        return np.clip(np.nan_to_num(np.trunc(value)), limits.min, limits.max).astype(new_dtype)
    if value.dtype.kind == "c" and new_dtype.kind != "c":
        value = np.real(value)
    return value.astype(new_dtype)


def _broadcast(
    value: np.ndarray, *_: Any, shape: Sequence[int], broadcast_dimensions: Sequence[int], **__: Any
) -> np.ndarray:
    aligned = [1] * len(shape)
    for size, place in zip(value.shape, broadcast_dimensions, strict=True):
        aligned[place] = size
    return np.broadcast_to(value.reshape(aligned), tuple(shape))


def _dot(left: np.ndarray, right: np.ndarray, *, dimension_numbers: Any, **_: Any) -> np.ndarray:
    (left_sum, right_sum), (left_batch, right_batch) = dimension_numbers
    names = iter("abcdefghijklmnopqrstuvwxyz")
    of_left = [next(names) for _ in range(left.ndim)]
    of_right: list[str | None] = [None] * right.ndim
    for first, second in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        of_right[second] = of_left[first]
    spelled = [name or next(names) for name in of_right]
    batch = [of_left[place] for place in left_batch]
    used = {*left_sum, *left_batch}
    free = [name for place, name in enumerate(of_left) if place not in used]
    used = {*right_sum, *right_batch}
    free += [name for place, name in enumerate(spelled) if place not in used]
    text = f"{''.join(of_left)},{''.join(spelled)}->{''.join(batch + free)}"
    return np.asarray(np.einsum(text, left, right))


def _convolution(
    left: np.ndarray,
    right: np.ndarray,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    **_: Any,
) -> np.ndarray:
    left = np.transpose(left, dimension_numbers.lhs_spec)
    right = np.transpose(right, dimension_numbers.rhs_spec)
    zero = np.zeros((), left.dtype)
    edges = [(low, high, step - 1) for (low, high), step in zip(padding, lhs_dilation, strict=True)]
    left = _pad(left, zero, padding_config=[(0, 0, 0)] * 2 + edges)
    spread = [(0, 0, step - 1) for step in rhs_dilation]
    right = _pad(right, zero, padding_config=[(0, 0, 0)] * 2 + spread)
    groups = feature_group_count * batch_group_count
    # Every group has its own channels, or its own examples, and its own filters.
    parts = np.split(left, groups, 1 if feature_group_count > 1 else 0)
    filters = np.split(right, groups, 0)
    places = "wxyz"[: len(window_strides)]
    inner = places.upper()
    strided = [slice(None, None, step) for step in window_strides]
    made = []
    for part, kernel in zip(parts, filters, strict=True):
        # A window that is larger than the array is nowhere: the result is empty.
        lacking = np.maximum(np.subtract(kernel.shape, part.shape)[2:], 0)
        large = np.pad(part, [(0, 0)] * 2 + [(0, more) for more in lacking])
        windows = np.lib.stride_tricks.sliding_window_view(
            large, kernel.shape[2:], tuple(range(2, part.ndim))
        )
        windows = windows[..., *strided, *[slice(None)] * len(places)]
        counted = [slice(0, 0) if more else slice(None) for more in lacking]
        windows = windows[:, :, *counted]
        made.append(np.einsum(f"ni{places}{inner},oi{inner}->no{places}", windows, kernel))
    out = np.concatenate(made, 1)
    return np.transpose(out, np.argsort(dimension_numbers.out_spec))


def _pad(value: np.ndarray, fill: np.ndarray, *, padding_config: Any) -> np.ndarray:
    for axis, (low, high, inner) in enumerate(padding_config):
        size = value.shape[axis]
        spread = size + max(size - 1, 0) * inner
        total = low + spread + high
        target = np.arange(size) * (inner + 1) + low
        inside = (target >= 0) & (target < total)
        made = np.full((*value.shape[:axis], max(total, 0), *value.shape[axis + 1 :]), fill)
        made = made.astype(value.dtype)
        place = [slice(None)] * value.ndim
        source = list(place)
        place[axis], source[axis] = target[inside], np.arange(size)[inside]
        made[tuple(place)] = value[tuple(source)]
        value = made
    return value


def _slice(
    value: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any, **_: Any
) -> np.ndarray:
    steps = strides or (1,) * value.ndim
    return value[tuple(map(slice, start_indices, limit_indices, steps))]


def _starts(shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Any]) -> list[int]:
    return [
        int(np.clip(int(start), 0, size - part))
        for size, part, start in zip(shape, sizes, starts, strict=True)
    ]


def _dynamic_slice(value: np.ndarray, *starts: Any, slice_sizes: Any, **_: Any) -> np.ndarray:
    first = _starts(value.shape, slice_sizes, starts)
    return value[tuple(slice(a, a + b) for a, b in zip(first, slice_sizes, strict=True))]


def _dynamic_update(value: np.ndarray, update: np.ndarray, *starts: Any, **_: Any) -> np.ndarray:
    first = _starts(value.shape, update.shape, starts)
    made = value.copy()
    made[tuple(slice(a, a + b) for a, b in zip(first, update.shape, strict=True))] = update
    return made


def _reduce(function: Callable[..., Any], initial: Callable[[np.dtype], Any]) -> Rule:
    def rule(value: np.ndarray, *, axes: Sequence[int], **_: Any) -> np.ndarray:
        return function(value, axis=tuple(axes), initial=initial(value.dtype)).astype(value.dtype)

    return rule


def _lowest(dtype: np.dtype) -> Any:
    return -np.inf if dtype.kind == "f" else False if dtype.kind == "b" else np.iinfo(dtype).min


def _highest(dtype: np.dtype) -> Any:
    return np.inf if dtype.kind == "f" else True if dtype.kind == "b" else np.iinfo(dtype).max


def _accumulate(function: np.ufunc) -> Rule:
    def rule(value: np.ndarray, *, axis: int, reverse: bool, **_: Any) -> np.ndarray:
        if not value.size:
            return value
        turned = np.flip(value, axis) if reverse else value
        made = function.accumulate(turned, axis=axis, dtype=value.dtype)
        return np.flip(made, axis) if reverse else made

    return rule


def _which(function: Callable[..., Any]) -> Rule:
    def rule(value: np.ndarray, *, axes: Sequence[int], **_: Any) -> np.ndarray:
        return function(value, axis=axes[0])

    return rule


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    which = np.broadcast_to(which, cases[0].shape)
    made = cases[0].copy()
    for number, case in enumerate(cases[1:], 1):
        made = np.where(which == number, case, made)
    return made


def _clamp(low: np.ndarray, value: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(value, low), high)


def _power(base: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    return np.power(base, exponent.astype(base.dtype))


def _round(value: np.ndarray, *, rounding_method: Any) -> np.ndarray:
    if int(rounding_method) == 1:
        return np.round(value)
    return np.copysign(np.floor(np.abs(value) + 0.5), value)


def _quotient(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if left.dtype.kind in "fc":
        return left / right
    safe = np.where(right == 0, 1, right)
    return np.where(right == 0, -1, np.trunc(left / safe)).astype(left.dtype)


def _remainder(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if left.dtype.kind == "f":
        return np.fmod(left, right)
    return np.where(right == 0, left, np.fmod(left, np.where(right == 0, 1, right)))


def _split(value: np.ndarray, *, sizes: Sequence[int], axis: int) -> list[np.ndarray]:
    return np.split(value, np.cumsum(sizes)[:-1], axis)


def _iota(*_: Any, dtype: Any, shape: Sequence[int], dimension: int, **__: Any) -> np.ndarray:
    aligned = [1] * len(shape)
    aligned[dimension] = shape[dimension]
    line = np.arange(shape[dimension]).astype(np.dtype(dtype))
    return np.broadcast_to(line.reshape(aligned), tuple(shape))


def _integer_power(value: np.ndarray, *, y: int) -> np.ndarray:
    return value**y if value.dtype.kind in "fc" else np.power(value, y)


def _reshape(
    value: np.ndarray, *_: Any, new_sizes: Sequence[int], dimensions: Any, **__: Any
) -> np.ndarray:
    ordered = value if dimensions is None else np.transpose(value, dimensions)
    return ordered.reshape(tuple(new_sizes))


def _expand(value: np.ndarray, *, dimensions: Sequence[int]) -> np.ndarray:
    return np.expand_dims(value, tuple(dimensions))


def _same(*values: Any, **_: Any) -> Any:
    return values[0] if len(values) == 1 else values


def _rules() -> dict[str, Rule]:
    plain: dict[str, Callable[..., Any]] = {
        "abs": np.abs,
        "acos": np.arccos,
        "acosh": np.arccosh,
        "add": np.add,
        "add_any": np.add,
        "and": np.bitwise_and,
        "asin": np.arcsin,
        "asinh": np.arcsinh,
        "atan": np.arctan,
        "atan2": np.arctan2,
        "atanh": np.arctanh,
        "cbrt": np.cbrt,
        "ceil": np.ceil,
        "clamp": _clamp,
        "cos": np.cos,
        "conj": np.conj,
        "cosh": np.cosh,
        "digamma": special.digamma,
        "div": _quotient,
        "eq": np.equal,
        "erf": special.erf,
        "erf_inv": special.erfinv,
        "erfc": special.erfc,
        "exp": np.exp,
        "exp2": np.exp2,
        "expm1": np.expm1,
        "floor": np.floor,
        "ge": np.greater_equal,
        "gt": np.greater,
        "imag": np.imag,
        "is_finite": np.isfinite,
        "le": np.less_equal,
        "lgamma": special.gammaln,
        "log": np.log,
        "log1p": np.log1p,
        "logistic": special.expit,
        "lt": np.less,
        "max": np.maximum,
        "min": np.minimum,
        "mul": np.multiply,
        "ne": np.not_equal,
        "neg": np.negative,
        "not": np.invert,
        "one_minus_square": lambda value: (1 - value) * (1 + value),
        "or": np.bitwise_or,
        "pow": _power,
        "real": np.real,
        "rem": _remainder,
        "rsqrt": lambda value: 1 / np.sqrt(value),
        "select_n": _select,
        "sign": np.sign,
        "sin": np.sin,
        "sinh": np.sinh,
        "sqrt": np.sqrt,
        "square": np.square,
        "sub": np.subtract,
        "tan": np.tan,
        "tanh": np.tanh,
        "xor": np.bitwise_xor,
    }
    rules = {name: _elementwise(function) for name, function in plain.items()}
    return rules | {
        "argmax": _which(np.argmax),
        "argmin": _which(np.argmin),
        "broadcast_in_dim": _broadcast,
        "concatenate": lambda *values, dimension: np.concatenate(values, dimension),
        "convert_element_type": _convert,
        "conv_general_dilated": _convolution,
        "copy": _same,
        "copy_p": _same,
        "cumlogsumexp": _accumulate(np.logaddexp),
        "cummax": _accumulate(np.maximum),
        "cummin": _accumulate(np.minimum),
        "cumprod": _accumulate(np.multiply),
        "cumsum": _accumulate(np.add),
        "dot_general": _dot,
        "dynamic_slice": _dynamic_slice,
        "dynamic_update_slice": _dynamic_update,
        "expand_dims": _expand,
        "integer_pow": _integer_power,
        "iota": _iota,
        "name": _same,
        "optimization_barrier": lambda *values, **_: values,
        "pad": _pad,
        "reduce_and": lambda value, *, axes, **_: np.all(value, tuple(axes)),
        "reduce_max": _reduce(np.max, _lowest),
        "reduce_min": _reduce(np.min, _highest),
        "reduce_or": lambda value, *, axes, **_: np.any(value, tuple(axes)),
        "reduce_prod": _reduce(np.prod, lambda dtype: dtype.type(1)),
        "reduce_sum": _reduce(np.sum, lambda dtype: dtype.type(0)),
        "reshape": _reshape,
        "rev": lambda value, *, dimensions: np.flip(value, tuple(dimensions)),
        "round": _round,
        "slice": _slice,
        "split": _split,
        "stack": lambda *values, axis: np.stack(values, axis),
        "squeeze": lambda value, *, dimensions: np.squeeze(value, tuple(dimensions)),
        "tile": lambda value, *, reps: np.tile(value, tuple(reps)),
        "transpose": lambda value, *, permutation: np.transpose(value, tuple(permutation)),
        "unstack": lambda value, *, axis: list(np.moveaxis(value, axis, 0)),
    }


RULES: Mapping[str, Rule] = MappingProxyType(_rules())
