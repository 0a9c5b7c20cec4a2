"""The update in plain JAX: what every kernel must agree with, and what runs where none is."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from halfstep.kernels.flash_update._math import noise, updated
from halfstep.kernels.flash_update._spec import Leaf, Moments, Scalars, Spec
from halfstep.quant._codes import Code, scale_of
from halfstep.quant._groups import Groups
from halfstep.quant._split import join, split, widened


def update(leaf: Leaf, grad: Any, by: Scalars, spec: Spec) -> Leaf:
    """One step of a leaf."""
    shape, groups = leaf.param.shape, spec.groups
    root = _decoded(leaf.second, leaf.second_scale, spec.second, groups)
    old = Moments(
        _value(leaf, groups),
        _decoded(leaf.first, leaf.first_scale, spec.first, groups),
        None if root is None else root * root,
    )
    new = updated(old, widened(groups.divided(grad)), by, spec)
    param, low = _written(new.value, leaf, by, spec)
    made = Leaf(
        groups.whole(param, shape),
        None if low is None else groups.whole(low, shape),
        *_encoded(new.first, leaf.first_scale, spec.first, groups, shape, None),
        *_encoded(new.root, leaf.second_scale, spec.second, groups, shape, _chances(by, spec)),
    )
    keep = jnp.asarray(by.keep, bool)
    pairs = zip(made, leaf, strict=True)
    return Leaf(*(None if a is None else jnp.where(keep, a, b) for a, b in pairs))


def _value(leaf: Leaf, groups: Groups) -> Any:
    param = groups.divided(leaf.param)
    return widened(param) if leaf.low is None else join(param, groups.divided(leaf.low))


def _written(value: Any, leaf: Leaf, by: Scalars, spec: Spec) -> tuple[Any, Any]:
    if leaf.low is None:
        return value.astype(leaf.param.dtype), None
    words = noise(value.shape, by.seed, stream=0) if spec.stochastic else None
    return split(value, bits=8 if leaf.low.dtype == jnp.int8 else 16, noise=words)


def _chances(by: Scalars, spec: Spec) -> Callable[[tuple[int, ...]], Any] | None:
    """Numbers of [0, 1), for an array of a shape."""
    if not spec.stochastic:
        return None
    return lambda shape: (noise(shape, by.seed, stream=1) >> 8).astype(jnp.float32) * 2.0**-24


def _decoded(codes: Any, scale: Any, code: Code, groups: Groups) -> Any:
    if codes is None:
        return None
    return code.decode(groups.divided(codes), widened(groups.aligned(scale)))


def _encoded(
    value: Any,
    old_scale: Any,
    code: Code,
    groups: Groups,
    shape: tuple[int, ...],
    chances: Callable[[tuple[int, ...]], Any] | None,
) -> tuple[Any, Any]:
    if value is None:
        return None, None
    axis = value.ndim + groups.axis
    scale = scale_of(jnp.max(jnp.abs(value), axis=axis, keepdims=True), old_scale.dtype)
    drawn = None if chances is None else chances(value.shape)
    codes = code.encode(value, widened(scale), noise=drawn)
    return groups.whole(codes, shape), jnp.squeeze(scale, axis)
