"""Check whether everything is finite: one global answer, the first bad leaf, and the cause."""

import contextlib
import functools
from collections.abc import Generator, Hashable, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float32, Int, PyTree, UInt

from halfstep._base import is_inexact, is_state_node, path_string, with_values

# Annotations of fields hold under vmap too, where each of these scalars has a batch axis.
BoolLike: TypeAlias = Bool[Array, "..."]
IntLike: TypeAlias = Int[Array, "..."]


# A leaf is read in its own width where there are unsigned integers of that width: converting 16-bit
# gradients first would double what is read and written.
_UNSIGNED = MappingProxyType({2: jnp.uint16, 4: jnp.uint32})


# Vectors of at most this many elements (biases, norms) are copied next to those of the same type,
# and read together: each reduction of its own is a kernel, and most leaves of a model are vectors.
_SMALL = 4096


def _tops(leaf: Array, axes: Sequence[int]) -> tuple[UInt[Array, "..."], np.dtype]:
    """Return the bits of the largest magnitudes along axes, shifted left by the sign, and a dtype.

    This is a maximum of integers, because a maximum of floats loses NaN (seen in XLA:CPU's
    vectorized reduction), and because it compiles to fewer instructions than a conjunction of
    `isfinite`. Infinities and NaN have the largest bits of all.
    """
    if leaf.dtype.itemsize > 4 or leaf.size == 0:
        # No 32-bit word holds a float64 or complex number, and an empty leaf has no maximum.
        finite = jnp.all(jnp.isfinite(leaf), axis=tuple(axes))
        leaf, axes = jnp.where(finite, np.float32(0), np.float32(np.inf)), ()
    elif leaf.dtype.itemsize not in _UNSIGNED:
        leaf = leaf.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize])
    # The shift drops the highest bit, which is the sign.
    top = jax.lax.reduce_max(jax.lax.shift_left(bits, bits.dtype.type(1)), tuple(axes))
    return top, leaf.dtype


