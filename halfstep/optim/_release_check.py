"""Check that a model can be trained with gradient release, and raise errors if it cannot."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from halfstep._base import Shaped, at_least_float32, is_inexact, path_string, type_of
from halfstep.optim._state import StateError


def check_params(params: PyTree) -> int:
    """Check the parameters, and return the number of layers.

    Raises:
        TypeError: If the parameters are not divided into a stack and the others.
        ValueError: If the stacked arrays have different lengths.
    """
    if not isinstance(params, dict) or set(params) != {"outer", "layers"}:
        got = sorted(map(str, params)) if isinstance(params, dict) else type(params).__name__
        raise TypeError(
            "`params` must be a dict of 'layers', arrays with a first axis of layers, and "
            f"'outer', all parameters outside the stack; got {got}. Without any of these, pass "
            "{'outer': {}, 'layers': layers}."
        )
    lengths: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"]):
        name = path_string(path, root="layers")
        if not getattr(leaf, "shape", ()):
            raise ValueError(
                "every leaf of 'layers' must be an array with a first axis of layers; got "
                f"{name}: {type(leaf).__name__} without axes. Stack it, or put it in 'outer'."
            )
        lengths.setdefault(leaf.shape[0], f"{name} {list(leaf.shape)}")
    if len(lengths) != 1 or 0 in lengths:
        found = ", ".join(lengths.values()) or "no arrays"
        raise ValueError(
            "all arrays of 'layers' must have the same number of layers on their first axis, one "
            f"or more; got {found}. Parameters that are not stacked go in 'outer'."
        )
    leaves = jax.tree.leaves(params["layers"])
    if not any(is_inexact(leaf) for leaf in leaves):
        found = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
        raise ValueError(f"'layers' must hold floating-point arrays to train; got only {found}.")
    return next(iter(lengths))


def check_stacked(state: PyTree, length: int) -> None:
    """Raise unless every array of an optimizer's state has a first axis of layers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not hasattr(leaf, "shape") or leaf.shape[:1] != (length,):
            got = type_of(leaf) if hasattr(leaf, "shape") else repr(leaf)
            raise StateError(
                f"every array of the layers' state must have {length} layers on its first axis, so "
                f"that one layer can step alone; got {path_string(path)}: {got}. Make the state "
                "with this step's `init` or `prepare`, and not with the optimizer's own."
            )


def check_step(before: PyTree, after: PyTree) -> None:
    """Raise unless an optimizer keeps the types of parameters and state."""
    said = _difference(before, after)
    if said:
        raise StateError(
            "an optimizer must keep the structure, shapes and dtypes of parameters and state, "
            f"which are updated in place; {said}. A state in float32 does it for optimizers that "
            "compute in it: initialize with float32 parameters."
        )


def check_input(x: PyTree) -> None:
    """Raise unless every array that goes through the layers can be differentiated."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not is_inexact(leaf):
            raise TypeError(
                "what goes through the layers must be floating-point arrays; got "
                f"{_shown(leaf)} at `{path_string(path) or 'its root'}`. Layers get the batch as "
                "their last argument: put masks, positions and keys there."
            )
    if not jax.tree.leaves(x):
        raise TypeError(
            f"`first` must return the arrays that enter the first layer; got {x!r}, without any."
        )


def check_layer(before: PyTree, after: PyTree) -> None:
    """Raise unless a layer returns an output that the next layer takes as its input."""
    said = _difference(before, after)
    if said:
        raise TypeError(
            "a layer must return what it gets, in structure, shape and dtype, since the next layer "
            f"is the same function; {said}. Convert what it returns with astype(x.dtype); what "
            "changes the shape belongs into `first` or `last`."
        )


def check_loss(loss: object) -> jax.Array:
    """Return the loss in float32 or wider.

    Raises:
        TypeError: If the loss is not a real scalar.
    """
    dtype, shape = getattr(loss, "dtype", None), getattr(loss, "shape", None)
    if dtype is None or shape != () or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            "`last` must return the loss, a real floating-point scalar; got "
            f"{_shown(loss)}. Reduce it, for example with jnp.mean."
        )
    return jnp.asarray(loss, at_least_float32(dtype))


def check_limit(limit: object, name: str) -> None:
    """Raise unless the largest norm is a positive number, or traced."""
    if isinstance(limit, bool) or (isinstance(limit, int | float) and not limit > 0):
        raise ValueError(f"`{name}` must be a positive number, the largest norm; got {limit!r}.")


def check_function(function: object, name: str, form: str) -> None:
    """Raise unless an argument can be called."""
    if not callable(function):
        raise TypeError(f"`{name}` must be a function, {form}; got {type(function).__name__}.")


def _difference(before: PyTree, after: PyTree) -> str:
    if jax.tree.structure(before) != jax.tree.structure(after):
        return f"{jax.tree.structure(before)} became {jax.tree.structure(after)}"
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            at = path_string(path)
            return f"{_shown(old)} became {_shown(new)}" + (f" at `{at}`" if at else "")
    return ""


def _shown(leaf: object) -> str:
    return type_of(leaf) if isinstance(leaf, Shaped) else type(leaf).__name__
