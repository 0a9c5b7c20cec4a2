"""Reading compiled programs: as XLA itself reads them, with Pallas kernels, and damaged."""

import pathlib
import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import halfstep
from halfstep._preflight.compile import worker
from halfstep._preflight.hlo.analysis import analyze
from halfstep._preflight.hlo.program import Instruction, read_module
from halfstep._preflight.hlo.shapes import Tuple, leaves
from halfstep._preflight.hlo.wire import Message
from halfstep._preflight.report.peak import make_peak
from tests.preflight._compilers import need
from tests.preflight._programs import XLA, fixture, proto_of
from tests.preflight._protos import message

TARGETS = [pytest.param("h100", "cuda", id="gpu"), pytest.param("v5e", "tpu", id="tpu")]


def layers(params: Any, x: Any) -> Any:
    """A scan, so that the program has a loop, with a layer that is differentiated."""

    def loss(params: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0])

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


SHAPES = (
    jax.ShapeDtypeStruct((4, 256, 256), jnp.float32),
    jax.ShapeDtypeStruct((64, 256), jnp.float32),
)


def printed(one: Any) -> str:
    """The shape and the opcode of an instruction, as XLA prints them: `f32[8] add`."""
    text = re.sub(r"\{[^{}]*\}", "", one.to_string())
    return text.partition(" = ")[2].partition("(")[0]


SHORT = {"bool": "pred", "float8_": "f8", "bfloat": "bf", "float": "f", "uint": "u", "int": "s"}


def read(one: Instruction) -> str:
    """The same, as it is read here; nothing for tuples, which have parentheses of their own."""
    if isinstance(one.shape, Tuple):
        return ""
    (array,) = leaves(one.shape)
    name = array.dtype
    for long, short in SHORT.items():
        if name.startswith(long):
            name = short + name.removeprefix(long)
            break
    return f"{name}[{','.join(map(str, array.dims))}] {one.opcode}"


@pytest.mark.parametrize(("target", "platform"), TARGETS)
def test_a_program_is_read_as_xla_reads_it(target: str, platform: str):
    """Every computation and instruction: names, opcodes, operands, dtypes and shapes."""
    need(platform)
    entry = halfstep.preflight(layers, SHAPES, targets=target, progress=False)[target]
    data = Message(entry.proto).raw(1)
    found, real = read_module(data), XLA.HloModule.from_serialized_hlo_module_proto(data)
    computations = {computation.name: computation for computation in found.computations.values()}
    assert computations.keys() == {computation.name for computation in real.computations()}
    count = 0
    for computation in real.computations():
        ours = {one.name: one for one in computations[computation.name]}
        theirs = {one.name: one for one in computation.instructions()}
        assert ours.keys() == theirs.keys()
        for name, one in theirs.items():
            count += 1
            operands = [found.instructions[number].name for number in ours[name].operands]
            assert operands == [operand.name for operand in one.operands()]
            text = printed(one)
            if ours[name].opcode.startswith("async-"):
                # XLA prints an asynchronous call by the name of what it calls: `slice-done`.
                text = re.sub(r" \S+-(start|update|done)$", r" async-\1", text)
            assert read(ours[name]) in ("", text)
    assert count == len(found.instructions) > 100
    assert sum(bool(read(one)) for one in found.instructions.values()) > 0.7 * count
    # Every number of the report comes from this program.
    assert analyze(data).contractions == entry.contractions
    assert entry.contractions is not None
    assert sum(c.flops for c in entry.contractions) >= 3 * 4 * 2 * 64 * 256 * 256 * 2 // 3
    assert analyze(data).unknown_trip_counts == 0


@pytest.mark.usefixtures("standard_promotion")
def test_splash_attention():
    """Its kernels have attributes that go over lines, which the text of a program shows as such."""
    need("tpu")
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernel,
        splash_attention_mask as mask,
    )

    heads, length, size = 2, 512, 128
    causal = mask.MultiHeadMask([mask.CausalMask((length, length)) for _ in range(heads)])
    attention = kernel.make_splash_mha_single_device(mask=causal)

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            q = (x @ w).reshape(length, heads, size).transpose(1, 0, 2)
            return jnp.sum(jnp.asarray(attention(q, q, q)).astype(jnp.float32))

        return w - jax.grad(loss)(w)

    w = jax.ShapeDtypeStruct((heads * size, heads * size), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((length, heads * size), jnp.bfloat16)
    entry = halfstep.preflight(step, (w, x), targets="v6e", progress=False)["v6e"]
    # Forward, and backward for queries and for keys and values.
    assert entry.uncounted == (("tpu_custom_call", 3),)
    assert entry.contractions is not None
    # Forward and backward of the projection; its input has no gradient.
    assert sum(c.flops for c in entry.contractions) == 2 * 2 * length * (heads * size) ** 2
    assert entry.traffic_bytes is not None
    # Both inputs are read and the result is written; the kernels work on chip.
    assert entry.traffic_bytes >= 2 * (length * heads * size + 2 * (heads * size) ** 2)
    assert entry.peak is not None


@pytest.mark.parametrize("name", ["h100_nested_loops", "v5e_async_collective"])
def test_damaged_programs(name: str):
    """Each is read or refused, and none is taken at its word about a length."""
    whole = fixture(name)
    chance = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 2, 5))):
            at = chance.randrange(len(damaged))
            damaged[at] = chance.choice(
                (0, 0x7F, 0x80, 0xFF, damaged[at] ^ 1 << chance.randrange(8))
            )
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged)) :]
        try:
            analyze(bytes(damaged))
        except ValueError:
            refused += 1
        # The peak is optional: a file that cannot be read counts as none.
        make_peak(message((1, bytes(damaged)), (3, b"")), (), on_tpu=True, peak_bytes=1)
    assert 50 < refused < 150


@pytest.mark.parametrize("dump", [True, False], ids=["dump", "executable"])
def test_the_worker_hands_over_the_program(tmp_path: pathlib.Path, dump: bool):
    """From the dump, else from the executable."""
    compiled = jax.jit(layers).lower(*SHAPES).compile()
    module = proto_of(compiled)
    dumped = message((1, module), (3, message((3, b""))))
    if dump:
        (tmp_path / "dump").mkdir()
        (tmp_path / "dump" / "m.jit_call.after_optimizations.hlo.pb").write_bytes(dumped)
    handed = worker.optimized(tmp_path, compiled)
    assert handed == (dumped if dump else message((1, module)))
    assert analyze(Message(handed).raw(1)).contractions


def test_an_executable_without_its_program(tmp_path: pathlib.Path):
    class Executable:
        def runtime_executable(self) -> Any:
            raise NotImplementedError("UNIMPLEMENTED: hlo_modules")

    assert worker.optimized(tmp_path, Executable()) == b""
    assert worker.optimized(tmp_path, None) == b""
