"""Who writes a buffer, in programs that no compiler here makes at once."""

from typing import Any

from halfstep._preflight.hlo.buffer_assignment import HloGraph, HloNode
from halfstep._preflight.hlo.buffer_uses import BufferUses


def test_a_call_without_operands():
    """So a TPU v7x calls its sparse core to lay out an array differently."""

    def node(number: int, opcode: str, computation: int, **more: Any) -> HloNode:
        empty = {"operands": (), "called": (), "parameter": 0, "element": 0}
        return HloNode(
            id=number,
            name=f"{opcode}.{number}",
            opcode=opcode,
            computation=computation,
            **{**empty, **more},
            op_name="jit(step)/add",
            source="train.py:1",
            _shape=b"",
        )

    start = node(1, "async-start", 0, called=(1,))
    inside = (node(2, "parameter", 1), node(3, "copy", 1, operands=(2,)))
    graph = HloGraph(
        nodes={one.id: one for one in (start, *inside)},
        members={0: (start,), 1: inside},
        roots={0: 1, 1: 3},
        entry=0,
    )
    uses = BufferUses(graph)
    for value, index in ((start, (1,)), (inside[1], ())):
        (writer,) = uses.writers(value, index)
        assert writer.origin is inside[1]
