"""Store the state of any Optax optimizer in 8 or 4 bits."""

import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Int32, Key, PyTree

from halfstep._base import checked, compile_rule, match_rules, path_string, type_of
from halfstep._training import gated
from halfstep.optim._layout import options_of, shards_of
from halfstep.optim._state import StateError, check_kind
from halfstep.optim._transform import Transformation, of_models, transformation
from halfstep.quant import CODES, Quantized, dequantize, groups_for, quantize
from halfstep.quant._groups import groups_between

_SIGNED, _ROOT = "int8", "root8"

_CODES_OF = MappingProxyType(
    {
        (state, field): code
        for state, fields in {
            "ScaleByAdamState": {"mu": _SIGNED, "nu": _ROOT},
            "ScaleByAmsgradState": {"mu": _SIGNED, "nu": _ROOT, "nu_max": _ROOT},
            "ScaleByBeliefState": {"mu": _SIGNED, "nu": _ROOT},
            "ScaleByAdanState": {"m": _SIGNED, "v": _SIGNED, "n": _ROOT},
            "ScaleByAdaDeltaState": {"e_g": _ROOT, "e_x": _ROOT},
            "ScaleByAdemamixState": {"m1": _SIGNED, "nu": _ROOT},
            "ScaleByLionState": {"mu": _SIGNED},
            "ScaleByNovogradState": {"mu": _SIGNED},
            "ScaleByRmsState": {"nu": _ROOT},
            "ScaleByRmsWithCountState": {"nu": _ROOT},
            "ScaleBySM3State": {"nu": _SIGNED},
            "FactoredState": {"v": _ROOT},
            "TraceState": {"trace": _SIGNED},
            "EmaState": {"ema": _SIGNED},
            "MuonState": {"mu": _SIGNED},
            "SophiaState": {"mu": _SIGNED},
            "DAdaptAdamWState": {"exp_avg": _SIGNED, "exp_avg_sq": _ROOT},
            "ProdigyState": {"exp_avg": _SIGNED, "exp_avg_sq": _ROOT},
            "MomoState": {"exp_avg": _SIGNED},
            "MomoAdamState": {"exp_avg": _SIGNED, "exp_avg_sq": _ROOT},
        }.items()
        for field, code in fields.items()
    }
)
"""The code of each array of Optax's states, by the names of the state and the field.

Arrays that are not listed stay as they are, for these reasons. Running sums (Adagrad's, AdEMAMix's
slow momentum) change by less than one code. Past gradients and parameters are used in differences.
A variance that is itself a difference (centered RMSProp's) would be noise. Statistics of rows and
columns are small. Preconditioners are inverted."""

_Codes = dict[str, str]
"""The code of each array, by its path in the state."""

_NO_RULES: Mapping[str, str | None] = MappingProxyType({})


class CompressedState(NamedTuple):
    """The state of an optimizer, some of whose arrays are a `quant.Quantized`.

    Example:
        ```python
        import jax.numpy as jnp
        import optax
        from halfstep import optim

        optimizer = optim.compress(optax.adam(1e-3))
        state = optimizer.init({"w": jnp.ones((128, 64))})
        assert isinstance(state, optim.CompressedState) and state.count == 0
        moments = state.inner[0]
        assert moments.mu["w"].codes.dtype == jnp.int8
        assert moments.nu["w"].codes.dtype == jnp.uint8
        ```
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of steps that have been applied."""
    inner: Any


@checked
def compress(
    tx: optax.GradientTransformation,
    *,
    codes: Mapping[str, str | None] = _NO_RULES,
    min_size: int | None = None,
    scale_dtype: DTypeLike = "bfloat16",
    rounding: str = "nearest",
    seed: int | None = None,
) -> Transformation:
    """Store the state of any Optax optimizer in 8 bits, or in 4.

    The arrays of Optax's states are known by their names: first moments and momenta are stored in
    `"int8"`, second moments in `"root8"`. Arrays that are not known, or would lose too much, stay
    as they are; `optim.coded` lists the coded ones. Every step decodes the state, runs the
    optimizer and encodes the new state. `optim.flash_adamw` and the other flash optimizers do this
    in one pass.

    Args:
        tx: The optimizer.
        codes: Codes for parts of the state, by their paths in the state, such as
            `{"**/mu": "int4", "**/nu": None}`. `None` leaves a part as it is.
        min_size: Arrays with fewer elements stay as they are; 4096 by default.
        scale_dtype: The dtype of the scales: bfloat16 or float32.
        rounding: `"stochastic"` rounds codes up or down at random.
        seed: The random seed for `rounding`.

    Returns:
        An Optax optimizer that also has `step` and `prepare`.

    Example:
        ```python
        import jax.numpy as jnp
        import optax
        from halfstep import optim

        optimizer = optim.compress(optax.chain(optax.clip_by_global_norm(1.0), optax.adan(1e-3)))
        state = optimizer.init({"w": jnp.ones((128, 64))})
        coded = [x.codes.dtype for x in optim.coded(state)]
        assert coded == ["int8", "int8", "uint8"]
        ```
    """
    options = options_of(min_size=min_size, scale_dtype=scale_dtype, rounding=rounding, seed=seed)
    tx = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> CompressedState:
        inner = tx.init(params)
        found = _codes_in(inner, codes, options.min_size)
        return CompressedState(
            jnp.zeros((), jnp.int32), _encoded(inner, found, scale_dtype=options.scale_dtype)
        )

    def known(params: PyTree) -> tuple[_Codes, dict[str, tuple[int, ...]]]:
        # The state is only traced for its shapes. Decoding needs them: codes of 4 bits do not say
        # how long the last group was.
        like = jax.eval_shape(tx.init, params)
        flat = jax.tree_util.tree_flatten_with_path(like)[0]
        shapes = {path_string(path): leaf.shape for path, leaf in flat if hasattr(leaf, "shape")}
        return _codes_in(like, codes, options.min_size), shapes

    def step(
        params: PyTree,
        state: CompressedState,
        grads: PyTree,
        finite: object = True,
        **extra_args: Any,
    ) -> tuple[PyTree, CompressedState]:
        check_kind(state, CompressedState, "`optim.compress`")
        found, shapes = known(params)

        def commit(before: tuple[PyTree, CompressedState]) -> tuple[PyTree, CompressedState]:
            params, state = before
            inner = _decoded(state.inner, found, shapes)
            updates, inner = tx.update(grads, inner, params, **extra_args)
            key = None
            if options.stochastic:
                key = jax.random.fold_in(jax.random.key(options.seed), state.count)
            # The new state is stored like the old one, not like one from `init`. Loops and donated
            # buffers need the same shapes, and a restored state may be grouped along another axis.
            inner = _encoded_like(inner, state.inner, found, key=key)
            return optax.apply_updates(params, updates), CompressedState(state.count + 1, inner)

        return gated(finite, commit, (params, state))

    return of_models(transformation(init, step, lambda params: (params, init(params))))