def magnitudes(tree: PyTree) -> Float32[Array, " leaves"]:
    """Return the largest magnitude of each inexact leaf; not finite if any number in it is not.

    For a leaf that float32 cannot hold (float64, complex), the result is 0 if the leaf is finite,
    and infinity otherwise.
    """
    leaves = [jnp.asarray(leaf) for leaf in jtu.tree_leaves(tree) if is_inexact(leaf)]
    # Leaves that are read together, by their type: it includes how they are divided over a mesh.
    together: dict[Hashable, list[int]] = {}
    for index, leaf in enumerate(leaves):
        is_small = leaf.ndim == 1 and leaf.size <= _SMALL
        together.setdefault(jax.typeof(leaf) if is_small else index, []).append(index)
    # Back to floats as one vector per dtype, and then into the order of the leaves: one conversion
    # per leaf would be hundreds of small operations in a large model.
    by_dtype: dict[np.dtype, tuple[list[int], list[Array]]] = {}
    for indices in together.values():
        stacked = jnp.stack([leaves[index] for index in indices])
        tops, dtype = _tops(stacked, range(1, stacked.ndim))
        places, found = by_dtype.setdefault(dtype, ([], []))
        places += indices
        found.append(tops)
    if not by_dtype:
        return jnp.zeros(0, jnp.float32)
    order = [index for indices, _ in by_dtype.values() for index in indices]
    values = [
        jax.lax.bitcast_convert_type(jnp.concatenate(found) >> 1, dtype).astype(jnp.float32)
        for dtype, (_, found) in by_dtype.items()
    ]
    joined = jnp.concatenate(values)
    return joined if order == sorted(order) else joined[np.argsort(order)]


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Return whether every floating-point or complex number in a pytree is finite.

    Integers, keys, strings and other leaves do not count; an empty tree is finite. On sharded
    arrays under `jit` the answer is global.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        assert halfstep.all_finite({"a": jnp.ones(3), "ids": jnp.arange(3)})
        assert not halfstep.all_finite([jnp.array([1.0, jnp.inf])])
        ```
    """
    return jnp.all(jnp.isfinite(magnitudes(tree)))


_INSIDE = (
    "halfstep: within a compiled function the verdict is not known yet. Return it and ask on the "
    "host; inside, hand it to optimizer_update, transaction or select_tree."
)


class Verdict(eqx.Module):
    """The answer of a gradient transform to "may this step be applied?".

    Use it as a boolean, hand it to `optimizer_update`, `transaction` or `select_tree`, and ask it
    on the host what went wrong. A verdict that was never computed (`checked` is false: with
    `NoLossScaling` no check is compiled unless asked for) applies every step, and refuses to say
    "finite".

    `first & second` combines two verdicts, or a verdict and a condition of your own (the verdict
    first: an array on the left makes an array), into a verdict that says which is false. Its
    `where` and `reason` take one tree for all of them, or a sequence of trees, one per verdict. For
    `jax.lax.cond`, write `jnp.asarray(verdict)`.

    Attributes:
        finite: Whether the loss and all gradients are finite; `None` if not checked.
        loss_finite: Whether the loss itself is finite; `None` if not checked.
        first_leaf: Index of the first gradient leaf that is not finite, -1 if there is none.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def loss(params, x):
            return jnp.sum(params["w"] * x) + jnp.sum(params["b"])


        params = {"b": jnp.ones(2), "w": jnp.ones(2)}
        scaling = halfstep.DynamicLossScaling()
        gradient = halfstep.filter_grad(loss, scaling, policy="f16:inputs")
        _, finite, _ = gradient(params, jnp.array([1.0, 3.0]))  # 3 * 2**15 is above 65504
        assert not finite
        assert finite.where(params) == "w"
        assert "scaled gradients" in finite.reason(params)
        ```
    """

    finite: BoolLike | None
    loss_finite: BoolLike | None
    first_leaf: IntLike | None

    @property
    def checked(self) -> bool:
        """Whether finiteness was computed at all. Static: known while tracing."""
        return self.finite is not None

    def __repr__(self) -> str:
        return with_values(self)

    @staticmethod
    def _boolean(value: "Verdict | ArrayLike") -> ArrayLike:
        return value._known() if isinstance(value, Verdict) else value

    def _known(self) -> Array:
        if self.finite is None:
            raise ValueError(
                "finiteness was not checked: NoLossScaling compiles no check. Pass "
                "check_finite=True to filter_grad or filter_value_and_grad to know it."
            )
        return self.finite

    def __bool__(self) -> bool:
        with _told_where():
            return bool(self._known())

    def __jax_array__(self) -> Array:
        return self._known()

    def __invert__(self) -> Array:
        return jnp.logical_not(self._known())

    def __and__(self, other: "Verdict | ArrayLike") -> "Verdict":
        return _CombinedVerdict.of(self, other)

    def __rand__(self, other: ArrayLike) -> "Verdict":
        return _CombinedVerdict.of(other, self)

    def __or__(self, other: "Verdict | ArrayLike") -> Array:
        return jnp.logical_or(self._known(), self._boolean(other))

    __ror__ = __or__

    def where(self, tree: Any) -> str | None:
        """Return the path of the first non-finite gradient leaf, or `None`. On the host.

        Args:
            tree: The gradients, or the model they belong to.
        """
        self._known()
        with _told_where():
            index = int(np.asarray(self.first_leaf))
        if index < 0:
            return None
        # State within a model, as NNX has it, has no gradient and was not counted.
        trained = jtu.tree_map(
            lambda node: None if is_state_node(node) else node, tree, is_leaf=is_state_node
        )
        leaves = jtu.tree_flatten_with_path(eqx.filter(trained, eqx.is_inexact_array))[0]
        if index >= len(leaves):
            raise ValueError(
                f"the verdict names leaf {index}, but `tree` has {len(leaves)} inexact array "
                "leaves: pass the gradients or the model they were taken of."
            )
        return path_string(leaves[index][0]) or "the gradient itself"

    def reason(self, tree: Any = None) -> str:
        """Say in one sentence what happened and what to look at. On the host.

        Args:
            tree: The gradients or the model, to name the leaf by its path.
        """
        if not self.checked:
            return "not checked: NoLossScaling compiles no check unless check_finite=True."
        if self:
            return "finite: the loss and every gradient."
        named = f"leaf {int(np.asarray(self.first_leaf))}" if tree is None else self.where(tree)
        at = "" if int(np.asarray(self.first_leaf)) < 0 else f" First non-finite gradient: {named}."
        if not bool(self.loss_finite):
            return (
                "the loss itself is not finite, before any scaling: bad data in the batch, or an "
                f"overflow in the forward pass. A smaller loss scale does not help.{at}"
            )
        if not at:
            return (
                "the loss and every gradient are finite, but the norm of all gradients is not: "
                "their squares overflow float32. Look for gradients above 1e19, for example with "
                "debug.record."
            )
        return (
            "the loss is finite but the gradients are not: scaled gradients overflowed on the way "
            "back, which a smaller loss scale cures, or a derivative is infinite, as those of sqrt "
            f"and norm at 0, which debug.first_nonfinite finds.{at}"
        )


class _CombinedVerdict(Verdict):
    """Verdicts and conditions that all have to be true.

    `first_leaf` is that of the only verdict among the parts; for several verdicts it is -1, because
    their leaves may be those of different models, and the parts know.
    """

    parts: tuple[Verdict, ...]

    @staticmethod
    def of(left: Verdict | ArrayLike, right: Verdict | ArrayLike) -> "_CombinedVerdict":
        """Combine two verdicts, or a verdict and a condition."""
        parts = (*_parts(left), *_parts(right))
        leaves = [part.first_leaf for part in parts if part.first_leaf is not None]
        losses = [part.loss_finite for part in parts if part.loss_finite is not None]
        finite = functools.reduce(jnp.logical_and, [part._known() for part in parts])
        loss = functools.reduce(jnp.logical_and, losses)
        leaf = leaves[0] if len(leaves) == 1 else jnp.full_like(finite, -1, jnp.int32)
        return _CombinedVerdict(finite, loss, leaf, parts)

    def where(self, tree: Any) -> str | None:
        found = self._first_false(tree)
        return None if found is None or found[1].first_leaf is None else found[1].where(found[2])

    def reason(self, tree: Any = None) -> str:
        found = self._first_false(tree)
        if found is None:
            return "finite: the loss and every gradient."
        number, part, own = found
        said = "a condition is false." if part.loss_finite is None else part.reason(own)
        return f"part {number + 1} of {len(self.parts)}: {said}"

    def _first_false(self, tree: Any) -> tuple[int, Verdict, Any] | None:
        """Return the first part that is false: its number, itself and its tree."""
        judged = [part for part in self.parts if part.loss_finite is not None]
        each = isinstance(tree, list | tuple) and len(judged) > 1 and len(tree) == len(judged)
        trees = iter(tree if each else [tree] * len(judged))
        for number, part in enumerate(self.parts):
            own = None if part.loss_finite is None else next(trees)
            if not part:
                return number, part, own
        return None


def _parts(value: Verdict | ArrayLike) -> tuple[Verdict, ...]:
    if isinstance(value, _CombinedVerdict):
        return value.parts
    if isinstance(value, Verdict):
        return (value,)
    condition = jnp.asarray(value)
    if condition.dtype != bool:
        raise TypeError(
            f"verdict & condition: required a boolean; got {condition.dtype} of shape "
            f"{condition.shape}. Compare first, such as `finite & (loss < 100)`."
        )
    return (Verdict(condition, None, None),)


@contextlib.contextmanager
def _told_where() -> Generator[None, None, None]:
    """Add advice to JAX's error about a value that is not known yet."""
    try:
        yield
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
    ) as error:
        error.add_note(_INSIDE)
        raise


