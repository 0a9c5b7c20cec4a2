"""Decide what a temporary buffer is for, and which operation of the user's it comes from."""

from collections.abc import Iterable
from dataclasses import dataclass

from halfstep._preflight.hlo.buffer_assignment import BufferAssignment, HloNode, Value
from halfstep._preflight.hlo.buffer_uses import BufferUses, Writer
from halfstep._preflight.hlo.collectives import KINDS
from halfstep._preflight.hlo.op_names import Pass, read

GRADIENTS = "gradients"
RESIDUALS = "residuals"
COLLECTIVES = "collective buffers"
TEMPORARIES = "temporaries"


@dataclass(frozen=True, slots=True)
class BufferUse:
    """What a buffer is for.

    Attributes:
        role: `residuals`, `gradients`, `collective buffers` or `temporaries`.
        origin: The operation that computes what lies in it.
        array: Its dtype and shape.
        instruction: The name of the instruction that writes it.
    """

    role: str
    origin: HloNode
    array: str
    instruction: str


class BufferRoles:
    """Decides by the names that JAX gives to operations, and by who reads what.

    - A *collective buffer* is written by a collective: an all-gather, a reduce-scatter ...
    - A *gradient* is written in the backward pass and read outside of it, or returned.
    - A *residual* is written before the backward pass and read by it. That is what
      `jax.checkpoint` decides about, and also a mask or a copy of a weight in 16 bits.
    - All else is a *temporary*: what one pass computes and reads itself, and workspaces.

    The backward pass is what `jax.grad` has transposed, with what `jax.checkpoint` recomputes in
    it. Names are all that there is: a backward pass that was written by hand outside of JAX's
    transformations is not recognized, a fusion of several operations counts by its result, and
    where the compiler merges equal operations, the name of one of them is left.
    """

    def __init__(self, assignment: BufferAssignment):
        self._graph = assignment.graph
        self._uses = BufferUses(assignment.graph)

    def of(self, values: Iterable[Value], *, returned: bool = False) -> BufferUse:
        """Say what the values that lie in one buffer are for."""
        last = list(values)[-1]
        node = self._graph.nodes[last.node]
        writers = self._uses.writers(node, last.index)
        chosen = writers[0] if writers else Writer(node, last.index, node, False)
        # A loop's buffer is first filled with zeros, which says nothing about what is put in.
        telling = [one for one in writers if one.in_loop == chosen.in_loop]
        return BufferUse(
            role=self._role(node, last, telling, writers, returned=returned),
            origin=chosen.origin,
            array=node.array(last.index),
            instruction=chosen.node.name,
        )

    def _role(
        self,
        node: HloNode,
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
        # What is written in place is read where the writer's result goes, too.
        places = [(node, value.index), *((one.node, one.index) for one in writers)]
        readers = [r for r in self._uses.readers(*places) if r.id not in own]
        backward = any(self._reads_in_backward(reader) for reader in readers)
        if "backward" not in written:
            return RESIDUALS if backward else TEMPORARIES
        update = any(self._of(result) == "other" for r in readers for result in self._results(r))
        return GRADIENTS if returned or update else TEMPORARIES

    def _results(self, node: HloNode) -> tuple[HloNode, ...]:
        return self._uses.results(node)

    def _written_in(self, writer: Writer) -> Pass:
        of = self._of(writer.origin)
        if of in ("forward", "backward"):
            return of
        # Where the operation has no name, that of the kernel is of the same pass.
        return self._of(writer.node) if of == "unknown" else of

    def _reads_in_backward(self, node: HloNode) -> bool:
        return any(self._of(inner) == "backward" for inner in self._uses.inside(node))

    def _of(self, node: HloNode) -> Pass:
        return read(node.op_name).of


def _is_collective(node: HloNode) -> bool:
    return node.opcode.removesuffix("-start").removesuffix("-done") in KINDS
