"""The leaves of a state by name: which are arrays, and how they are stored."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from halfstep.integrations._orbax._errors import CheckpointError


class Leaf(NamedTuple):
    """One leaf of a state, or of what one is to be restored like."""

    name: str
    value: Any
    kind: str
    """`array`, `key` (typed PRNG keys), `value` (Python's numbers and texts) or `other`."""

    def about(self) -> dict[str, Any]:
        """What a manifest says of it, digests apart."""
        if self.kind == "array":
            return _about_array(self.value)
        if self.kind == "key":
            data = jax.eval_shape(jax.random.key_data, self.value)
            return {**_about_array(data), "keys": str(key_impl(self.value))}
        if self.kind == "value":
            return {"python": type(self.value).__name__, "value": _as_json(self.value)}
        return {"other": type(self.value).__name__}


def leaves_of(tree: Any) -> list[Leaf]:
    """The leaves of a tree, named as Python would reach them: `.model.layers[0].weight`.

    Raises:
        CheckpointError: If two have the same name.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [Leaf(jax.tree_util.keystr(path) or ".", leaf, kind_of(leaf)) for path, leaf in found]
    names = [leaf.name for leaf in leaves]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(
            f"two leaves of the state are both named `{twice}`, so they could not be told apart. "
            "Register the node with keys (jax.tree_util.register_pytree_with_keys)."
        )
    return leaves


def kind_of(leaf: Any) -> str:
    """How a leaf is stored; see `Leaf`."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return "key" if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else "array"
    if isinstance(leaf, np.ndarray | np.generic):
        return "array" if leaf.dtype.kind not in "OSUMm" and not leaf.dtype.fields else "other"
    return "value" if isinstance(leaf, bool | int | float | complex | str) else "other"


def key_impl(keys: Any) -> Any:
    """The implementation of PRNG keys, of their shape alone too."""
    found = []

    def look(keys: Any) -> Any:
        found.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    jax.eval_shape(look, keys)
    return found[0]


def describe(about: dict[str, Any]) -> str:
    """A leaf in words, for errors."""
    if "keys" in about:
        return f"{about['keys']} keys as {about['dtype']}{about['shape']}"
    if "dtype" in about:
        return f"{about['dtype']}{about['shape']}"
    if "python" in about:
        return f"a Python {about['python']}"
    return f"a {about['other']}, which is not stored"


def as_python(about: dict[str, Any]) -> Any:
    """A Python number or text from what the manifest says of it."""
    value = about["value"]
    if about["python"] == "complex":
        return complex(*value)
    return value


def is_empty(about: dict[str, Any]) -> bool:
    """Whether an array has no elements; Orbax stores none of those."""
    return 0 in about["shape"]


def _about_array(array: Any) -> dict[str, Any]:
    return {"dtype": str(np.dtype(array.dtype)), "shape": list(array.shape)}


def _as_json(value: Any) -> Any:
    return [value.real, value.imag] if isinstance(value, complex) else value
