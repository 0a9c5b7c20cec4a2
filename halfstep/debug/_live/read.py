"""Take the numbers of a step without waiting for the device, and read them later."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from halfstep._base import Shaped, described, type_of
from halfstep._program import Finder, Frame
from halfstep.debug._instrument.site import Site
from halfstep.debug._instrument.stats import Column
from halfstep.debug._record.record import Log

# The columns of a row that `Sites.shares` needs, in this order.
_COLUMNS = (Column.ABSMAX, Column.BAD, Column.BELOW, Column.ABOVE)


class Worst(NamedTuple):
    """The site that loses most, and the share of its elements that it loses."""

    share: float
    site: Site


class Shares(NamedTuple):
    """The shares of elements that one step loses.

    Attributes:
        underflow: The share of elements that are below the smallest normal number, and not zero.
        overflow: The share of elements that are above the largest number, or not finite.
        most_underflow: The site with the largest underflow.
        most_overflow: The site with the largest overflow.
    """

    underflow: float
    overflow: float
    most_underflow: Worst
    most_overflow: Worst


class Sites:
    """The sites of a log, and how much each of them counts."""

    def __init__(self, sites: Sequence[Site]):
        self.sites = sites
        self._sizes = _sizes(sites)
        self._named = _is_named(sites)

    def shares(self, rows: np.ndarray) -> Shares | None:
        """Compute the shares from the rows of a step, or `None` if nothing was computed."""
        absmax, bad, below, above = rows.T
        # Sites in a branch that did not run in this step do not count.
        sizes = np.where(absmax == -1, 0.0, self._sizes)
        if not sizes.any():
            return None
        # Elements above the range would overflow, non-finite ones already have. In a loop the first
        # is a mean over iterations and the second is of one iteration, so their sum may exceed 1.
        lost = np.minimum(1, above + bad / np.maximum(sizes, 1))
        total = sizes.sum()
        worst = [self._worst(np.where(sizes > 0, share, -1.0)) for share in (below, lost)]
        return Shares(float(below @ sizes / total), float(lost @ sizes / total), *worst)

    def _worst(self, share: np.ndarray) -> Worst:
        # Sites in libraries are named only if no line of the user loses anything.
        own = np.where(self._named, share, -1.0)
        at = int(np.argmax(own if own.max() > 0 else share))
        return Worst(float(share[at]), self.sites[at])


def _sizes(sites: Sequence[Site]) -> np.ndarray:
    """Return how many elements of each site count.

    The update does not count, because it is computed in the dtype of the parameters. If any site
    has 16 bits or fewer, wider sites do not count either, because they lose nothing.
    """
    sizes = np.asarray([math.prod(site.type.shape) for site in sites], float)
    sizes[[site.stage == "update" for site in sites]] = 0
    is_wide = np.asarray([site.type.bytes for site in sites]) > 2 * sizes
    return sizes if is_wide.all() else np.where(is_wide, 0.0, sizes)


def _is_named(sites: Sequence[Site]) -> np.ndarray:
    """Return which sites are on a line of the user: a cast that a library adds says nothing."""
    # The finder prefers any other frame to one of a library. So a second frame is offered, and if
    # it is chosen, the first one is in a library.
    finder, elsewhere = Finder(), Frame("elsewhere", 0, "")

    def is_own(site: Site) -> bool:
        source = site.source
        frame = Frame(os.path.abspath(source.file), source.line, source.function)
        return bool(source.file) and finder.choose([frame, elsewhere]).file != elsewhere.file

    return np.asarray([bool(site.path) or is_own(site) for site in sites], bool)


@dataclasses.dataclass(frozen=True)
class Taken:
    """The numbers of an update. Arrays are copies: the next step may be given the originals.

    Attributes:
        step: The step.
        numbers: Arrays of one element, or numbers.
        rows: The rows of the last step in a log.
        sites: The sites of the rows.
    """

    step: int
    numbers: Mapping[str, Any]
    rows: Any = None
    sites: Sites | None = None

    def is_ready(self) -> bool:
        """Return whether reading would not wait."""
        return all(array.is_ready() for array in self._arrays())

    def start(self) -> None:
        """Start copying to the host, as soon as the device is done."""
        for array in self._arrays():
            array.copy_to_host_async()

    def read(self) -> tuple[dict[str, float], Shares | None]:
        """Return the numbers and the shares. Waits for them if necessary."""
        found = {name: float(np.asarray(value)) for name, value in self.numbers.items()}
        return found, None if self.sites is None else self.sites.shares(np.asarray(self.rows))

    def _arrays(self) -> list[Any]:
        given = (*self.numbers.values(), self.rows)
        return [value for value in given if isinstance(value, jax.Array)]


def take(
    step: int, numbers: Mapping[str, Any], log: Log | None = None, sites: Sites | None = None
) -> Taken:
    """Copy the numbers of an update, without waiting for them.

    Args:
        step: The number of the step.
        numbers: The numbers, by name.
        log: The log of a recorded step.
        sites: The sites of the log.

    Raises:
        ValueError: If a value is not a number, or is not on this process.
    """
    check(numbers, log)
    plain: dict[str, Any] = {}
    # Grouped by device: one program copies all arrays of a device, since a dispatch for each array
    # would be noticeable next to a step of a millisecond.
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
    """Raise if a value is not a number, was donated, or is not the same on all devices."""
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
            f"`{name}` is traced: `update` was called inside a compiled function. Return it "
            "from the step, and call `update` with what the step returns."
        )
    # Python's integers are unbounded.
    is_real = isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 1024)
    if isinstance(value, Shaped):
        # Converting an array would wait for its value; its dtype is known.
        kinds = (jnp.integer, jnp.floating, jnp.bool_)
        is_real = not value.shape and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    if not is_real:
        raise ValueError(
            f"`{name}` must be one real number, an array without axes or a Python number; got "
            f"{described(value)}. Reduce it in the step, as `jnp.mean` does; over processes, as "
            "`jax.lax.pmean` does."
        )


def _check_array(name: str, value: jax.Array) -> None:
    if value.is_deleted():
        raise ValueError(
            f"`{name}` was donated to a later step and is gone. Call `update` with what a step has "
            "returned before the next step is called."
        )
    _check_place(name, value, is_here=value.is_fully_replicated)


def _local(name: str, value: jax.Array) -> jax.Array:
    """Return the part of an array on one device of this process."""
    _check_place(name, value, is_here=bool(value.addressable_shards))
    return value.addressable_data(0)


def _check_place(name: str, value: jax.Array, *, is_here: bool) -> None:
    if not is_here:
        raise ValueError(
            f"`{name}` must be the same on all devices, and on one of process 0; got "
            f"{type_of(value)} with {value.sharding}. Let the step return it replicated: "
            "`jax.jit(step, out_shardings=jax.NamedSharding(mesh, jax.P()))`, or "
            "`jax.lax.with_sharding_constraint` on it inside the step."
        )


@jax.jit
def _copies(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.copy(array) for name, array in arrays.items()}


@jax.jit
def _last_rows(rows: jax.Array, step: jax.Array) -> jax.Array:
    last = rows[(step - 1) % rows.shape[0]]
    # One column at a time: an index array would become a gather.
    columns = jnp.stack([last[:, column] for column in _COLUMNS], axis=1)
    return jnp.where(step > 0, columns, jnp.full_like(columns, -1))
