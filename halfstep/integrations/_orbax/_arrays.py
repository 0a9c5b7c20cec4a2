"""Arrays on their way to Orbax and back, onto the shardings of `like`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from halfstep.integrations._orbax._tree import Leaf, is_empty, key_impl


def stored_form(leaf: Leaf) -> Any:
    """What Orbax is given: an array over all processes, or NumPy's."""
    if leaf.kind == "key":
        return stored_form(Leaf(leaf.name, jax.random.key_data(leaf.value), "array"))
    if not isinstance(leaf.value, jax.Array):
        return np.asarray(leaf.value)
    # One process's own array is the same on all, as is checked; process 0 writes it.
    return np.asarray(leaf.value) if _is_of_one_process(leaf.value) else _readable(leaf.value)


def _readable(array: jax.Array) -> jax.Array:
    """The array, such that its shards can be read.

    Of one that `jax.device_put` has replicated over several processes JAX 0.10 cannot say them.
    """
    try:
        array.addressable_shards  # noqa: B018
    except ValueError:
        return jax.jit(lambda x: x, out_shardings=array.sharding)(array)
    return array


def is_local(leaf: Leaf) -> bool:
    """Whether a leaf is each process's own, so that it could differ between them."""
    return not isinstance(leaf.value, jax.Array) or leaf.value.is_fully_addressable


def _is_of_one_process(array: jax.Array) -> bool:
    return jax.process_count() > 1 and array.is_fully_addressable


def restore_args(like: Leaf) -> ocp.RestoreArgs:
    """How Orbax is to read a leaf."""
    sharding = _sharding(like)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)


def _sharding(like: Leaf) -> Any:
    """The sharding that Orbax reads onto; `None` for arrays that are read as NumPy's."""
    leaf = like.value
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or leaf.sharding is None:
        return None
    if isinstance(leaf, jax.Array) and (_is_of_one_process(leaf) or not leaf.committed):
        return None
    if like.kind == "key" and isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf).sharding
    return leaf.sharding


def finished(like: Leaf, array: Any) -> Any:
    """What was read, as the leaf it is to replace is."""
    leaf = like.value
    if isinstance(leaf, np.generic):
        return array[()]
    if isinstance(leaf, np.ndarray):
        return array
    if not isinstance(array, jax.Array):
        placed = isinstance(leaf, jax.Array) and leaf.committed and like.kind != "key"
        array = jax.device_put(array, leaf.sharding) if placed else jnp.asarray(array)
    if like.kind == "key":
        return jax.random.wrap_key_data(array, impl=key_impl(leaf))
    return array


def empty(like: Leaf, about: dict[str, Any]) -> Any:
    """An array without elements, which Orbax does not store."""
    if not is_empty(about):
        # Only arrays that were found to be empty get here.
        raise AssertionError(about)
    return np.zeros(about["shape"], jnp.dtype(about["dtype"]))