def as_predicate(finite: object, name: str = "finite") -> jax.Array | np.ndarray | bool | None:
    """Return a verdict or a boolean as a predicate; `None` for "not checked, always apply".

    Args:
        finite: The verdict or the boolean.
        name: The name of the parameter, for the message.

    Raises:
        TypeError: If `finite` is neither.
    """
    if isinstance(finite, Verdict):
        return finite.finite
    if isinstance(finite, bool | np.bool_):
        return bool(finite)
    dtype, shape = getattr(finite, "dtype", None), getattr(finite, "shape", None)
    if dtype != np.dtype(bool) or shape != ():
        raise TypeError(
            f"`{name}`: required a boolean scalar or the verdict of a gradient transform; got "
            f"{type(finite).__name__} of dtype {dtype} and shape {shape}. "
            "For arrays, reduce first: halfstep.all_finite(tree)."
        )
    predicate: Any = finite
    return predicate


def unchecked() -> Verdict:
    """Return the verdict that was never computed."""
    return Verdict(None, None, None)


def finite_flags(grads: Float32[Array, " leaves"], loss: Array) -> Bool[Array, " leaves_and_loss"]:
    """Return one flag per gradient leaf, from the magnitudes, and at the end that of the loss."""
    return jnp.concatenate([jnp.isfinite(grads), jnp.isfinite(loss)[None]])


def judge(flags: Bool[Array, " leaves_and_loss"]) -> Verdict:
    """Make a verdict from the flags of `finite_flags`."""
    grads, loss = flags[:-1], flags[-1]
    if not grads.size:
        return Verdict(loss, loss, jnp.full_like(loss, -1, jnp.int32))
    # The first `False`: `argmin` returns the first of equal values.
    first = jnp.where(jnp.all(grads), -1, jnp.argmin(grads).astype(jnp.int32))
    return Verdict(jnp.all(flags), loss, first)
