"""Check that a state does not change between two steps.

Copies can be compared with one another (`replica_check`), but an array that is divided over devices
has no copies. Between two steps, however, nothing may change it. A digest of every shard, taken
when a step ends and again when the next one begins, finds any bit that has flipped in between, on
every device.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from halfstep._base import checked, device_sums, gather_texts, path_string, without_key_type

_SHOWN = 5


class RestError(RuntimeError):
    """A state has changed while nothing was computed.

    Example:
        ```python
        import jax.numpy as jnp
        from halfstep.reliability import RestError, rest_check

        digests = rest_check({"w": jnp.ones(4)})
        try:
            rest_check({"w": jnp.ones(4).at[2].set(1.0000001)}, digests, step=8)
        except RestError as error:
            message = str(error)
        assert "`w` on device 0" in message
        ```
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateDigests:
    """The digests of every shard of a state, from `rest_check`. They stay on the devices.

    A pytree: a jitted function can return it.

    Example:
        ```python
        import jax.numpy as jnp
        from halfstep.reliability import StateDigests, rest_check

        digests = rest_check({"w": jnp.ones(4), "name": "model"})
        assert isinstance(digests, StateDigests)
        assert digests.names == ("w",)
        ```
    """

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    """The names of the arrays."""
    sums: tuple[jax.Array, ...]
    """Two words per array for each device that has a part of the array."""


@checked
def rest_check(
    state: Any, digests: StateDigests | None = None, *, step: int | None = None
) -> StateDigests:
    """Take digests of a state, and compare them with earlier digests.

    Take digests when a step ends, and compare them when the next step begins. In between, data is
    loaded, checkpoints are written and the run waits for hosts, but the state may not change. The
    check reads the state once, sends nothing between devices, and reads a few bytes per array on
    the host if there are digests to compare. It does not find bits that flip while a step runs.

    `halfstep.preflight(rest_check, (state,), targets="h100")` says how many bytes it reads on
    hardware that is not here. There, and wherever it is traced, digests are of whole arrays.

    Args:
        state: Any pytree: parameters, optimizer state, loss scaling, ledger, a recipe's state.
            Leaves that are not JAX arrays are skipped.
        digests: The digests that were returned earlier for the same state. Either all processes
            pass them, or none.
        step: The number of the step, for the message.

    Returns:
        The digests.

    Raises:
        RestError: If the state has changed, on all processes. The message names arrays and devices.
        ValueError: If the digests are of another state.
        TypeError: If it is traced and has to compare.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        @jax.jit
        def train(w):
            return 0.9 * w


        w, digests = jnp.ones(1024), None
        for step in range(30):
            if digests is not None:
                halfstep.reliability.rest_check(w, digests, step=step)
            w = train(w)
            # Every tenth step; every one costs more, and finds more.
            digests = halfstep.reliability.rest_check(w) if step % 10 == 0 else None
        ```
    """
    arrays = {
        path_string(path): without_key_type(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if isinstance(leaf, jax.Array)
    }
    if any(isinstance(array, Tracer) for array in arrays.values()):
        if digests is not None:
            raise TypeError(
                "`digests` of `rest_check` are compared on the host; got a traced state. Take "
                "digests anywhere, and compare them outside jax.jit."
            )
        # A tracer does not say on which devices its array will be.
        return StateDigests(tuple(arrays), tuple(map(device_sums, arrays.values())))
    now = StateDigests(tuple(arrays), tuple(_shard_sums(list(arrays.values()))))
    changed = [] if digests is None else differences(digests, now)
    if changed:
        when = "" if step is None else f" before step {step}"
        raise RestError(
            f"the state has changed{when} while nothing was computed: {'; '.join(changed)}. Go "
            "back to the last checkpoint, and leave the named devices out if it happens again. If "
            "the state was changed on purpose between two steps, take its digests afterwards."
        )
    return now


def _shard_sums(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the sums of each array's shards, each on the device of its shard."""
    found: list[Any] = [None] * len(arrays)
    groups: dict[Any, list[int]] = {}
    for number, array in enumerate(arrays):
        where = array.sharding
        if isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh):
            where = where.mesh
        groups.setdefault(where, []).append(number)
    for where, numbers in groups.items():
        own = [arrays[number] for number in numbers]
        if isinstance(where, Mesh):
            shardings = (array.sharding for array in own)
            specs = tuple(x.spec for x in shardings if isinstance(x, NamedSharding))
            sums = _over_mesh(where, specs)(*own)
        else:
            sums = _on_one(*own)
        for number, value in zip(numbers, sums, strict=True):
            found[number] = value
    return found


# All arrays of a mesh share one program, so that a model of thousands of arrays compiles once.
@functools.lru_cache(maxsize=16)
def _over_mesh(mesh: Mesh, specs: tuple[P, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    one = (1,) * len(mesh.axis_names)

    def sums(*shards: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(device_sums(shard).reshape((*one, 2)) for shard in shards)

    out = (P(*mesh.axis_names),) * len(specs)
    # JAX's check is off: every copy has its own sum, and copies need not be the same here.
    mapped = jax.shard_map(sums, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return jax.jit(mapped)


@jax.jit
def _on_one(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(device_sums(array) for array in arrays)


def differences(before: StateDigests, now: StateDigests) -> list[str]:
    """Return the arrays that differ between two states, with their devices.

    The result is the same on all processes.

    Raises:
        ValueError: If the two states cannot be compared.
    """
    if before.names != now.names or any(
        a.shape != b.shape for a, b in zip(before.sums, now.sums, strict=True)
    ):
        odd = sorted(set(before.names) ^ set(now.names))[:_SHOWN] or ["arrays on other devices"]
        raise ValueError(
            f"the digests are of another state: they differ in {', '.join(odd)}. Pass the digests "
            "that rest_check returned for this state, or none."
        )
    own = [
        f"`{name}` on {', '.join(devices[:_SHOWN])}"
        for name, old, new in zip(now.names, before.sums, now.sums, strict=True)
        if (devices := _differing(old, new))
    ]
    # All processes have to raise: if only one did, the others would wait for it.
    said = [line for text in gather_texts("\n".join(own)) for line in text.split("\n") if line]
    return [*said[:_SHOWN], f"{len(said) - _SHOWN} more"] if len(said) > _SHOWN else said


def _differing(old: jax.Array, new: jax.Array) -> list[str]:
    """Return the devices of this process on which two sums differ."""
    before = {shard.device: np.asarray(shard.data) for shard in old.addressable_shards}
    return [
        f"device {shard.device.id} of process {shard.device.process_index}"
        for shard in new.addressable_shards
        if not np.array_equal(before.get(shard.device), np.asarray(shard.data))
    ]
