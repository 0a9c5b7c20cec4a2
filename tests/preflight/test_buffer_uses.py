"""Who writes a buffer, in programs that no compiler here makes at once."""

from halfstep._preflight.hlo.buffer_uses import BufferUses
from halfstep._preflight.hlo.program import read_module
from tests.preflight._programs import program, proto
from tests.preflight._protos import changed, without


def test_a_call_without_operands():
    """So a TPU v7x calls its sparse core to lay out an array differently."""
    inner = """
%inner (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  ROOT %copied = f32[4] copy(%p), metadata={op_name="jit(step)/add"}
}"""
    entry = """
        %x = f32[4] parameter(0)
        %start = ((f32[4]), f32[4], u32[]) async-start(%x), calls=%inner
        ROOT %done = f32[4] async-done(%start)"""
    module = read_module(changed(proto(program(entry, inner)), "start", without(36)))
    named = {one.name: one for one in module.instructions.values()}
    uses = BufferUses(module)
    for value, index in ((named["start"], (1,)), (named["copied"], ())):
        (writer,) = uses.writers(value, index)
        assert writer.origin is named["copied"]
