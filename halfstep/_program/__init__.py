"""Represent traced programs as graphs, and read how JAX writes their loops, branches and calls."""

from halfstep._program.control_flow import (
    as_linear_as_said as as_linear_as_said,
    bind_again as bind_again,
    equations as equations,
    functions_in as functions_in,
    spelled as spelled,
    structure_of as structure_of,
)
from halfstep._program.excerpt import (
    Excerpt as Excerpt,
    is_literal as is_literal,
    variables_of as variables_of,
)
from halfstep._program.graph import (
    Constant as Constant,
    Graph as Graph,
    Node as Node,
    Operand as Operand,
    graph_of as graph_of,
    is_of_jax as is_of_jax,
    is_scalar_literal as is_scalar_literal,
    is_traced as is_traced,
    size as size,
)
from halfstep._program.interpreter import (
    Inside as Inside,
    Interpreter as Interpreter,
    run_inside as run_inside,
)
from halfstep._program.invariant import Invariants as Invariants
from halfstep._program.sources import (
    UNKNOWN as UNKNOWN,
    Finder as Finder,
    Frame as Frame,
    Source as Source,
)
from halfstep._program.structures import (
    Cond as Cond,
    CustomJvp as CustomJvp,
    CustomVjp as CustomVjp,
    CustomVmap as CustomVmap,
    Inner as Inner,
    Jit as Jit,
    LinearSolve as LinearSolve,
    Opaque as Opaque,
    Remat as Remat,
    Scan as Scan,
    ShardMap as ShardMap,
    While as While,
)
