"""Cast pytrees, and wrap functions so that their arguments and results are cast."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from halfstep._base import (
    Arguments,
    DTypeLike,
    MarkedLeaf,
    cast,
    checked,
    half_dtype,
    marked_leaves,
    match_rules,
    option_names,
    parse_dtype,
    refusing,
)

T = TypeVar("T")
_Castable: TypeAlias = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct

_CASTABLE = frozenset(map(np.dtype, (jnp.bfloat16, np.float16, np.float32)))
_FLOAT64 = np.dtype(np.float64)


def _x64() -> bool:
    # Read each time: `jax.enable_x64` is also a context manager, which sets it for a while.
    return jax.dtypes.canonicalize_dtype(_FLOAT64) == _FLOAT64


def is_castable(leaf: object, *, float64: bool = False) -> TypeGuard[_Castable]:
    """Return whether a cast applies to `leaf`: an array of 16- or 32-bit floats.

    Integers, booleans, PRNG keys, complex numbers, 8-bit floats (meaningless without their scale),
    Python scalars and everything that is not an array are left alone. float64 counts if asked for,
    or where JAX itself would convert it to float32 because x64 is off.
    """
    if not isinstance(leaf, _Castable):
        return False
    dtype = leaf.dtype
    # Without x64 a NumPy array of float64 becomes float32 as soon as JAX sees it.
    if dtype == _FLOAT64:
        return float64 or not _x64()
    return dtype in _CASTABLE


def _cast_leaf(leaf: _Castable, dtype: np.dtype) -> _Castable:
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype)
    if isinstance(leaf, np.ndarray | np.generic):
        with np.errstate(all="ignore"):  # Overflow and NaN are part of the format.
            return leaf.astype(dtype)
    return cast(leaf, dtype)


def _strong(leaf: _Castable) -> _Castable:
    """Remove a leaf's weak type, with which a kept float32 would follow 16-bit operands."""
    if isinstance(leaf, jax.Array) and leaf.weak_type:
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def check_target(dtype: object) -> np.dtype:
    resolved = parse_dtype(dtype)
    if resolved == _FLOAT64 and not _x64():
        raise ValueError(
            "casting to float64 needs 64-bit types, which are off: "
            'call jax.config.update("jax_enable_x64", True) before any JAX computation.'
        )
    return resolved


def _cast_leaves(
    leaves: Sequence[MarkedLeaf], kept: Sequence[bool], dtype: np.dtype, float64: bool
) -> list[Any]:
    # Parameters tied by identity stay tied: one cast for each distinct array. Whether it is kept is
    # part of the key, because a rule may keep one of two paths to the same array.
    done: dict[tuple[int, bool], Any] = {}
    out: list[Any] = []
    for (_, leaf, _), keep in zip(leaves, kept, strict=True):
        if is_castable(leaf, float64=float64 or dtype == _FLOAT64):
            key = (id(leaf), keep)
            if key not in done:
                done[key] = _strong(leaf) if keep else _cast_leaf(leaf, dtype)
            leaf = done[key]
        out.append(leaf)
    return out


@checked
def cast_tree(tree: T, dtype: DTypeLike, *, keep: Sequence[str] = (), float64: bool = False) -> T:
    """Cast the floating-point array leaves of a pytree.

    Integers, booleans, PRNG keys, complex arrays, strings, functions and every other leaf pass
    untouched. NumPy arrays stay NumPy arrays, `ShapeDtypeStruct`s stay abstract, and leaves that
    are one array stay one array.

    Args:
        tree: Any pytree.
        dtype: The target: a dtype or a name such as `"bf16"`.
        keep: Rules for paths below `tree` that are left alone, such as `"**/running_var"`.
        float64: Whether float64 leaves are cast too (with x64 on; without it there are none).

    Returns:
        The tree with its leaves cast.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp

        tree = {"w": jnp.ones((2, 2)), "ids": jnp.arange(3), "key": jax.random.key(0)}
        cast = halfstep.cast_tree(tree, "bf16")
        assert cast["w"].dtype == jnp.bfloat16
        assert cast["ids"].dtype == jnp.int32
        ```
    """
    target = check_target(dtype)
    leaves = marked_leaves(tree)
    kept = match_rules(keep, [leaf.path for leaf in leaves])
    return jtu.tree_unflatten(jtu.tree_structure(tree), _cast_leaves(leaves, kept, target, float64))


