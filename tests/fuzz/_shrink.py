"""Makes a program that fails smaller, as long as it fails in the same way."""

import copy
import time
from collections.abc import Callable, Iterator

from tests.fuzz._program import Program, Statement, is_key


def shrunk(program: Program, fails: Callable[[Program], bool], seconds: float = 120) -> Program:
    """The smallest program that was found to fail.

    Args:
        program: One that fails.
        fails: Whether another one does, in the same way.
        seconds: After how long to stop.
    """
    end = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(program):
            if time.monotonic() > end:
                return program
            if fails(candidate):
                program, smaller = candidate, True
                break
    return program


def _candidates(program: Program) -> Iterator[Program]:
    """Programs that are a little smaller, those that lose most first."""
    for place in range(len(program.returned)):
        if len(program.returned) > 1:
            made = copy.deepcopy(program)
            del made.returned[place]
            yield made
    for path in reversed(list(_places(program))):
        made = copy.deepcopy(program)
        inside, position = _at(made, path)
        line = inside.statements[position]
        if line.text.startswith("jnp.full(") or any(map(is_key, line.results)):
            continue
        constants = [
            f"jnp.full({aval.shape}, {_constant(str(aval.dtype))}, '{aval.dtype}')"
            for aval in line.results
        ]
        text = constants[0] if len(constants) == 1 else f"({', '.join(constants)})"
        inside.statements[position] = Statement(text, (), line.results)
        yield made
    unused = _without_unused(copy.deepcopy(program))
    if unused.size() < program.size():
        yield unused


def _constant(dtype: str) -> str:
    return {"bool": "True", "int32": "1", "uint8": "1", "uint32": "1"}.get(dtype, "0.5")


def _places(program: Program, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    for number, line in enumerate(program.statements):
        yield (*path, number)
        for which, inner in enumerate(line.inner):
            yield from _places(inner, (*path, number, which))


def _at(program: Program, path: tuple[int, ...]) -> tuple[Program, int]:
    *outer, last = path
    for number, which in zip(outer[::2], outer[1::2], strict=True):
        program = program.statements[number].inner[which]
    return program, last


def _without_unused(program: Program) -> Program:
    """A program without statements whose results nobody reads."""
    for line in program.statements:
        for inner in line.inner:
            _without_unused(inner)
    number = len(program.values())
    used = set(program.returned)
    for position in reversed(range(len(program.statements))):
        line = program.statements[position]
        number -= len(line.results)
        made = range(number, number + len(line.results))
        if used.intersection(made):
            used.update(line.operands)
            continue
        del program.statements[position]
        count = len(made)

        def moved(old: int, first: int = number, count: int = count) -> int:
            return old - count if old >= first else old

        for later in program.statements[position:]:
            later.operands = tuple(map(moved, later.operands))
        program.returned = list(map(moved, program.returned))
        used = {moved(old) for old in used}
    return program
