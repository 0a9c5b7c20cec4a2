"""Run a random program with its values stored in many ways: the forward values must be the same."""

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import halfstep
from tests.fuzz._oracle import Case, Skipped, as_users_have_it, make_case, primitives
from tests.fuzz._program import Program, Statement

_POLICIES = jax.checkpoint_policies
PRESETS: dict[str, Any] = {
    "no policy": None,
    "nothing_saveable": _POLICIES.nothing_saveable,
    "everything_saveable": _POLICIES.everything_saveable,
    "dots_saveable": _POLICIES.dots_saveable,
    "dots_with_no_batch_dims_saveable": _POLICIES.dots_with_no_batch_dims_saveable,
}
RULES = 10


@dataclasses.dataclass(frozen=True)
class Difference:
    """A way of storing values that changes results of the forward pass."""

    seed: int
    compute: str
    way: str
    differing: int
    program: str


def differences(seed: int) -> list[Difference]:
    """Return the ways that change a program's results.

    Raises:
        Skipped: If JAX or autocast refuses the program in its plainest form.
    """
    case = make_case(seed)
    compute = "f16" if seed % 3 == 0 else "bf16"
    with as_users_have_it():
        try:
            plain = results(halfstep.autocast(case.function(), compute), case)
        except Exception as error:
            raise Skipped(str(error)[:200]) from error
        found = []
        for way, function in ways(case, compute):
            made = results(function, case)
            loose = "shard_map" in case.program.source()
            differing = sum(_differs(*pair, loose) for pair in zip(plain, made, strict=True))
            if differing:
                found.append(Difference(seed, compute, way, differing, case.program.source()))
    return found


def _differs(one: np.ndarray, other: np.ndarray, loose: bool) -> bool:
    """Whether two results differ; loosely, by more than some roundings of float32.

    JAX compiles a `jax.checkpoint` in a `shard_map` as one program, also in plain JAX, and XLA then
    rounds a product and a sum once instead of twice. A rounding to 16 bits is 2,000 times as large.
    """
    if not loose or one.dtype != np.float32:
        return one.tobytes() != other.tobytes()
    size = np.max(np.abs(one), initial=0, where=np.isfinite(one))
    return not np.allclose(one, other, rtol=0, atol=size * 2.0**-20, equal_nan=True)


def results(function: Callable[..., Any], case: Case) -> list[np.ndarray]:
    """A function's results; each operation runs by itself, so that nothing is fused."""
    count = case.parameters
    parameters = {f"w{number}": case.values[number] for number in range(count)}
    made = function(parameters, *case.values[count:])
    return [_array(leaf) for leaf in jax.tree.leaves(made)]


def _array(leaf: Any) -> np.ndarray:
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def ways(case: Case, compute: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the program with its values stored in other ways."""
    function = case.function()
    yield "all stored", halfstep.autocast(function, f"{compute},store:op:*=keep")
    for name, policy in PRESETS.items():
        yield f"all, {name}", halfstep.autocast(jax.checkpoint(function, policy=policy), compute)
        parts = in_parts(case, functools.partial(jax.checkpoint, policy=policy))
        yield f"parts, {name}", halfstep.autocast(parts, compute)
    choice = random.Random(case.seed * 31 + 7)
    names = sorted(primitives(case)) or ["*"]
    for _ in range(RULES):
        outcome = choice.choice(("keep", "recompute", "e4m3", "e5m2", "int4"))
        rule = f"store:op:{choice.choice((*names, '*'))}={outcome}"
        stored = halfstep.autocast(function, halfstep.Policy(compute=compute, stores=(rule,)))
        yield (
            rule,
            functools.partial(_where_it_matches, stored, halfstep.autocast(function, compute)),
        )


def _where_it_matches(stored: Callable[..., Any], plain: Callable[..., Any], *values: Any) -> Any:
    """Return the results of the first function, or of the second if a rule matches nothing."""
    try:
        return stored(*values)
    except ValueError as error:
        if "the rule " not in str(error):
            raise
        return plain(*values)


def in_parts(case: Case, wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program whose statements are in up to three functions, each wrapped."""
    program = case.program
    count = len(program.statements)
    choice = random.Random(case.seed * 17 + 3)
    cuts = sorted({choice.randrange(1, count) for _ in range(2)}) if count > 1 else []
    functions = [
        wrap(_part(program, begin, end).function())
        for begin, end in zip((0, *cuts), (*cuts, count), strict=True)
    ]

    def run(parameters: dict[str, Any], *data: Any) -> Any:
        values: tuple[Any, ...] = (*parameters.values(), *data)
        for function in functions:
            values = function(*values)
        return tuple(values[number] for number in program.returned)

    return run


def _part(program: Program, begin: int, end: int) -> Program:
    """Return some statements of a program; it takes and returns all values that there are."""
    values = program.values()
    made = len(program.arguments)
    ends = [made]
    for line in program.statements:
        made += len(line.results)
        ends.append(made)
    lines: list[Statement] = program.statements[begin:end]
    return Program(tuple(values[: ends[begin]]), lines, list(range(ends[end])))
