"""HLO texts for tests: written by hand, printed by real compilers, or compiled here for the CPU.

XLA's own reader makes protos of them, which are what the package reads.

The files in `hlo/` are what `compiled.as_text()` printed for an H100 (XLA:GPU) and a TPU v5e
(XLA:TPU) under JAX 0.10.2, on a machine with neither; source paths are shortened, and
`v5e_fsdp.hlo` has lost its metadata to stay small. What each one computes is told where it is used.
"""

import importlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from halfstep._preflight.hlo.analysis import Analysis, analyze
from tests.preflight._protos import message

XLA: Any = importlib.import_module("jaxlib._hlo")
"""XLA's own reader of programs. It is private, and used in tests only."""

FIXTURES = pathlib.Path(__file__).parent / "hlo"

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def proto(text: str) -> bytes:
    """The program of a text as XLA itself reads it: the package only reads protos."""
    return XLA.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def dump(text: str) -> bytes:
    """A program as a compiler dumps it, `xla.HloProto`, without a buffer assignment."""
    return message((1, proto(text)))


def proto_of(compiled: Any) -> bytes:
    """The optimized program of a step that was compiled."""
    (module,) = compiled.runtime_executable().hlo_modules()
    return module.as_serialized_hlo_module_proto()


def fixture(name: str) -> bytes:
    return proto((FIXTURES / f"{name}.hlo").read_text())


def program(entry: str, *computations: str) -> str:
    """A module out of the lines of its entry computation and whole other computations."""
    lines = "\n".join("  " + line.strip() for line in entry.strip().splitlines())
    others = "\n\n".join(computation.strip() for computation in computations)
    return f"HloModule test\n\n{others}\n\nENTRY %main {{\n{lines}\n}}\n"


def count(entry: str, *computations: str) -> Analysis:
    return analyze(proto(program(entry, *computations)))


def compiled(function: Callable[..., Any], *args: Any) -> Analysis:
    """What the CPU compiler makes of a function."""
    return analyze(proto_of(jax.jit(function).lower(*args).compile()))
