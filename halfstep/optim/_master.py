"""Train 16-bit parameters with any Optax optimizer: the state keeps the bits they lack."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Int32, Key, PyTree

from halfstep._base import checked, is_inexact, type_of
from halfstep._training import gated
from halfstep.optim._layout import options_of, zeros
from halfstep.optim._state import StateError, check_kind
from halfstep.optim._transform import Transformation, of_models, transformation
from halfstep.quant import join, split, stochastic_round

Kind = Literal["split16", "split8", "float32", "stochastic"]
_KINDS = ("split16", "split8", "float32", "stochastic")


class MasterState(NamedTuple):
    """The bits that 16-bit parameters lack, and the state of the optimizer.

    Example:
        ```python
        import jax.numpy as jnp
        import optax
        from halfstep import optim, quant

        before = jnp.full((128, 64), 0.1)
        params, state = optim.master(optax.sgd(1e-3), "split16").prepare({"w": before})
        assert isinstance(state, optim.MasterState)
        assert params["w"].dtype == jnp.bfloat16 and state.rest["w"].dtype == jnp.int16
        assert (quant.join(params["w"], state.rest["w"]) == before).all()
        ```
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of steps that have been applied."""
    rest: Any
    """Int16, int8 or float32 arrays for the parameters that have 16 bits; otherwise `None`."""
    inner: Any


@checked
def master(
    tx: optax.GradientTransformation,
    kind: Kind = "split16",
    *,
    dtype: DTypeLike = jnp.bfloat16,
    min_size: int | None = None,
    seed: int | None = None,
) -> Transformation:
    """Train 16-bit parameters with any Optax optimizer as if they were float32.

    The optimizer sees float32 parameters and gradients, and has its usual state. Each step joins
    the parameters with the bits that they lack, runs the optimizer, and splits them again.

    | kind | stored in the state | bytes per parameter, including it | master |
    |---|---|---|---|
    | `"split16"` | 16 more bits | 4 | 32 bits, equal to float32 bit for bit |
    | `"split8"` | 8 more bits | 3 | 24 bits |
    | `"float32"` | a float32 copy | 6 | 32 bits |
    | `"stochastic"` | nothing: rounded up or down at random | 2 | none |

    Args:
        tx: The optimizer.
        kind: What the state stores of the parameters, see the table.
        dtype: The dtype to which `prepare` converts float32 parameters. Splits need bfloat16.
        min_size: Parameters with fewer elements stay float32; 4096 by default.
        seed: The random seed for `"stochastic"`.

    Returns:
        An Optax optimizer that also has `step` and `prepare`.

    Example:
        ```python
        import jax.numpy as jnp
        import optax
        from halfstep import optim

        optimizer = optim.master(optax.adamw(1e-3), "split16")
        params, state = optimizer.prepare({"w": jnp.full((128, 64), 0.1)})
        assert params["w"].dtype == jnp.bfloat16
        params, state = optimizer.step(params, state, {"w": jnp.ones((128, 64))})
        ```
    """
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(_KINDS)}; got {kind!r}.")
    half = jnp.dtype(dtype)
    if half not in (jnp.bfloat16, jnp.float16) or (kind.startswith("split") and half == np.float16):
        raise ValueError(
            f"dtype must be bfloat16, or float16 with kind='float32' or 'stochastic'; got "
            f"dtype={half.name}, kind={kind!r}."
        )
    tx = optax.with_extra_args_support(tx)
    options = options_of(min_size=min_size, seed=seed)

    def wide(params: PyTree, rest: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(params)
        pairs = zip(leaves, treedef.flatten_up_to(rest), strict=True)
        return treedef.unflatten([_joined(leaf, more, kind) for leaf, more in pairs])

    def init(params: PyTree) -> MasterState:
        rest = jax.tree.map(lambda leaf: _rest_of(leaf, kind), params)
        return MasterState(jnp.zeros((), jnp.int32), rest, tx.init(wide(params, rest)))

    def prepare(params: PyTree) -> tuple[PyTree, MasterState]:
        leaves, treedef = jax.tree.flatten(params)
        made = [_prepared(leaf, kind, half, options.min_size) for leaf in leaves]
        low = treedef.unflatten([leaf for leaf, _ in made])
        rest = treedef.unflatten([more for _, more in made])
        return low, MasterState(jnp.zeros((), jnp.int32), rest, tx.init(wide(low, rest)))

    def step(
        params: PyTree, state: MasterState, grads: PyTree, finite: object = True, **extra_args: Any
    ) -> tuple[PyTree, MasterState]:
        check_kind(state, MasterState, "`optim.master`")

        def commit(before: tuple[PyTree, MasterState]) -> tuple[PyTree, MasterState]:
            params, state = before
            values = wide(params, state.rest)
            # Gradients of 16-bit parameters are 16-bit, but the optimizer must compute in float32.
            given = jax.tree.map(_like, grads, values)
            updates, inner = tx.update(given, state.inner, values, **extra_args)
            values = optax.apply_updates(values, updates)
            key = jax.random.fold_in(jax.random.key(options.seed), state.count)
            leaves, treedef = jax.tree.flatten(params)
            new = treedef.flatten_up_to(values)
            made = [
                _parted(value, leaf, kind, jax.random.fold_in(key, number))
                for number, (value, leaf) in enumerate(zip(new, leaves, strict=True))
            ]
            low = treedef.unflatten([leaf for leaf, _ in made])
            rest = treedef.unflatten([more for _, more in made])
            return low, MasterState(state.count + 1, rest, inner)

        return gated(finite, commit, (params, state))

    return of_models(transformation(init, step, prepare))


def _is_half(leaf: object) -> bool:
    return getattr(leaf, "dtype", None) in (jnp.bfloat16, jnp.float16)


def _rest_of(leaf: PyTree, kind: str) -> jax.Array | None:
    if not _is_half(leaf) or kind == "stochastic":
        return None
    if kind == "float32":
        return leaf.astype(jnp.float32)
    if leaf.dtype == jnp.float16:
        raise ValueError(
            f"kind={kind!r} splits float32 into bfloat16 and the rest; got a parameter of float16"
            f"{list(leaf.shape)}. Use kind='float32', or keep parameters in float32."
        )
    return zeros(leaf.shape, np.int8 if kind == "split8" else np.int16, leaf)


def _prepared(
    leaf: PyTree, kind: str, half: np.dtype, min_size: int
) -> tuple[PyTree, jax.Array | None]:
    if getattr(leaf, "dtype", None) != jnp.float32 or np.size(leaf) < min_size:
        return leaf, _rest_of(leaf, kind)
    if kind == "float32":
        # This copies: otherwise the state would share a buffer with the caller's array, and
        # donating one of them would delete the other.
        return leaf.astype(half), jnp.array(leaf, copy=True)
    if kind == "stochastic":
        return leaf.astype(half), None
    return split(leaf, bits=8 if kind == "split8" else 16)


def _joined(leaf: PyTree, rest: jax.Array | None, kind: str) -> PyTree:
    if not _is_half(leaf):
        return leaf
    wanted = {"split16": "int16", "split8": "int8", "float32": "float32", "stochastic": None}[kind]
    got = None if rest is None else rest.dtype.name
    if got != wanted:
        raise StateError(
            f"the rest of a parameter of {type_of(leaf)} must be of {wanted} "
            f"for kind={kind!r}; the state has {got}. Pass the kind that it was made with."
        )
    if rest is None:
        return leaf.astype(jnp.float32)
    return rest if kind == "float32" else join(leaf, rest)


def _parted(
    value: PyTree, leaf: PyTree, kind: str, key: Key[Array, ""]
) -> tuple[PyTree, jax.Array | None]:
    if not _is_half(leaf):
        return value, None
    if kind == "float32":
        return value.astype(leaf.dtype), value
    if kind == "stochastic":
        return stochastic_round(value, leaf.dtype, key=key), None
    return split(value, bits=8 if kind == "split8" else 16)


def _like(grad: PyTree, value: PyTree) -> PyTree:
    return grad.astype(value.dtype) if is_inexact(grad) and is_inexact(value) else grad