def _codes_in(state: PyTree, rules: Mapping[str, str | None], min_size: int) -> _Codes:
    """Return the code of each coded array of a state, by its path."""
    found: _Codes = {}
    _walk(state, (), None, found)
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    paths = [path_string(path) for path, _ in flat]
    match_rules(tuple(rules), paths, option="codes")
    for rule, code in rules.items():
        if code is not None and code not in CODES:
            raise ValueError(
                f"a value of `codes` must be one of {', '.join(CODES)} or None; got {code!r}."
            )
        pattern = compile_rule(rule)
        for path in paths:
            if pattern.match(f"{path}/"):
                found[path] = code or ""
    leaves = {path_string(path): leaf for path, leaf in flat}
    return {path: code for path, code in found.items() if code and _fits(leaves[path], min_size)}


def _fits(leaf: PyTree, min_size: int) -> bool:
    is_float = getattr(leaf, "dtype", None) == jnp.float32
    return (
        is_float
        and np.size(leaf) >= min_size
        and groups_for(leaf.shape, shards=shards_of(leaf)) is not None
    )


def _walk(node: PyTree, path: tuple[object, ...], code: str | None, found: _Codes) -> None:
    """Find the known parts of a state by their names, however deep they are nested."""
    # States of Optax are named tuples. They are recognized by the names of their classes and not by
    # the classes: which classes exist, and where, depends on the version of Optax.
    fields = getattr(node, "_fields", None)
    if fields is not None:
        for field in fields:
            known = _CODES_OF.get((type(node).__name__, field), code)
            key = jax.tree_util.GetAttrKey(field)
            _walk(getattr(node, field), (*path, key), known, found)
        return
    children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    if [key for key, _ in children] == [()]:
        if code is not None:
            found[path_string(path)] = code
        return
    for key, child in children:
        _walk(child, (*path, *key), code, found)


def _encoded(state: PyTree, codes: _Codes, *, scale_dtype: np.dtype) -> PyTree:
    """Return a new state with its arrays encoded."""

    def of(path: tuple[object, ...], leaf: PyTree) -> PyTree:
        code = codes.get(path_string(path))
        if code is None:
            return leaf
        groups = groups_for(leaf.shape, shards=shards_of(leaf))
        return quantize(leaf, code, groups=groups, scale_dtype=scale_dtype)

    return jax.tree_util.tree_map_with_path(of, state)


def _encoded_like(
    state: PyTree, old: PyTree, codes: _Codes, *, key: Key[Array, ""] | None
) -> PyTree:
    """Return a state with its arrays encoded, in the codes and groups of an older state."""
    flat = jax.tree_util.tree_flatten_with_path(old, is_leaf=_is_coded)[0]
    before = {path_string(path): leaf for path, leaf in flat}

    def of(path: tuple[object, ...], leaf: PyTree) -> PyTree:
        name = path_string(path)
        was = before.get(name)
        if not isinstance(was, Quantized):
            return leaf
        # A checksum of the path, since Python's hash of a string differs between processes.
        drawn = None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))
        groups = groups_between(leaf.shape, was.scale.shape)
        dtype = was.scale.dtype
        return quantize(leaf, codes[name], groups=groups, scale_dtype=dtype, key=drawn)

    return jax.tree_util.tree_map_with_path(of, state)


def _decoded(state: PyTree, codes: _Codes, shapes: Mapping[str, tuple[int, ...]]) -> PyTree:
    """Return a state with its arrays decoded to float32.

    Raises:
        StateError: If an array is not stored in the code that this optimizer expects.
    """

    def of(path: tuple[object, ...], leaf: PyTree) -> PyTree:
        name = path_string(path)
        if not isinstance(leaf, Quantized):
            return leaf
        shape, code = shapes.get(name), codes.get(name)
        groups = None if shape is None else groups_between(shape, leaf.scale.shape)
        if code is None or groups is None or leaf.codes.dtype != CODES[code].dtype:
            wanted = f"{code!r}" if code else "as it is, not in a code"
            raise StateError(
                f"{name} must be stored {wanted}, for an array of shape {shape}; the state has "
                f"codes of {type_of(leaf.codes)} and scales of shape "
                f"{list(leaf.scale.shape)}. Pass the `codes` and `min_size` that it was made with."
            )
        return dequantize(leaf, code, groups=groups, shape=shape)

    return jax.tree_util.tree_map_with_path(of, state, is_leaf=_is_coded)


def _is_coded(node: object) -> bool:
    return isinstance(node, Quantized)
