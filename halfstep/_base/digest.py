"""A digest of an array's bits that does not depend on how the array is laid out over devices.

Each element is mixed with its place and the results are added up, in integers: any order of the
sum, and so any sharding, gives the same. For a given place the mixing is one to one, so that a
change of a single element, by one bit or by many, always changes the first of the two sums.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

_WORD = np.uint32
# An odd number close to 2**32 divided by the golden ratio, and murmur3's two for mixing.
_PLACE, _FIRST, _SECOND = _WORD(0x9E3779B9), _WORD(0x85EBCA6B), _WORD(0xC2B2AE35)

# In bytes. To copy a small array costs less than to compile a program that reads it.
_SMALL = 2**20


def digests(arrays: Sequence[Any]) -> list[str]:
    """The digest of each array, as 16 hexadecimal digits.

    NumPy's arrays and small ones are read on the host. The others are read where they are: those
    that are spread over several processes need all of them to call this, in the same order.

    Args:
        arrays: Arrays of numbers; of keys the data.
    """
    return prepare_digests(arrays)()()


def prepare_digests(arrays: Sequence[Any]) -> Callable[[], Callable[[], list[str]]]:
    """Do what the host has to do, and return a function that lets the devices compute the rest.

    The function returns another one, which waits for the digests. Devices compute them on their
    own, before anything that is given to them later: arrays may be donated meanwhile.
    """
    found: list[Any] = [None] * len(arrays)
    groups: dict[Hashable, list[int]] = {}
    for number, array in enumerate(arrays):
        if isinstance(array, jax.Array) and not _is_read_here(array):
            groups.setdefault(_devices(array), []).append(number)
        else:
            with np.errstate(over="ignore"):
                mixed = _mixed(np, _host_words(np.asarray(array)))
            found[number] = np.stack([np.sum(part, dtype=_WORD) for part in mixed])
    programs: list[tuple[list[int], Any, list[Any]]] = []
    for devices, numbers in groups.items():
        out = NamedSharding(devices, PartitionSpec()) if isinstance(devices, Mesh) else None
        # Replicated: each process can read only what lies on its own devices.
        programs.append((numbers, _compiled(out), [arrays[number] for number in numbers]))

    def start() -> Callable[[], list[str]]:
        started = [(numbers, program(given)) for numbers, program, given in programs]
        # What waits for the digests must not keep the arrays.
        programs.clear()
        return functools.partial(finish, started)

    def finish(started: Sequence[tuple[list[int], jax.Array]]) -> list[str]:
        for numbers, sums in started:
            for number, row in zip(numbers, np.asarray(sums), strict=True):
                found[number] = row
        return ["".join(f"{int(word):08x}" for word in row) for row in found]

    return start


def _is_read_here(array: jax.Array) -> bool:
    known = array.is_fully_addressable or array.is_fully_replicated
    return known and array.nbytes <= _SMALL


def _devices(array: jax.Array) -> Hashable:
    """What arrays of one program have in common."""
    if isinstance(array.sharding, NamedSharding):
        return array.sharding.mesh
    return tuple(sorted(device.id for device in array.sharding.device_set))


@functools.lru_cache(maxsize=16)
def _compiled(out: NamedSharding | None) -> Callable[[Sequence[jax.Array]], jax.Array]:
    def all_sums(arrays: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack([device_sums(array) for array in arrays])

    return jax.jit(all_sums) if out is None else jax.jit(all_sums, out_shardings=out)


def device_sums(array: jax.Array) -> UInt32[Array, " two"]:
    """The two sums of an array, or of a shard of one, inside a compiled function."""
    mixed = _mixed(jnp, _device_words(array))
    axes = range(mixed[0].ndim)
    # One reduction of both, and not `jnp.sum` of each: of two reductions that read the same values,
    # XLA writes those values to memory on CPUs, for all arrays as many bytes again as they have,
    # and takes six times as long.
    return jnp.stack(jax.lax.reduce(mixed, (_WORD(0), _WORD(0)), _added, tuple(axes)))


def _added(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(one + other for one, other in zip(left, right, strict=True))


def _mixed(xp: ModuleType, words: jax.Array | np.ndarray) -> tuple[Any, Any]:
    """What the two sums add up, by `jax.numpy` or NumPy: the same lines, so that both agree."""
    # One axis more where there is none: NumPy's scalars would warn where arrays wrap around.
    words = words if words.ndim else words.reshape(1)
    place, stride = xp.zeros(words.shape, _WORD), 1
    for axis in reversed(range(words.ndim)):
        size = words.shape[axis]
        along = xp.arange(size, dtype=_WORD) * _WORD(stride % 2**32)
        column = along.reshape([size if other == axis else 1 for other in range(words.ndim)])
        place = place + xp.broadcast_to(column, words.shape)
        stride *= size
    # The finalizer of murmur3, whose steps can all be undone: for one place, two different words
    # never mix to the same. The place goes in first, so that two elements that are exchanged do not
    # cancel out in the sum. The second sum weighs each by an odd number, which can be undone as
    # well: a change of several elements that leaves one sum alone is caught by the other, but for
    # one case in 2**32.
    mixed = words + place * _PLACE
    mixed = (mixed ^ (mixed >> _WORD(16))) * _FIRST
    mixed = (mixed ^ (mixed >> _WORD(13))) * _SECOND
    mixed = mixed ^ (mixed >> _WORD(16))
    weighted = mixed * (place * _WORD(2) + _WORD(1))
    return mixed, weighted


def _few_bits(dtype: np.dtype) -> np.dtype | None:
    """For formats below 8 bits one of at least 8 that holds all their values."""
    # NumPy keeps each of them in a byte of its own, and XLA may pack two into one: bits differ
    # between host and device, and values do not.
    if jnp.issubdtype(dtype, jnp.integer):
        return np.dtype(np.int32) if jnp.iinfo(dtype).bits < 8 else None
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float32) if jnp.finfo(dtype).bits < 8 else None
    return None


def _device_words(array: jax.Array) -> jax.Array:
    """The bits as unsigned 32-bit words; what is wider gets a last axis."""
    if array.dtype == jnp.bool_:
        return array.astype(_WORD)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        parts = [_device_words(part) for part in (jnp.real(array), jnp.imag(array))]
        return jnp.stack(parts, axis=-1)
    wider = _few_bits(array.dtype)
    if wider is not None:
        array = array.astype(wider)
    bits = 8 * array.dtype.itemsize
    same = jnp.dtype(f"uint{min(bits, 32)}")
    return jax.lax.bitcast_convert_type(array, same).astype(_WORD)


def _host_words(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.bool_:
        return array.astype(_WORD)
    if np.issubdtype(array.dtype, np.complexfloating):
        parts = [_host_words(part) for part in (np.real(array), np.imag(array))]
        return np.stack(parts, axis=-1)
    wider = _few_bits(array.dtype)
    if wider is not None:
        array = array.astype(wider)
    bytes_each = array.dtype.itemsize
    same = np.dtype(f"uint{8 * min(bytes_each, 4)}")
    whole = np.ascontiguousarray(array).reshape(array.shape)
    if bytes_each <= 4:
        return whole.view(same).astype(_WORD)
    # The low word comes first, which is also the order of XLA's bitcast.
    return np.frombuffer(whole.tobytes(), same).reshape((*array.shape, bytes_each // 4))
