"""Tell parameters, optimizer state and batch apart, by the names and types of arguments."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from halfstep._base import argument_names
from halfstep._preflight.compile.lowering import ArgumentLeaf
from halfstep._preflight.preflight_errors import PreflightError

PARAMETERS = "parameters"
OPTIMIZER = "optimizer state"
BATCH = "batch"
OTHER = "other"
ROLES: tuple[str, ...] = (PARAMETERS, OPTIMIZER, BATCH, OTHER)

# Whole names match, not parts of them: `x` is a batch, but `max_len` is not, although it has an x.
_NAMES = (
    (OPTIMIZER, re.compile(r"opt|opts|optim|optimizer|(opt|optim|optimizer)_?states?")),
    (
        PARAMETERS,
        re.compile(
            r"params?|parameters?|weights?|model|module|net|network|variables|(master|model)_?params"
        ),
    ),
    (
        BATCH,
        re.compile(
            r"batch|data|xs?|ys?|images?|labels?|inputs?|targets?|tokens?|ids|input_ids|masks?"
            r"|examples?|segment_ids|positions?"
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array that a step is given.

    Attributes:
        name: Its path from the name of the step's argument, `params['up']`.
        role: Its purpose: `parameters`, `optimizer state`, `batch` or `other`.
        dtype: Its dtype, such as `float32`.
        shape: Its shape over all devices.
        bytes: Bytes on one device.
        donated: Whether the step may reuse its memory.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    donated: bool


def roles(arguments: Sequence[Argument]) -> dict[str, int]:
    """Sum the bytes that a device holds for each role."""
    total: dict[str, int] = dict.fromkeys(ROLES, 0)
    for argument in arguments:
        total[argument.role] += argument.bytes
    return total


def arguments(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    leaves: Sequence[ArgumentLeaf],
    given: Mapping[str, str] | None = None,
) -> tuple[Argument, ...]:
    """List every array that a step is given, with its role.

    An optimizer's state is known by Optax's types, or by a name such as `opt_state` anywhere on the
    path. Parameters and batch are known by the outermost name that says so (`state.params`,
    `batch`). If no name does, an Equinox module counts as parameters. Everything else is `other`:
    keys, counters, statistics.

    Args:
        step: The step, for the names of its arguments.
        args: Its arguments.
        leaves: The arrays in the arguments.
        given: Roles by argument name, which win over all guesses.
    """
    names = argument_names(step, len(args))
    for name, role in (given or {}).items():
        if name not in names or role not in ROLES:
            raise PreflightError(
                f"roles must map the step's arguments {list(names)} to one of {list(ROLES)}; "
                f"got {name!r}: {role!r}."
            )
    from_optax = [_paths_below_optax(arg) for arg in args]
    found: list[Argument] = []
    for leaf in leaves:
        number, below = leaf.path[0].idx, leaf.path[1:]
        role = (given or {}).get(names[number])
        if role is None and any(below[: len(p)] == p for p in from_optax[number]):
            role = OPTIMIZER
        if role is None:
            role = _by_name([names[number], *(jtu.keystr((k,), simple=True) for k in below)])
        if role is None:
            role = PARAMETERS if _is_module(args[number]) else OTHER
        found.append(Argument(leaf.name, role, leaf.dtype, leaf.shape, leaf.bytes, leaf.donated))
    return tuple(found)


def _by_name(components: Sequence[str]) -> str | None:
    found = [
        role
        for component in components
        for role, pattern in _NAMES
        if pattern.fullmatch(component.lower())
    ]
    # The name counts anywhere on the path, because moments repeat the parameters' own names:
    # `opt_state.mu.params`.
    if OPTIMIZER in found:
        return OPTIMIZER
    return found[0] if found else None


def _paths_below_optax(arg: object) -> list[tuple[Any, ...]]:
    def is_state(node: object) -> bool:
        # The module tells: Optax's states have no common type, and states of other libraries are
        # known by their names.
        return type(node).__module__.split(".")[0] == "optax"

    pairs = jtu.tree_leaves_with_path(arg, is_leaf=is_state)
    return [path for path, node in pairs if is_state(node)]


def _is_module(arg: object) -> bool:
    # halfstep's own modules are loss scalings and ledgers, which are not parameters.
    return isinstance(arg, eqx.Module) and not type(arg).__module__.startswith("halfstep.")
