"""Decide what a temporary buffer is for, and which of the user's operations it comes from."""

from collections.abc import Iterable
from dataclasses import dataclass

from halfstep._preflight.hlo.buffer_assignment import BufferAssignment, Value
from halfstep._preflight.hlo.buffer_uses import BufferUses, Writer
from halfstep._preflight.hlo.collectives import KINDS
from halfstep._preflight.hlo.op_names import Pass, read
from halfstep._preflight.hlo.program import Instruction

GRADIENTS = "gradients"
RESIDUALS = "residuals"
COLLECTIVES = "collective buffers"
TEMPORARIES = "temporaries"


@dataclass(frozen=True, slots=True)
class BufferUse:
    """The purpose of a buffer.

    Attributes:
        role: `residuals`, `gradients`, `collective buffers` or `temporaries`.
        origin: The operation that computes its contents.
        array: Its dtype and shape.
        instruction: The name of the instruction that writes it.
    """

    role: str
    origin: Instruction
    array: str
    instruction: str


class BufferRoles:
    """Decides by the names that JAX gives to operations, and by who reads a buffer.

    - A *collective buffer* is written by a collective: an all-gather, a reduce-scatter ...
    - A *gradient* is written in the backward pass and read outside it, or returned.
    - A *residual* is written before the backward pass and read by it. Residuals are the values that
      `jax.checkpoint` decides about, and also masks and 16-bit copies of weights.
    - Everything else is a *temporary*: values that one pass both computes and reads, and
      workspaces.

    The backward pass is the part that `jax.grad` transposed, with the operations that
    `jax.checkpoint` recomputes in it. Only names tell the passes apart, which has limits. A
    backward pass that was written by hand, outside JAX's transformations, is not recognized. A
    fusion of several operations counts by its result. Where the compiler merges equal operations,
    only one of their names is left.
    """

    def __init__(self, assignment: BufferAssignment):
        self._module = assignment.module
        self._uses = BufferUses(assignment.module)

    def of(self, values: Iterable[Value], *, returned: bool = False) -> BufferUse:
        """Say what the values that lie in one buffer are for."""
        last = list(values)[-1]
        node = self._module.instructions[last.node]
        writers = self._uses.writers(node, last.index)
        chosen = writers[0] if writers else Writer(node, last.index, node, False)
        # A loop's buffer is first filled with zeros, which says nothing about its later contents.
        telling = [one for one in writers if one.in_loop == chosen.in_loop]
        return BufferUse(
            role=self._role(node, last, telling, writers, returned=returned),
            origin=chosen.origin,
            array=node.array(last.index),
            instruction=chosen.node.name,
        )

    def _role(
        self,
        node: Instruction,
        value: Value,
        telling: list[Writer],
        writers: tuple[Writer, ...],
        *,
        returned: bool,
    ) -> str:
        if any(_is_collective(one.node) or _is_collective(one.origin) for one in telling):
            return COLLECTIVES
        written = {self._written_in(one) for one in telling}
        own = {one.node.id for one in writers}
        # A value that is written in place is also read where the writer's result goes.
        places = [(node, value.index), *((one.node, one.index) for one in writers)]
        readers = [r for r in self._uses.readers(*places) if r.id not in own]
        backward = any(self._reads_in_backward(reader) for reader in readers)
        if "backward" not in written:
            return RESIDUALS if backward else TEMPORARIES
        update = any(self._of(result) == "other" for r in readers for result in self._results(r))
        return GRADIENTS if returned or update else TEMPORARIES

    def _results(self, node: Instruction) -> tuple[Instruction, ...]:
        return self._uses.results(node)

    def _written_in(self, writer: Writer) -> Pass:
        of = self._of(writer.origin)
        if of in ("forward", "backward"):
            return of
        # If the operation has no name, the kernel's name is of the same pass.
        return self._of(writer.node) if of == "unknown" else of

    def _reads_in_backward(self, node: Instruction) -> bool:
        return any(self._of(inner) == "backward" for inner in self._uses.inside(node))

    def _of(self, node: Instruction) -> Pass:
        return read(node.op_name).of


def _is_collective(node: Instruction) -> bool:
    return node.opcode.removesuffix("-start").removesuffix("-done") in KINDS
