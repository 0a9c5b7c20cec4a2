"""Name the leaves of a state, convert them for Orbax, and compare those of a step with `like`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from halfstep._base import DamagedFolderError
from halfstep.integrations._orbax._errors import CheckpointError
from halfstep.integrations._orbax._json_values import decoded, encoded

_SHOWN = 5
_Array = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct


class StateLeaf(NamedTuple):
    """One leaf of a state, or of the `like` that describes a state to restore."""

    name: str
    value: Any
    kind: str
    """`array`, `key` (typed PRNG keys), `value` (Python's numbers and strings) or `other`."""

    def about(self) -> dict[str, Any]:
        """Describe the leaf for the manifest, without its digest."""
        if self.kind == "array":
            return _about_array(self.value)
        if self.kind == "key":
            data = jax.eval_shape(jax.random.key_data, self.value)
            return {**_about_array(data), "keys": str(key_impl(self.value))}
        if self.kind == "value":
            value = encoded(self.value, f"`{self.name}`")
            return {"python": type(self.value).__name__, "value": value}
        return {"other": type(self.value).__name__}


def leaves_of(tree: object) -> list[StateLeaf]:
    """Return the leaves of a tree, named as Python would reach them: `.model.layers[0].weight`.

    Raises:
        CheckpointError: If two leaves have the same name.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [
        StateLeaf(jax.tree_util.keystr(path) or ".", leaf, kind_of(leaf)) for path, leaf in found
    ]
    names = [leaf.name for leaf in leaves]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(
            f"two leaves of the state are both named `{twice}`, so they could not be told apart. "
            "Register the node with keys (jax.tree_util.register_pytree_with_keys)."
        )
    return [
        StateLeaf(name, leaf, kind_of(leaf)) for name, (_, leaf) in zip(names, found, strict=True)
    ]


def kind_of(leaf: object) -> str:
    """Return how a leaf is stored; see `StateLeaf`."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return "key" if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else "array"
    # Orbax stores only arrays of numbers: no objects, strings, dates and records.
    if isinstance(leaf, np.ndarray | np.generic):
        return "array" if leaf.dtype.kind not in "OSUMm" and not leaf.dtype.fields else "other"
    return "value" if isinstance(leaf, bool | int | float | complex | str) else "other"


def key_impl(keys: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """Return the implementation of PRNG keys; their shape alone is enough."""
    # `jax.random.key_impl` needs keys, and `like` may have only their shape. Tracing makes keys
    # from a shape.
    found = []

    def look(keys: jax.Array) -> jax.Array:
        found.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    jax.eval_shape(look, keys)
    return found[0]


def describe(about: dict[str, Any]) -> str:
    """Describe a leaf in words, for errors."""
    if "keys" in about:
        return f"{about['keys']} keys as {about['dtype']}{about['shape']}"
    if "dtype" in about:
        return f"{about['dtype']}{about['shape']}"
    if "python" in about:
        return f"a Python {about['python']}"
    return f"a {about['other']}, which is not stored"


def as_python(about: Mapping[str, Any]) -> Any:
    """Return the Python number or string that a manifest describes.

    Raises:
        DamagedFolderError: If the manifest names another type than the value has.
    """
    value = about["value"]
    if about["python"] == "complex" and isinstance(value, list):
        # The first format stored complex numbers as lists.
        value = {"complex": value}
    found = decoded(value, "a leaf of the manifest")
    if type(found).__name__ != about["python"]:
        raise DamagedFolderError(
            f"a leaf of the manifest is a {type(found).__name__}, and said to be a Python "
            f"{about['python']}"
        )
    return found


def is_empty(about: dict[str, Any]) -> bool:
    """Return whether an array has no elements; Orbax does not store such arrays."""
    return 0 in about["shape"]


def _about_array(array: _Array) -> dict[str, Any]:
    return {"dtype": str(np.dtype(array.dtype)), "shape": list(array.shape)}


# Conversion for Orbax and back, onto the shardings of `like`.


def stored_form(leaf: StateLeaf) -> jax.Array | np.ndarray:
    """Return the array to give to Orbax: one over all processes, or NumPy's."""
    if leaf.kind == "key":
        return stored_form(StateLeaf(leaf.name, jax.random.key_data(leaf.value), "array"))
    if not isinstance(leaf.value, jax.Array):
        return np.asarray(leaf.value)
    # An array that each process has by itself is the same on all processes, which is checked.
    # Process 0 writes it.
    return np.asarray(leaf.value) if _is_of_one_process(leaf.value) else _readable(leaf.value)


def _readable(array: jax.Array) -> jax.Array:
    """Return the array in a form whose shards can be read.

    JAX 0.10 cannot list the shards of an array that `jax.device_put` has replicated over several
    processes.
    """
    try:
        array.addressable_shards  # noqa: B018
    except ValueError:
        return jax.jit(lambda x: x, out_shardings=array.sharding)(array)
    return array


def is_local(leaf: StateLeaf) -> bool:
    """Return whether each process has its own copy of a leaf, so that copies could differ."""
    return not isinstance(leaf.value, jax.Array) or leaf.value.is_fully_addressable


def _is_of_one_process(array: jax.Array) -> bool:
    return jax.process_count() > 1 and array.is_fully_addressable


def restore_args(like: StateLeaf) -> ocp.RestoreArgs:
    """Return the arguments with which Orbax reads a leaf."""
    sharding = _sharding(like)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)


def _sharding(like: StateLeaf) -> Any:
    """Return the sharding that Orbax reads onto; `None` for arrays that are read as NumPy's."""
    leaf = like.value
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or leaf.sharding is None:
        return None
    if isinstance(leaf, jax.Array) and (_is_of_one_process(leaf) or not leaf.committed):
        return None
    if like.kind == "key" and isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf).sharding
    return leaf.sharding


