"""The arithmetic of the optimizers, on float32 values. Every backend runs this and nothing else."""

from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from halfstep.kernels.flash_update._spec import Moments, Scalars, Spec


def updated(old: Moments, grad: Any, by: Scalars, spec: Spec) -> Moments:
    """The values after one step.

    Args:
        old: The values before.
        grad: The gradient, in float32.
        by: The hyperparameters of this step.
        spec: Which optimizer it is.
    """
    if spec.coupled:
        grad, by = grad + by.decay * old.value, by._replace(decay=0)
    # An element whose gradient is not finite stays as it is, and its group is not told of it.
    is_finite = jnp.abs(grad) <= float(jnp.finfo(jnp.float32).max)
    new = _RULES[spec.algorithm](old, jnp.where(is_finite, grad, 0), by, spec)
    value = jnp.where(is_finite, new.value, old.value)
    return Moments(value, new.first, new.second, new.root)


def _adam(old: Moments, grad: Any, by: Scalars, spec: Spec) -> Moments:
    del spec
    first = by.b1 * old.first + (1 - by.b1) * grad
    second = by.b2 * old.second + (1 - by.b2) * _square(grad)
    # Taken once: it is divided by here, and it is what is stored.
    root = jnp.sqrt(second)
    step = (first * by.first_bias) / (root * by.second_bias + by.eps)
    return Moments(_stepped(old.value, step, by), first, second, root)


def _lion(old: Moments, grad: Any, by: Scalars, spec: Spec) -> Moments:
    del spec
    step = _sign(by.b1 * old.first + (1 - by.b1) * grad)
    first = by.b2 * old.first + (1 - by.b2) * grad
    return Moments(_stepped(old.value, step, by), first, None)


def _sgd(old: Moments, grad: Any, by: Scalars, spec: Spec) -> Moments:
    if old.first is None:
        return Moments(_stepped(old.value, grad, by), None, None)
    first = by.b1 * old.first + grad
    step = by.b1 * first + grad if spec.nesterov else first
    return Moments(_stepped(old.value, step, by), first, None)


def _square(grad: Any) -> Any:
    # Of a complex gradient, of its magnitude: the second moment is real.
    return grad.real**2 + grad.imag**2 if jnp.iscomplexobj(grad) else grad * grad


def _sign(step: Any) -> Any:
    # By comparing: of `jnp.sign`, JAX asks which TPU is there, and where one only compiles none is.
    if jnp.iscomplexobj(step):
        return jnp.sign(step)
    return (step > 0).astype(step.dtype) - (step < 0).astype(step.dtype)


def _stepped(value: Any, step: Any, by: Scalars) -> Any:
    return value - by.rate * (step + by.decay * value)


def noise(shape: tuple[int, ...], seed: Any, *, stream: int) -> Any:
    """Random 32-bit words, one an element: a hash of where it is, and of the seed.

    Made where they are used, they cost no memory. `stream` tells those of one purpose from those
    of another.
    """
    at = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        at = at * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return hashed(at, seed, stream=stream)


def hashed(at: Any, seed: Any, *, stream: int) -> Any:
    """The words of `noise` at places: what a kernel that has a part of an array draws from."""
    word = at * jnp.uint32(0x9E3779B9) + seed.astype(jnp.uint32) * jnp.uint32(2 * stream + 1)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = (word ^ (word >> shift)) * jnp.uint32(factor)
    return word ^ (word >> 16)


_RULES = MappingProxyType({"adam": _adam, "lion": _lion, "sgd": _sgd})
