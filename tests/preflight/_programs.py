"""HLO texts for tests: written by hand, printed by real compilers, or compiled here for the CPU.

The files in `hlo/` are what `compiled.as_text()` printed for an H100 (XLA:GPU) and a TPU v5e
(XLA:TPU) under JAX 0.10.2, on a machine with neither; source paths are shortened, and
`v5e_fsdp.hlo` has lost its metadata to stay small. What each one computes is told where it is used.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import jax

from halfstep._preflight.hlo.analysis import Analysis, analyze

FIXTURES = pathlib.Path(__file__).parent / "hlo"

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def fixture(name: str) -> str:
    return (FIXTURES / f"{name}.hlo").read_text()


def program(entry: str, *computations: str) -> str:
    """A module out of the lines of its entry computation and whole other computations."""
    lines = "\n".join("  " + line.strip() for line in entry.strip().splitlines())
    others = "\n\n".join(computation.strip() for computation in computations)
    return f"HloModule test\n\n{others}\n\nENTRY %main () -> f32[] {{\n{lines}\n}}\n"


def count(entry: str, *computations: str) -> Analysis:
    return analyze(program(entry, *computations))


def compiled(function: Callable[..., Any], *args: Any) -> Analysis:
    """What the CPU compiler makes of a function."""
    text = jax.jit(function).lower(*args).compile().as_text()
    assert text is not None
    return analyze(text)
