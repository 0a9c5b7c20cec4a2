"""What became of one composed program.

`python -m tests.fuzz._compose_run SEED ...` runs the programs of seeds, and with a description, as
it is printed of a program that disagrees, that program alone.
"""

import dataclasses
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz._compose import (
    CHECKPOINTS,
    SHORT,
    Composition,
    Stage,
    composition,
    shrunk_composition,
)
from tests.fuzz._compose_names import Plain
from tests.fuzz._compose_oracle import (
    as_halfstep_runs,
    by_halfstep,
    derived,
    in_numpy,
    judge_of,
    program_of,
    values_of,
)
from tests.fuzz._evaluate import nearest
from tests.fuzz._oracle import as_users_have_it
from tests.fuzz._run import Outcome

DRAWS = 8
"""How many programs of a seed are made at most, until one is well conditioned."""
STORED = 0.3
"""The share of short programs that are also run with other things stored."""
Subject = Callable[[Composition], Any]
"""What makes results and derivatives of a program; halfstep."""


UPSTREAM = "plain JAX fails as well"
"""What is said of a program for one of the known bugs of JAX, which `docs/support.md` lists."""
REFUSED = "a primal output that is shared across the batch"
"""JAX's message about a mapped `custom_vjp` that it cannot differentiate, for the oracle either."""


def judged(made: Composition, subject: Subject = by_halfstep) -> tuple[str, bool]:
    """Compare a program with the oracle.

    Args:
        made: The program.
        subject: What is judged.

    Returns:
        Text about it, and whether it fails. A program that says nothing is `"ill"`.
    """
    try:
        judge = judge_of(made)
    except (TypeError, ValueError) as error:
        if REFUSED not in str(error) and not fails_in_jax(made, str(error)):
            raise
        return UPSTREAM, False
    if judge.is_ill:
        return "ill", False
    try:
        have = subject(made)
    except (TypeError, ValueError) as error:
        if not fails_in_jax(made, str(error)):
            raise
        return UPSTREAM, False
    found = judge.disagreements(have)
    if not found:
        return "same", False
    return f"more wrong than by hand: {found[0]}, and {len(found) - 1} other leaves", True


def fails_in_jax(made: Composition, message: str) -> bool:
    """Return whether plain JAX, compiled before it is derived, fails with the same message."""
    program = functools.partial(program_of(made), Plain())
    values = jax.tree.map(jnp.asarray, values_of(made))
    try:
        jax.make_jaxpr(derived(made, program, jax.jit))(*values)
    except (TypeError, ValueError) as error:
        return str(error) == message
    return False


# What is stored for the backward pass must not change a value.


def stored_otherwise(made: Composition) -> Iterator[tuple[str, Composition, dict[str, Any]]]:
    """The same program with other things stored: a name, the program and options of `autocast`."""
    yield "the other islands", dataclasses.replace(made, islands=not made.islands), {}
    for name in CHECKPOINTS:
        yield name, dataclasses.replace(made, outer=(*made.outer, name)), {}
        stages = tuple(
            dataclasses.replace(stage, step=(*stage.step, name)) for stage in made.stages
        )
        yield f"{name}, of each step", dataclasses.replace(made, stages=stages), {}
    for rule in ("store:op:dot_general=keep", "store:op:dot_general=recompute", "residuals=e4m3"):
        yield rule, made, {"policy": f"{made.half},{rule}"}


def changed_by_storing(made: Composition, name: str | None = None) -> str:
    """Return what storing other things changes: a text, or `""` for nothing.

    Programs are evaluated operation by operation, so that no fusion of XLA's is seen.

    Args:
        made: The program.
        name: What is stored; by the seed if it is not given.
    """
    others = list(stored_otherwise(made))
    chosen = [one for one in others if name in (None, one[0])]
    name, other, options = random.Random(made.seed).choice(chosen)
    values = values_of(made)
    want = in_numpy(as_halfstep_runs(made), values, nearest)[0][0]
    have = in_numpy(as_halfstep_runs(other, **options), values, nearest)[0][0]
    for (path, before), after in zip(
        jax.tree_util.tree_flatten_with_path(want)[0], jax.tree.leaves(have), strict=True
    ):
        if not np.array_equal(before, after, equal_nan=True):
            off = np.max(np.abs(before - after))
            leaf = jax.tree_util.keystr(path)
            return f"another value with {name}: result{leaf} differs by up to {off:.3g}"
    return ""


def asks_about_storing(made: Composition) -> bool:
    """Whether a program is asked about what is stored.

    Not one whose result is made of a gradient: what is made again may round a cotangent elsewhere.
    """
    if made.derivative in ("penalty", "over reverse"):
        return False
    return made.length <= SHORT and random.Random(made.seed + 0.5).random() < STORED


# Outcomes.


def composed_outcome(
    seed: int, *, shrink: int = 0, storing: bool = True, subject: Subject = by_halfstep
) -> Outcome:
    """Make a composed program, cast it and compare.

    Args:
        seed: Of the program.
        shrink: How many smaller programs to try, if it fails.
        storing: Whether some programs are asked about what is stored.
        subject: What is judged.
    """
    with as_users_have_it():
        for attempt in range(DRAWS):
            made = composition(seed, attempt)
            text, failed = judged(made, subject)
            if text != "ill":
                break
        else:
            return Outcome(seed, "skipped: all of its programs are ill", redrawn=DRAWS)
        if text == UPSTREAM:
            return Outcome(seed, text, redrawn=attempt)
        asked = storing and asks_about_storing(made)
        fails: Callable[[Composition], bool] = lambda made: judged(made, subject)[1]  # noqa: E731
        if not failed and asked and (text := changed_by_storing(made)):
            failed = True
            name = text.removeprefix("another value with ").partition(":")[0]
            fails = functools.partial(_changes, name=name)
        if not failed:
            return Outcome(seed, f"same{', stored' if asked else ''}", redrawn=attempt)
        if shrink:
            made = shrunk_composition(made, functools.partial(_safely, fails), shrink)
        return Outcome(seed, text, True, _setting(made), report(made), attempt)


def _changes(made: Composition, name: str) -> bool:
    return bool(changed_by_storing(made, name))


def _safely(fails: Callable[[Composition], bool], made: Composition) -> bool:
    # What a smaller program raises is another failure.
    try:
        return fails(made)
    except Exception:
        return False


def _setting(made: Composition) -> str:
    return f"{made.half}, {made.derivative}, {made.run}, islands={made.islands}"


def report(made: Composition) -> str:
    """Return a program as text with which it can be run again."""
    return (
        f"# python -m tests.fuzz._compose_run {str(made)!r}\n"
        f"# C.mm is a matrix product; other names are those of tests/fuzz/_compose_names.py.\n"
        f"{made.source()}\n"
    )


def main(given: list[str]) -> int:
    """Run seeds or descriptions."""
    status = 0
    for text in given:
        if text.isdigit():
            outcome = composed_outcome(int(text), shrink=40)
            found, program = outcome.text, outcome.program
        else:
            made = eval(text, {"Composition": Composition, "Stage": Stage})
            with as_users_have_it():
                found = f"{judged(made)[0]}; {changed_by_storing(made)}"
            program = report(made)
        print(f"{text}: {found}\n{program}")
        status |= not found.startswith("same")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