def finished(like: StateLeaf, array: jax.Array | np.ndarray) -> Any:
    """Convert an array that was read to the kind of the leaf that it replaces."""
    leaf = like.value
    if isinstance(leaf, np.generic):
        return array[()]
    if isinstance(leaf, np.ndarray):
        return array
    if like.kind == "key":
        data = array if isinstance(array, jax.Array) else jnp.asarray(array)
        return jax.random.wrap_key_data(data, impl=key_impl(leaf))
    if isinstance(array, jax.Array):
        return array
    # Only an array that was committed to a device goes back to it; the others follow the default.
    placed = isinstance(leaf, jax.Array) and leaf.committed
    return jax.device_put(array, leaf.sharding) if placed else jnp.asarray(array)


def empty(about: dict[str, Any]) -> np.ndarray:
    """Return an array without elements, which Orbax does not store."""
    return np.zeros(about["shape"], jnp.dtype(about["dtype"]))


# Check that a step has the leaves of `like`, in the same dtypes and shapes.


def check_leaves(
    like: Sequence[StateLeaf], saved: Mapping[str, Mapping[str, Any]], step: int, folder: str
) -> None:
    """Raise unless all leaves fit.

    Raises:
        CheckpointError: If a leaf does not fit. The message says what is stored, what was asked
            for, and what to do.
    """
    asked = {leaf.name for leaf in like}
    lacking = [name for name in asked if name not in saved]
    beyond = [name for name in saved if name not in asked]
    if lacking or beyond:
        parts = []
        if lacking:
            parts.append(f"`like` has {_listed(sorted(lacking))}, which the step has not")
        if beyond:
            parts.append(f"the step has {_listed(sorted(beyond))}, which `like` has not")
        raise CheckpointError(
            f"step {step} in {folder} is of another structure: {'; '.join(parts)}. Make `like` "
            "the way the state was made that was saved: the same model, optimizer and policy."
        )
    wrong = [leaf for leaf in like if not _fits(leaf, saved[leaf.name])]
    if wrong:
        leaf, stored = wrong[0], dict(saved[wrong[0].name])
        others = f" {len(wrong) - 1} more leaves differ." if len(wrong) > 1 else ""
        raise CheckpointError(
            f"`{leaf.name}` of step {step} in {folder} is stored as {describe(stored)}; `like` "
            f"asks for {describe(leaf.about())}, and nothing is cast.{others} "
            f"{_advice(leaf, stored)}"
        )


def _fits(leaf: StateLeaf, stored: Mapping[str, Any]) -> bool:
    asked = leaf.about()
    # Values of Python's own leaves may differ, since they are restored. The types of leaves that
    # are not stored do not matter.
    ignored = ("digest", "value", "other")
    kept = {name: value for name, value in stored.items() if name not in ignored}
    return kept == {name: value for name, value in asked.items() if name not in ignored}


def _advice(leaf: StateLeaf, stored: Mapping[str, Any]) -> str:
    if leaf.kind == "array" and "dtype" in stored and "keys" not in stored:
        dtype, shape = stored["dtype"], tuple(stored["shape"])
        return (
            f"Put `jax.ShapeDtypeStruct({shape}, '{dtype}')` there, or an array like that, and "
            "cast what was restored."
        )
    return "Make `like` the way the state was made that was saved."


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
