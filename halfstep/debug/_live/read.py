"""Numbers of a step that are still being computed: taken without waiting, read later."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from halfstep._base import type_of
from halfstep.debug._live.shares import COLUMNS, Shares, Sites
from halfstep.debug._record.log import Log


@dataclasses.dataclass(frozen=True)
class Taken:
    """What an update was given. The arrays are copies, for the next step may be given the others.

    Attributes:
        step: The step.
        numbers: Arrays of one element, or numbers.
        rows: The last step's rows of a log.
        sites: Of each of the rows.
    """

    step: int
    numbers: Mapping[str, Any]
    rows: Any = None
    sites: Sites | None = None

    def is_ready(self) -> bool:
        """Whether reading does not wait."""
        return all(array.is_ready() for array in self._arrays())

    def start(self) -> None:
        """Begin to copy to the host, as soon as the device is done."""
        for array in self._arrays():
            array.copy_to_host_async()

    def read(self) -> tuple[dict[str, float], Shares | None]:
        """The numbers. Waits for them, if it must."""
        found = {name: float(np.asarray(value)) for name, value in self.numbers.items()}
        return found, None if self.sites is None else self.sites.shares(np.asarray(self.rows))

    def _arrays(self) -> list[Any]:
        given = (*self.numbers.values(), self.rows)
        return [value for value in given if isinstance(value, jax.Array)]


def take(
    step: int, numbers: Mapping[str, Any], log: Log | None = None, sites: Sites | None = None
) -> Taken:
    """Copy what was given, without waiting for it.

    Args:
        step: Its number.
        numbers: By name.
        log: Of a recorded step.
        sites: Of the log.

    Raises:
        ValueError: If a number is no number, or not on this process.
    """
    check(numbers, log)
    plain: dict[str, Any] = {}
    arrays: dict[Any, dict[str, jax.Array]] = {}
    for name, value in numbers.items():
        if isinstance(value, jax.Array):
            local = _local(name, value)
            (device,) = local.devices()
            arrays.setdefault(device, {})[name] = local
        plain[name] = value
    for group in arrays.values():
        plain.update(_copies(group))
    rows = None
    if log is not None:
        rows = _last_rows(_local("log.rows", log.rows), _local("log.step", log.step))
    taken = Taken(step, plain, rows, sites)
    taken.start()
    return taken


def check(numbers: Mapping[str, Any], log: Log | None) -> None:
    """Raise if a number is none, is gone, or is not the same on all devices."""
    for name, value in numbers.items():
        _check_number(name, value)
        if isinstance(value, jax.Array):
            _check_array(name, value)
    if log is not None:
        _check_array("log.rows", log.rows)
        _check_array("log.step", log.step)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, Tracer):
        raise ValueError(
            f"`{name}` is traced: `update` was called inside of a compiled function. Return it "
            "from the step, and call `update` with what the step returns."
        )
    kind = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    is_real = jnp.issubdtype(kind, jnp.number) or kind == np.bool_
    if np.shape(value) or not is_real or jnp.issubdtype(kind, jnp.complexfloating):
        what = f"{kind}[{','.join(map(str, np.shape(value)))}]"
        raise ValueError(
            f"`{name}` must be one real number, an array without axes or a Python number; got "
            f"{what}. Reduce it in the step, as `jnp.mean` does; over processes, as "
            "`jax.lax.pmean` does."
        )


def _check_array(name: str, value: jax.Array) -> None:
    if value.is_deleted():
        raise ValueError(
            f"`{name}` was donated to a later step and is gone. Call `update` with what a step has "
            "returned before the next step is called."
        )
    if not value.is_fully_replicated:
        raise ValueError(_elsewhere(name, value))


def _local(name: str, value: jax.Array) -> jax.Array:
    """The part of an array on one device of this process."""
    if not value.addressable_shards:
        raise ValueError(_elsewhere(name, value))
    return value.addressable_data(0)


def _elsewhere(name: str, value: jax.Array) -> str:
    return (
        f"`{name}` must be the same on all devices, and on one of process 0; got "
        f"{type_of(value)} with {value.sharding}. Let the step "
        "return it replicated: "
        "`jax.jit(step, out_shardings=jax.NamedSharding(mesh, jax.P()))`, or "
        "`jax.lax.with_sharding_constraint` on it inside of the step."
    )


@jax.jit
def _copies(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.copy(array) for name, array in arrays.items()}


@jax.jit
def _last_rows(rows: jax.Array, step: jax.Array) -> jax.Array:
    last = rows[(step - 1) % rows.shape[0]]
    # One column at a time: an index array would be gathered.
    columns = jnp.stack([last[:, column] for column in COLUMNS], axis=1)
    return jnp.where(step > 0, columns, jnp.full_like(columns, -1))
