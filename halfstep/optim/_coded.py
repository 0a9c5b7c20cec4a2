"""Replace the arrays of an optimizer's state by codes, and back."""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfstep._base import compile_rule, match_rules, path_string, type_of
from halfstep.optim._check import StateError
from halfstep.optim._known import CODES_OF
from halfstep.optim._layout import shards_of
from halfstep.quant import CODES, Quantized, dequantize, groups_for, quantize
from halfstep.quant._groups import groups_between

Codes = dict[str, str]
"""The code of each array, by its path in the state."""


def codes_in(state: Any, rules: Mapping[str, str | None], min_size: int) -> Codes:
    """In which code each array of a state is to be stored; those that stay are left out."""
    found: Codes = {}
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


def _fits(leaf: Any, min_size: int) -> bool:
    is_float = getattr(leaf, "dtype", None) == jnp.float32
    return (
        is_float
        and np.size(leaf) >= min_size
        and groups_for(leaf.shape, shards=shards_of(leaf)) is not None
    )


def _walk(node: Any, path: tuple[Any, ...], code: str | None, found: Codes) -> None:
    """Find what is known of a state: by the names of its parts, whatever they are nested in."""
    fields = getattr(node, "_fields", None)
    if fields is not None:
        for field in fields:
            known = CODES_OF.get((type(node).__name__, field), code)
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


def encoded(state: Any, codes: Codes, *, scale_dtype: Any) -> Any:
    """A new state with its arrays in codes."""

    def of(path: Any, leaf: Any) -> Any:
        code = codes.get(path_string(path))
        if code is None:
            return leaf
        groups = groups_for(leaf.shape, shards=shards_of(leaf))
        return quantize(leaf, code, groups=groups, scale_dtype=scale_dtype)

    return jax.tree_util.tree_map_with_path(of, state)


def encoded_like(state: Any, old: Any, codes: Codes, *, key: Any) -> Any:
    """A state with its arrays in codes, written as an older one is."""
    flat = jax.tree_util.tree_flatten_with_path(old, is_leaf=_is_coded)[0]
    before = {path_string(path): leaf for path, leaf in flat}

    def of(path: Any, leaf: Any) -> Any:
        name = path_string(path)
        was = before.get(name)
        if not isinstance(was, Quantized):
            return leaf
        drawn = None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))
        groups = groups_between(leaf.shape, was.scale.shape)
        dtype = was.scale.dtype
        return quantize(leaf, codes[name], groups=groups, scale_dtype=dtype, key=drawn)

    return jax.tree_util.tree_map_with_path(of, state)


def decoded(state: Any, codes: Codes, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """A state with its arrays in float32 again.

    Raises:
        StateError: If an array is not in the code that it should be in.
    """

    def of(path: Any, leaf: Any) -> Any:
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


def _is_coded(node: Any) -> bool:
    return isinstance(node, Quantized)
