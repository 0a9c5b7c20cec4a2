"""The step that all compressed optimizers share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfstep._base import is_inexact
from halfstep._training import as_predicate
from halfstep.kernels.flash_update import Implementation, Leaf, Scalars, Spec, flash_update
from halfstep.kernels.flash_update._rule import Moments, updated
from halfstep.optim._layout import Layout, zeros
from halfstep.optim._state import FlashState, check_state
from halfstep.optim._transform import Transformation, transformation
from halfstep.quant import Groups, Quantized, join, split
from halfstep.quant._split import parted

Number = Any
"""A hyperparameter: a number, or a traced scalar."""


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """An optimizer: its rule, its hyperparameters and how its state is written."""

    algorithm: Any
    rate: Number | Callable[[Any], Any]
    b1: Number
    b2: Number
    eps: Number
    decay: Number
    mask: Any
    layout: Layout
    moments: tuple[bool, bool]
    """Whether it has a first and a second one."""
    nesterov: bool = False
    coupled: bool = False
    stochastic: bool = False
    seed: int = 0
    implementation: Implementation = None

    def spec(self, groups: Groups) -> Spec:
        """How one leaf is updated."""
        return Spec(
            self.algorithm,
            groups,
            nesterov=self.nesterov,
            stochastic=self.stochastic,
            coupled=self.coupled,
        )


def flash(recipe: Recipe) -> Transformation:
    """Make an optimizer."""

    def init(params: Any) -> FlashState:
        return _init(recipe, params)

    def step(
        params: Any, state: Any, grads: Any, finite: Any = None, **_: Any
    ) -> tuple[Any, FlashState]:
        return _step(recipe, params, state, grads, finite)

    def prepare(params: Any) -> tuple[Any, FlashState]:
        return _prepare(recipe, params)

    return transformation(init, step, prepare)


def _init(recipe: Recipe, params: Any) -> FlashState:
    leaves, treedef = jax.tree.flatten(params)
    groups = recipe.layout.groups(params)
    has_first, has_second = recipe.moments
    low = [_low_zeros(leaf, recipe.layout, params) for leaf in leaves]
    first = [
        _moment(leaf, g, np.int8, recipe.layout) if has_first else None
        for leaf, g in zip(leaves, groups, strict=True)
    ]
    second = [
        _moment(leaf, g, np.uint8, recipe.layout, real=True) if has_second else None
        for leaf, g in zip(leaves, groups, strict=True)
    ]
    trees = (treedef.unflatten(found) for found in (low, first, second))
    return FlashState(jnp.zeros((), jnp.int32), *trees)


def _low_zeros(leaf: Any, layout: Layout, params: Any) -> Any:
    if layout.master_bits is None or not is_inexact(leaf):
        return None
    if leaf.dtype == jnp.float16:
        raise ValueError(
            "parameters must be float32 or bfloat16: float16 has no split that gives back a "
            f"float32 master; got {_path_of(leaf, params)}: float16{list(leaf.shape)}. Keep them "
            "in float32 (`prepare` makes bfloat16 of them), or pass master_bits=None."
        )
    if leaf.dtype != jnp.bfloat16:
        return None
    return zeros(leaf.shape, np.int8 if layout.master_bits == 24 else np.int16, leaf)


def _path_of(leaf: Any, params: Any) -> str:
    flat = jax.tree_util.tree_leaves_with_path(params)
    return next(jax.tree_util.keystr(path) for path, other in flat if other is leaf)


def _moment(
    leaf: Any, groups: Groups | None, dtype: Any, layout: Layout, *, real: bool = False
) -> Any:
    if not is_inexact(leaf):
        return None
    if groups is None:
        return plain_zeros(leaf, real=real)
    codes = zeros(leaf.shape, dtype, leaf)
    return Quantized(codes, zeros(groups.scale_shape(leaf.shape), layout.scale_dtype, leaf))


def _prepare(recipe: Recipe, params: Any) -> tuple[Any, FlashState]:
    """Parameters to compute with, and a state that has what they lack."""
    leaves, treedef = jax.tree.flatten(params)
    bits = recipe.layout.master_bits
    made, low = [], []
    for leaf, groups in zip(leaves, recipe.layout.groups(params), strict=True):
        if groups is None or bits is None or leaf.dtype != jnp.float32:
            made.append(leaf)
            low.append(_low_zeros(leaf, recipe.layout, params))
        else:
            high, rest = split(leaf, bits=8 if bits == 24 else 16)
            made.append(high)
            low.append(rest)
    params = treedef.unflatten(made)
    return params, _init(recipe, params)._replace(low=treedef.unflatten(low))


def _step(
    recipe: Recipe, params: Any, state: Any, grads: Any, finite: Any
) -> tuple[Any, FlashState]:
    leaves, treedef = jax.tree.flatten(params)
    groups = check_state(recipe.layout, recipe.moments, params, state)
    fields = [
        treedef.flatten_up_to(field) for field in (grads, state.low, state.first, state.second)
    ]
    predicate = None if finite is None else as_predicate(finite)
    keep = None if predicate is None else jnp.asarray(predicate)
    by = _scalars(recipe, state.count, keep)
    decays = _decays(recipe, params, treedef)
    made = []
    for number, (leaf, g, decay, grad, low, first, second) in enumerate(
        zip(leaves, groups, decays, *fields, strict=True)
    ):
        scalars = by._replace(decay=decay, seed=by.seed + number)
        if not is_inexact(leaf):
            made.append((leaf, low, first, second))
        elif g is None:
            spec = recipe.spec(Groups(-1))
            made.append(plain_update(leaf, low, first, second, grad, scalars, spec))
        else:
            made.append(_coded(leaf, low, first, second, grad, scalars, recipe, g))
    columns = zip(*made, strict=True) if made else ((), (), (), ())
    params, *trees = (treedef.unflatten(list(column)) for column in columns)
    more = 1 if keep is None else keep.astype(jnp.int32)
    return params, FlashState(state.count + more, *trees)


def _coded(
    param: Any,
    low: Any,
    first: Quantized | None,
    second: Quantized | None,
    grad: Any,
    by: Scalars,
    recipe: Recipe,
    groups: Groups,
) -> tuple[Any, Any, Any, Any]:
    leaf = Leaf(param, low, *(first or (None, None)), *(second or (None, None)))
    new = flash_update(leaf, grad, by, recipe.spec(groups), implementation=recipe.implementation)
    return (
        new.param,
        new.low,
        None if first is None else Quantized(new.first, new.first_scale),
        None if second is None else Quantized(new.second, new.second_scale),
    )


def _scalars(recipe: Recipe, count: Any, keep: Any) -> Scalars:
    rate = recipe.rate(count) if callable(recipe.rate) else recipe.rate
    b1, b2 = _float32(recipe.b1), _float32(recipe.b2)
    time = (count + 1).astype(jnp.float32)
    return Scalars(
        _float32(rate),
        b1,
        b2,
        _float32(recipe.eps),
        _float32(recipe.decay),
        1 / (1 - b1**time),
        jax.lax.rsqrt(1 - b2**time),
        _float32(1 if keep is None else keep),
        # Far apart from step to step, so that leaves never share one; exact in float32.
        (count * 4099 + recipe.seed) % (1 << 23),
    )


def _float32(value: Any) -> Any:
    return jnp.asarray(value, jnp.float32)


def _decays(recipe: Recipe, params: Any, treedef: Any) -> list[Any]:
    decay = _float32(recipe.decay)
    if recipe.mask is None:
        return [decay] * treedef.num_leaves
    mask = recipe.mask(params) if callable(recipe.mask) else recipe.mask
    chosen = jax.tree.leaves(jax.tree.map(lambda m, p: jax.tree.map(lambda _: m, p), mask, params))
    return [decay if on else jnp.float32(0) for on in chosen]


def plain_zeros(leaf: Any, *, real: bool = False) -> Any:
    """A moment of zeros, in float32 or what is wider."""
    dtype = np.promote_types(leaf.dtype, jnp.float32)
    if real and jnp.issubdtype(dtype, jnp.complexfloating):
        dtype = jnp.finfo(dtype).dtype
    return zeros(leaf.shape, dtype, leaf)


def plain_update(
    param: Any, low: Any, first: Any, second: Any, grad: Any, by: Scalars, spec: Spec
) -> tuple[Any, Any, Any, Any]:
    """One step of a parameter whose moments are stored as they are."""
    wide = np.promote_types(param.dtype, jnp.float32)
    value = param.astype(wide) if low is None else join(param, low)
    # Real hyperparameters meet complex values.
    with jax.numpy_dtype_promotion("standard"):
        new = updated(Moments(value, first, second), grad.astype(wide), by, spec)
    made = parted(new.value, param, low)
    keep = jnp.asarray(by.keep, bool)
    pairs = zip((*made, new.first, new.second), (param, low, first, second), strict=True)
    param, low, first, second = (None if b is None else jnp.where(keep, a, b) for a, b in pairs)
    return param, low, first, second
