"""The step that all compressed optimizers share."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float32, Int32, PyTree

from halfstep._base import is_inexact
from halfstep._training import as_predicate
from halfstep.kernels.flash_update import Leaf, Scalars, Spec, flash_update
from halfstep.kernels.flash_update._rule import Algorithm, Moments, updated
from halfstep.optim._layout import StateOptions, zeros
from halfstep.optim._state import FlashState, Moment, check_state
from halfstep.optim._transform import Transformation, transformation
from halfstep.quant import CODES, Groups, Quantized, join, split
from halfstep.quant._nibbles import stored_shape
from halfstep.quant._split import parted

Number = ArrayLike
"""A hyperparameter: a number, or a traced scalar, as `optax.inject_hyperparams` passes it."""


@dataclasses.dataclass(frozen=True, eq=False)
class FlashRule:
    """The rule of a compressed optimizer, with its hyperparameters.

    Attributes:
        algorithm: The arithmetic of a step.
        rate: The learning rate, or a schedule of it.
        moments: Whether the rule has a first moment, and whether it has a second.
        b1: Decay of the first moment, or of the momentum.
        b2: Decay of the second moment; for Lion, of the momentum.
        eps: Added to the denominator.
        decay: Weight decay.
        mask: Where weights decay: a tree of booleans or a function of the parameters.
        nesterov: Whether the momentum is Nesterov's.
        coupled: Whether weight decay is a part of the gradient.
    """

    algorithm: Algorithm
    rate: Number | Callable[[jax.Array], ArrayLike]
    _: dataclasses.KW_ONLY
    moments: tuple[bool, bool]
    b1: Number = 0.0
    b2: Number = 0.0
    eps: Number = 0.0
    decay: Number = 0.0
    mask: PyTree = None
    nesterov: bool = False
    coupled: bool = False


class _Slot(NamedTuple):
    """A parameter and its state: one leaf of each tree."""

    param: Array
    low: Array | None
    first: Moment
    second: Moment


def flash(rule: FlashRule, options: StateOptions) -> Transformation:
    """Make an optimizer from a rule, with its state stored as the options say."""

    def init(params: PyTree) -> FlashState:
        return _init(rule, options, params)

    def step(
        params: PyTree, state: object, grads: PyTree, finite: object = None, **_: object
    ) -> tuple[PyTree, FlashState]:
        return _step(rule, options, params, state, grads, finite)

    def prepare(params: PyTree) -> tuple[PyTree, FlashState]:
        return _prepare(rule, options, params)

    return transformation(init, step, prepare)


def _init(rule: FlashRule, options: StateOptions, params: PyTree) -> FlashState:
    leaves, treedef = jax.tree.flatten(params)
    pairs = list(zip(leaves, options.groups(params), strict=True))
    has_first, has_second = rule.moments
    low = [_low_zeros(leaf, options, params) for leaf in leaves]
    first = [_zero_moment(*pair, options) if has_first else None for pair in pairs]
    second = [_zero_moment(*pair, options, squares=True) if has_second else None for pair in pairs]
    trees = (treedef.unflatten(found) for found in (low, first, second))
    return FlashState(jnp.zeros((), jnp.int32), *trees)


def _low_zeros(leaf: PyTree, options: StateOptions, params: PyTree) -> Array | None:
    if options.low_dtype is None or not is_inexact(leaf):
        return None
    if leaf.dtype == jnp.float16:
        raise ValueError(
            "parameters must be float32 or bfloat16: float16 has no split that gives back a "
            f"float32 master; got {_path_of(leaf, params)}: float16{list(leaf.shape)}. Keep them "
            "in float32 (`prepare` makes bfloat16 of them), or pass master_bits=None."
        )
    if leaf.dtype != jnp.bfloat16:
        return None
    return zeros(leaf.shape, options.low_dtype, leaf)


def _path_of(leaf: object, params: PyTree) -> str:
    flat = jax.tree_util.tree_leaves_with_path(params)
    return next(jax.tree_util.keystr(path) for path, other in flat if other is leaf)


def _zero_moment(
    leaf: PyTree, groups: Groups | None, options: StateOptions, *, squares: bool = False
) -> Moment:
    """Return a moment of zeros for a leaf; pass `squares` for a moment of squared gradients."""
    if not is_inexact(leaf):
        return None
    if groups is not None:
        code = CODES[options.codes[squares]]
        codes = zeros(stored_shape(leaf.shape, code, groups), code.dtype, leaf)
        return Quantized(codes, zeros(groups.scale_shape(leaf.shape), options.scale_dtype, leaf))
    dtype = np.promote_types(leaf.dtype, jnp.float32)
    if squares and jnp.issubdtype(dtype, jnp.complexfloating):
        # The squared magnitude of a complex gradient is real.
        dtype = jnp.finfo(dtype).dtype
    return zeros(leaf.shape, dtype, leaf)


def _prepare(rule: FlashRule, options: StateOptions, params: PyTree) -> tuple[PyTree, FlashState]:
    """Return parameters to compute with, and a state that holds the bits that they lack."""
    leaves, treedef = jax.tree.flatten(params)
    made: list[PyTree] = []
    low: list[Array | None] = []
    for leaf, groups in zip(leaves, options.groups(params), strict=True):
        if groups is None or options.low_dtype is None or leaf.dtype != jnp.float32:
            made.append(leaf)
            low.append(_low_zeros(leaf, options, params))
        else:
            high, rest = split(leaf, bits=8 if options.low_dtype == np.int8 else 16)
            made.append(high)
            low.append(rest)
    params = treedef.unflatten(made)
    return params, _init(rule, options, params)._replace(low=treedef.unflatten(low))


def _step(
    rule: FlashRule,
    options: StateOptions,
    params: PyTree,
    state: object,
    grads: PyTree,
    finite: object,
) -> tuple[PyTree, FlashState]:
    leaves, treedef = jax.tree.flatten(params)
    # The groups are read from the state and not chosen anew: after a restart on another mesh, newly
    # chosen groups might lie along another axis.
    state, groups = check_state(options, rule.moments, params, state)
    columns = [treedef.flatten_up_to(tree) for tree in (state.low, state.first, state.second)]
    slots = [_Slot(*fields) for fields in zip(leaves, *columns, strict=True)]
    predicate = None if finite is None else as_predicate(finite)
    keep = None if predicate is None else jnp.asarray(predicate)
    by = _scalars(rule, options.seed, jnp.asarray(state.count), keep)
    decays = _decays(rule, params)
    rows = zip(slots, treedef.flatten_up_to(grads), groups, decays, strict=True)
    made: list[_Slot] = []
    for number, (slot, grad, divided, decay) in enumerate(rows):
        # Each leaf draws from its own seed. Otherwise equal leaves would be rounded alike.
        scalars = by._replace(decay=decay, seed=by.seed + number)
        spec = Spec(
            rule.algorithm,
            divided or Groups(-1),
            nesterov=rule.nesterov,
            first_code=options.codes[0],
            second_code=options.codes[1],
            stochastic=options.stochastic,
            coupled=rule.coupled,
        )
        if not is_inexact(slot.param):
            made.append(slot)
        elif divided is None:
            made.append(_plain_step(slot, grad, scalars, spec))
        else:
            made.append(_compressed_step(slot, grad, scalars, spec, options))
    fields = zip(*made, strict=True) if made else ((), (), (), ())
    params, *trees = (treedef.unflatten(list(field)) for field in fields)
    # A skipped step does not count: bias corrections and schedules use the steps that were applied.
    more = 1 if keep is None else keep.astype(jnp.int32)
    return params, FlashState(state.count + more, *trees)


def _compressed_step(
    slot: _Slot, grad: jax.Array | np.ndarray, by: Scalars, spec: Spec, options: StateOptions
) -> _Slot:
    def parts(moment: Moment) -> Sequence[Array | None]:
        return moment if isinstance(moment, Quantized) else (None, None)

    leaf = Leaf(slot.param, slot.low, *parts(slot.first), *parts(slot.second))
    new = flash_update(leaf, grad, by, spec, implementation=options.implementation)
    return _Slot(
        new.param,
        new.low,
        None if slot.first is None else Quantized(new.first, new.first_scale),
        None if slot.second is None else Quantized(new.second, new.second_scale),
    )


def _plain_step(slot: _Slot, grad: jax.Array | np.ndarray, by: Scalars, spec: Spec) -> _Slot:
    """Step a leaf that is not compressed: a small one, a complex one, or one that is kept."""
    wide = np.promote_types(slot.param.dtype, jnp.float32)
    value = slot.param.astype(wide) if slot.low is None else join(slot.param, slot.low)
    # Real hyperparameters meet complex values, which strict promotion does not allow.
    with jax.numpy_dtype_promotion("standard"):
        new = updated(
            Moments(value, slot.first, slot.second), jnp.asarray(grad).astype(wide), by, spec
        )
    made = (*parted(new.value, slot.param, slot.low), new.first, new.second)
    keep = jnp.asarray(by.keep, bool)
    return _Slot(*jax.tree.map(lambda new, old: jnp.where(keep, new, old), made, tuple(slot)))


def _scalars(
    rule: FlashRule, seed: int, count: Int32[Array, ""], keep: Bool[Array, ""] | None
) -> Scalars:
    rate = rule.rate(count) if callable(rule.rate) else rule.rate
    b1, b2 = _float32(rule.b1), _float32(rule.b2)
    time = (count + 1).astype(jnp.float32)
    return Scalars(
        _float32(rate),
        b1,
        b2,
        _float32(rule.eps),
        _float32(rule.decay),
        1 / (1 - b1**time),
        jax.lax.rsqrt(1 - b2**time),
        _float32(1 if keep is None else keep),
        # The number of each leaf is added to this seed. Seeds of two steps are 4099 apart, so that
        # the leaves of one step share no seed with those of the next. Kernels get all scalars in
        # one float32 array, which holds integers below 2**24 exactly.
        (count * 4099 + seed) % (1 << 23),
    )


def _float32(value: ArrayLike) -> Float32[Array, ""]:
    return jnp.asarray(value, jnp.float32)


def _decays(rule: FlashRule, params: PyTree) -> list[Float32[Array, ""]]:
    """Return the weight decay of each leaf: zero where the mask is false."""
    decay = _float32(rule.decay)
    if rule.mask is None:
        return [decay] * len(jax.tree.leaves(params))
    mask = rule.mask(params) if callable(rule.mask) else rule.mask
    # The mask may be a prefix of the parameters' tree: each of its leaves applies to the whole
    # subtree below it.
    chosen = jax.tree.leaves(jax.tree.map(lambda m, p: jax.tree.map(lambda _: m, p), mask, params))
    return [decay if on else jnp.float32(0) for on in chosen]
