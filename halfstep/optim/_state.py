"""The state of a compressed optimizer: its arrays, their size, and checks that they fit."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, PyTree

from halfstep._base import is_inexact, path_string, type_of
from halfstep.optim._layout import ArrayOrShape, StateOptions
from halfstep.quant import CODES, Groups, Quantized
from halfstep.quant._codes import Code
from halfstep.quant._groups import SIZE, groups_between
from halfstep.quant._nibbles import stored_shape

Moment = Quantized | ArrayOrShape | None
"""A moment of one leaf: coded, in float32, or not stored at all."""


class FlashState(NamedTuple):
    """The state of a compressed optimizer: plain arrays, in trees like the parameters' tree.

    A leaf of a moment is a `quant.Quantized` (codes and scales). It is a float32 array for
    parameters that are small or named in `keep`, and `None` where nothing is stored.

    Example:
        ```python
        import jax.numpy as jnp
        from halfstep import optim

        params = {"w": jnp.ones((128, 64)), "b": jnp.zeros(64)}
        params, state = optim.flash_adamw(1e-3).prepare(params)
        assert isinstance(state, optim.FlashState) and state.count == 0
        assert state.low["w"].dtype == jnp.int8
        assert state.first["w"].codes.dtype == jnp.int8
        # Too small to be worth it: a float32 parameter with float32 moments.
        assert state.low["b"] is None and state.first["b"].dtype == jnp.float32
        ```
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of steps that have been applied."""
    low: Any
    """The bits that bfloat16 parameters lack: int8 for a master of 24 bits, int16 for one of 32."""
    first: Any
    """First moments, or momenta."""
    second: Any
    """Second moments."""


def coded(state: Any) -> list[Quantized]:
    """Return the arrays of a state that are stored in codes.

    Args:
        state: The state of any optimizer.

    Example:
        ```python
        import jax.numpy as jnp
        from halfstep import optim

        params = {"w": jnp.ones((128, 64)), "b": jnp.zeros(64)}
        state = optim.flash_adam(1e-3).init(params)
        # Both moments of `w`; those of `b` are too small.
        assert [x.codes.shape for x in optim.coded(state)] == [(128, 64), (128, 64)]
        ```
    """
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Quantized))
    return [leaf for leaf in leaves if isinstance(leaf, Quantized)]


def stored_bytes(*trees: Any) -> int:
    """Count the bytes that the arrays of trees take. A sharded array counts once, over all devices.

    Args:
        *trees: Trees of arrays or of shapes, such as parameters and an optimizer's state.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from halfstep import optim

        params = jax.eval_shape(lambda: {"w": jnp.zeros((4096, 4096))})
        made = jax.eval_shape(optim.flash_adamw(1e-3).prepare, params)
        assert optim.stored_bytes(made) / 4096**2 < 5.1251
        ```
    """
    leaves = [leaf for leaf in jax.tree.leaves(trees) if hasattr(leaf, "dtype")]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def check_kind(state: object, kind: type, maker: str) -> None:
    """Raise unless a state is of the class that an optimizer makes."""
    if not isinstance(state, kind):
        raise StateError(
            f"`optimizer_state` must be a {kind.__name__}, as `init` of {maker} returns it; got "
            f"{type(state).__name__}, of another optimizer. Make it with optimizer.init(params)."
        )


class StateError(ValueError):
    """A state does not fit the optimizer or the parameters. The message says where and how.

    Example:
        ```python
        import jax.numpy as jnp
        from halfstep import optim

        params = {"w": jnp.ones(8)}
        state = optim.flash_lion(1e-4).init(params)
        try:
            optim.flash_adam(1e-3).step(params, state, params)
        except optim.StateError as error:
            message = str(error)
        assert "made by another optimizer" in message
        ```
    """


def check_state(
    options: StateOptions, moments: tuple[bool, bool], params: PyTree, state: object
) -> tuple[FlashState, list[Groups | None]]:
    """Check a state, and return it with the groups in which each leaf is stored.

    Raises:
        StateError: If the state was made by another optimizer, or with other options.
    """
    if not isinstance(state, FlashState):
        raise StateError(
            "the state must be a FlashState, as `init` or `prepare` returns it; "
            f"got {type(state).__name__}."
        )
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    try:
        fields = [treedef.flatten_up_to(f) for f in (state.low, state.first, state.second)]
    except ValueError as error:
        raise StateError(
            "the state was made for parameters of another structure; call `init` with these, or "
            f"restore those that it was saved with. {error}"
        ) from None
    groups = [
        _check_leaf(path_string(path), leaf, low, (first, second), moments, options)
        for (path, leaf), low, first, second in zip(flat, *fields, strict=True)
    ]
    return state, groups


def _check_leaf(
    path: str,
    leaf: PyTree,
    low: ArrayOrShape | None,
    found: tuple[Moment, Moment],
    moments: tuple[bool, bool],
    options: StateOptions,
) -> Groups | None:
    if not is_inexact(leaf):
        return None
    _check_low(path, leaf, low, options)
    groups: list[Groups | None] = []
    for name, moment, has in zip(("first", "second"), found, moments, strict=True):
        if has != (moment is not None):
            raise StateError(
                f"this optimizer stores {'a' if has else 'no'} {name} moment; the state of {path} "
                f"has {'one' if moment is not None else 'none'}. It was made by another optimizer, "
                "or by one with other options: use that one, or call `init` anew."
            )
        if moment is not None:
            code = CODES[options.codes[name == "second"]]
            groups.append(_groups_of(path, leaf, name, moment, code))
    if not groups:
        # Without moments nothing is coded, and a plain step updates the leaf.
        return None
    if len(set(groups)) > 1:
        raise StateError(
            f"the moments of {path} must be divided alike; got {groups}. Pass a state as `init` or "
            "`prepare` returns it."
        )
    return groups[0]


def _check_low(
    path: str, leaf: ArrayOrShape, low: ArrayOrShape | None, options: StateOptions
) -> None:
    wanted = options.low_dtype if leaf.dtype == jnp.bfloat16 else None
    got = None if low is None else np.dtype(low.dtype)
    if got != wanted:
        names = {None: "none", np.dtype(np.int8): "24 bits", np.dtype(np.int16): "32 bits"}
        raise StateError(
            f"the master of {path}, {type_of(leaf)}, must be of "
            f"{names[wanted]} (master_bits={options.master_bits}); the state has "
            f"{names.get(got, got)}. Pass the master_bits that the state was made with, and "
            "parameters of the dtype that they had."
        )


def _groups_of(
    path: str, leaf: ArrayOrShape, name: str, moment: Quantized | ArrayOrShape, code: Code
) -> Groups | None:
    is_coded = isinstance(moment, Quantized)
    groups = groups_between(leaf.shape, moment.scale.shape) if is_coded else None
    array = moment.codes if is_coded else moment
    if is_coded and groups is not None and array.dtype != code.dtype:
        bits = 12 - code.bits
        raise StateError(
            f"the {name} moment of {path} must be in {code.bits} bits (moment_bits={code.bits}); "
            f"the state has {type_of(array)}. Pass moment_bits={bits} if it was made with it."
        )
    shape = leaf.shape if groups is None else stored_shape(leaf.shape, code, groups)
    if array.shape != shape or (is_coded and groups is None):
        raise StateError(
            f"the {name} moment of {path} must be of shape {list(leaf.shape)}, with a scale for "
            f"every {SIZE} elements of one axis if it is coded; got {type_of(array)}. The state "
            "was made for other parameters."
        )
    return groups