def cast_to_half_precision(tree: T, dtype: DTypeLike | None = None) -> T:
    """Cast to half precision: `dtype`, or the dtype of the `half_precision` context, or bfloat16.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        assert halfstep.cast_to_half_precision(jnp.ones(2)).dtype == jnp.bfloat16
        with halfstep.half_precision("f16"):
            assert halfstep.cast_to_half_precision(jnp.ones(2)).dtype == jnp.float16
        ```
    """
    return cast_tree(tree, half_dtype() if dtype is None else dtype)


def cast_to_full_precision(tree: T) -> T:
    """Cast to float32.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        tree = {"w": jnp.ones(2, jnp.bfloat16), "step": jnp.arange(2)}
        full = halfstep.cast_to_full_precision(tree)
        assert full["w"].dtype == jnp.float32 and full["step"].dtype == jnp.int32
        ```
    """
    return cast_tree(tree, jnp.float32)


def cast_to_float16(tree: T) -> T:
    """Cast to float16.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        assert halfstep.cast_to_float16({"w": jnp.ones(2)})["w"].dtype == jnp.float16
        ```
    """
    return cast_tree(tree, jnp.float16)


def cast_to_bfloat16(tree: T) -> T:
    """Cast to bfloat16.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        assert halfstep.cast_to_bfloat16({"w": jnp.ones(2)})["w"].dtype == jnp.bfloat16
        ```
    """
    return cast_tree(tree, jnp.bfloat16)


def cast_to_float32(tree: T) -> T:
    """Cast to float32.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        half = {"w": jnp.ones(2, jnp.float16)}
        assert halfstep.cast_to_float32(half)["w"].dtype == jnp.float32
        ```
    """
    return cast_tree(tree, jnp.float32)


def cast_arguments(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtype: DTypeLike,
    *,
    keep: Sequence[str] = (),
    float64: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast one call's arguments, except persistent state and the leaves that `keep` selects."""
    target = check_target(dtype)
    call = Arguments(func, args, kwargs)
    selected = call.select(keep)
    kept = [leaf.is_state or chosen for leaf, chosen in zip(call.leaves, selected, strict=True)]
    return call.rebuild(_cast_leaves(call.leaves, kept, target, float64))


def _cast_result(result: T, dtype: DTypeLike) -> T:
    leaves = marked_leaves(result)
    cast = _cast_leaves(leaves, [leaf.is_state for leaf in leaves], check_target(dtype), False)
    return jtu.tree_unflatten(jtu.tree_structure(result), cast)


@checked
def cast_function(
    func: Callable[..., T],
    dtype: DTypeLike,
    return_dtype: DTypeLike | None = None,
    *,
    keep: Sequence[str] = (),
) -> Callable[..., T]:
    """Wrap a function so that its arguments and its results are cast.

    Persistent state (`eqx.nn.State`, NNX variables that are not parameters, `batch_stats` ...)
    keeps its dtype on the way in and on the way out.

    Args:
        func: Any function of pytrees.
        dtype: The dtype to cast floating-point arguments to.
        return_dtype: The dtype to cast floating-point results to; `None` leaves them as they are.
        keep: Rules for arguments that are left alone. Paths begin with the function's own
            parameter names: `("batch/targets", "**/running_var")`.

    Returns:
        A function of the same arguments.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def matmul(a, b):
            return a @ b


        fast = halfstep.cast_function(matmul, "bf16", return_dtype="f32")
        assert fast(jnp.ones((2, 2)), jnp.ones((2, 2))).dtype == jnp.float32
        ```
    """
    # A wrong dtype raises an error here, where it is written, and not at the first call.
    check_target(dtype)
    if return_dtype is not None:
        check_target(return_dtype)

    def cast(*args: Any, **kwargs: Any) -> T:
        args, kwargs = cast_arguments(func, args, kwargs, dtype, keep=keep)
        result = func(*args, **kwargs)
        return result if return_dtype is None else _cast_result(result, return_dtype)

    return refusing(cast_function, option_names(cast_function), func, cast)
