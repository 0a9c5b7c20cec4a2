"""What fills the peak: the buffer assignment is decoded, walked through and shown."""

import dataclasses
import pathlib
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import halfstep
from halfstep._preflight import Argument, parse_target
from halfstep._preflight.compile import compiler
from halfstep._preflight.compile.lowering import lower
from halfstep._preflight.hlo.buffer_assignment import (
    Allocation,
    BufferAssignment,
    Event,
    Value,
    decode,
)
from halfstep._preflight.hlo.live_buffers import live_buffers
from halfstep._preflight.hlo.op_names import OpName, read
from halfstep._preflight.hlo.program import read_module
from halfstep._preflight.hlo.shapes import DTYPES
from halfstep._preflight.hlo.wire import Message
from halfstep._preflight.report.peak import GAPS, UNLISTED, make_peak
from tests.preflight import _cases
from tests.preflight._compilers import need
from tests.preflight._entries import GIB, entry, peak as made_peak
from tests.preflight._programs import program as written, proto

TARGETS = [pytest.param("h100", "cuda", id="gpu"), pytest.param("v5e", "tpu", id="tpu")]


def layers(batch: int) -> _cases.Case:
    """Four layers by scan, in a named scope, under plain gradient descent."""
    params = {
        "up": jax.ShapeDtypeStruct((4, 512, 1024), jnp.float32),
        "down": jax.ShapeDtypeStruct((4, 1024, 512), jnp.float32),
    }

    def layer(x: Any, weights: Any) -> Any:
        with jax.named_scope("mlp"):
            hidden = jnp.tanh(x @ weights["up"])
        return x + hidden @ weights["down"], None

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

        grads = jax.grad(loss)(params)
        # Read twice, so that the gradients have to be kept until all of them are there.
        norm = sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))
        return jax.tree.map(lambda p, g: p - g / jnp.sqrt(norm), params, grads)

    return step, (params, jax.ShapeDtypeStruct((batch, 512), jnp.float32)), (0,)


@pytest.mark.rows(1)
@pytest.mark.parametrize(("target", "platform"), TARGETS)
@pytest.mark.usefixtures("standard_promotion")
def test_a_scan(target: str, platform: str, tmp_path: pathlib.Path):
    need(platform)
    step, args, donated = layers(32768)
    report = halfstep.preflight(step, args, targets=target, donate_argnums=donated)
    found = report[target]
    peak = found.peak
    assert peak is not None
    assert peak.bytes == found.peak_bytes
    assert peak.live_bytes + sum(peak.rest.values()) == peak.bytes
    assert sum(peak.by("role").values()) == sum(peak.by("source").values()) == peak.live_bytes
    assert set(peak.rest) <= {GAPS, UNLISTED}
    assert min(peak.rest.values(), default=0) >= 0
    roles = peak.by("role")
    if platform == "cuda":
        assert not peak.rest, "XLA:GPU's peak is that of its buffers, to the byte"
        assert roles["gradients"] == roles["parameters"]
    # XLA:TPU counts memory that it lists nowhere: of what it lists, nearly all is attributed.
    assert peak.attributed * peak.bytes >= 0.95 * peak.live_bytes
    assert roles["parameters"] == 2 * 4 * 512 * 1024 * 4
    assert roles["batch"] == 32768 * 512 * 4
    # Of each layer its input, the tanh and its derivative, in float32 or, on a TPU, in bfloat16.
    elements = 4 * 32768 * (512 + 2 * 1024)
    assert 2 * elements <= roles["residuals"] <= 4 * elements * 1.05
    hidden = [b for b in peak.buffers if b.scope == "mlp" and b.role == "residuals"]
    assert any("[4,32768,1024]" in b.array and "test_peak.py" in b.source for b in hidden)
    # Saved, loaded and shown.
    path = tmp_path / "report.json"
    report.to_json(path)
    assert halfstep.PreflightReport.load(path).entries == report.entries
    assert "residuals" in str(report.peak)
    assert "test_peak.py" in report.detail()


@pytest.mark.slow
@pytest.mark.parametrize(("target", "platform"), TARGETS)
@pytest.mark.parametrize("model", ["GPT", "desktop ViT"])
@pytest.mark.usefixtures("standard_promotion")
def test_a_whole_model(model: str, target: str, platform: str):
    need(platform)
    models = pytest.importorskip("benchmarks._models")
    steps = pytest.importorskip("benchmarks._steps")
    chosen, batch = (models.GPT, 8) if model == "GPT" else (models.DESKTOP, 256)
    variant = steps.VARIANTS["halfstep, bf16"]
    program = lower(
        variant.of(chosen.loss),
        steps.arguments(variant, chosen, batch),
        platform=platform,
        donate_argnums=steps.DONATED,
    )
    answer = compiler.compile_program(program, parse_target(target), gemm="library")
    compiled = answer.memory["peak_memory_in_bytes"]
    found = [
        Argument(leaf.name, "other", leaf.dtype, leaf.shape, leaf.bytes, False)
        for leaf in program.leaves
    ]
    peak = make_peak(answer.program, found, on_tpu=platform == "tpu", peak_bytes=compiled)
    assert peak is not None
    # To the byte, on both: the compiler's own figure has neither gaps nor code in it.
    assert peak.live_bytes == compiled
    assert peak.attributed >= 0.95
    roles = peak.by("role")
    assert max(roles, key=lambda role: roles[role]) == "residuals"


def test_buffers_of_one_line_are_one_row():
    need("cuda")
    layers, width = 5, 256

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    w = jax.ShapeDtypeStruct((width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((512, width), jnp.float32)
    peak = halfstep.preflight(jax.grad(loss), ([w] * layers, x), targets="h100")["h100"].peak
    assert peak is not None
    made = [b for b in peak.buffers if b.role == "outputs" and b.array == "float32[256,256]"]
    # The gradients of all layers; their weights have names of their own.
    assert [(b.count, b.bytes) for b in made] == [(layers, layers * 4 * width**2)]
    given = [b for b in peak.buffers if b.role == "parameters"]
    assert [(b.count, b.bytes) for b in given] == [(1, 4 * width**2)] * layers


@pytest.mark.usefixtures("standard_promotion")
def test_collective_buffers():
    need("cuda")
    from jax.sharding import PartitionSpec as P

    def step(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w))

    w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    x = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
    report = halfstep.preflight(
        step, (w, x), targets="h100:8", mesh={"data": 8}, shardings=(P("data"), P("data"))
    )
    peak = report["h100:8"].peak
    assert peak is not None
    # The whole weight, gathered.
    assert peak.by("role")["collective buffers"] >= 4096 * 4096 * 4
    assert peak.attributed >= 0.95


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_step_that_is_too_large_for_a_tpu():
    need("tpu")

    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) @ w))(w)

    w = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    x = jax.ShapeDtypeStruct((400_000, 8192), jnp.float32)
    report = halfstep.preflight(step, (w, x), targets="v5e")
    peak = report["v5e"].peak
    assert peak is not None
    assert peak.bytes > report["v5e"].usable_bytes
    assert peak.by("role")["residuals"] == 400_000 * 8192 * 4
    with pytest.raises(halfstep.DoesNotFitError, match=r"at the peak are residuals of .*test_peak"):
        report.require_fit()


# The file against the text that the compiler writes beside it.

_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+),(?: color (\d+),)?(.*):$", re.MULTILINE)
_VALUE = re.compile(
    r"^ value: <(\d+) (\S+?)(\{[\d,]*\})? @(\d+)> \(size=(\d+),offset", re.MULTILINE
)


@pytest.mark.rows(1)
@pytest.mark.parametrize(("target", "platform"), TARGETS)
@pytest.mark.usefixtures("standard_promotion")
def test_decoded_as_the_compiler_prints_it(target: str, platform: str, tmp_path: pathlib.Path):
    need(platform)
    step, args, donated = _cases.classifier(16)
    program = lower(step, args, platform=platform, donate_argnums=donated)
    kept: list[str] = []

    def keep(folder: pathlib.Path, environment: dict[str, str], *rest: Any) -> int:
        environment["XLA_FLAGS"] += " --xla_dump_hlo_as_text"
        code = run(folder, environment, *rest)
        (text,) = folder.glob("dump/*jit_call*-buffer-assignment.txt")
        kept.append(text.read_text())
        return code

    run = compiler._run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_run", keep)
        answer = compiler.compile_program(program, parse_target(target), cache=False)
    assignment = decode(answer.program)
    printed = {
        (int(number), int(size), int(color or 0), _kind(rest))
        for number, size, color, rest in _ALLOCATION.findall(kept[0])
    }
    assert printed == {
        (one.number, one.bytes, one.color, one.kind) for one in assignment.allocations.values()
    }
    nodes = assignment.module.instructions
    values = {
        (int(number), name, index.strip("{}"), int(color), int(size))
        for number, name, index, color, size in _VALUE.findall(kept[0])
    }
    assert values == {
        (number, nodes[v.node].name, ",".join(map(str, v.index)), v.color, v.bytes)
        for number, v in assignment.values.items()
        if any(number in one.values for one in assignment.allocations.values())
    }
    # Shapes, by what the program's text has for the same instruction.
    arrays = Counter(nodes[v.node].array(v.index) for v in assignment.values.values())
    assert arrays["float32[3072,256]"] >= 3


def _kind(rest: str) -> str:
    kinds = ("thread-local", "parameter", "constant", "maybe-live-out")
    first = next((kind for kind in kinds if kind in rest), "temporary")
    return {"parameter": "argument", "maybe-live-out": "output"}.get(first, first)


# The parts.


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x0a\x05ab", "5 bytes are expected at 2, and 2 are left"),
        (b"\x08\xff", "an integer is cut off"),
        (b"\x0b", "not the start of a protocol buffer's field"),
    ],
    ids=["short", "cut off", "unknown kind"],
)
def test_bytes_that_are_no_message(data: bytes, message: str):
    with pytest.raises(ValueError, match=message):
        Message(data)


def test_a_message():
    # Field 1: 300; field 2: "ab"; field 3: 1, 2, 300 packed, then 7 by itself; field 4: {1: 5}.
    data = b"\x08\xac\x02\x12\x02ab\x1a\x04\x01\x02\xac\x02\x18\x07\x22\x02\x08\x05"
    message = Message(data)
    assert message.integer(1) == 300
    assert message.text(2) == "ab"
    assert message.integers(3) == (1, 2, 300, 7)
    assert message.message(4).integer(1) == 5
    assert (message.integer(9), message.text(9), message.integers(9)) == (0, "", ())


def test_a_file_without_a_buffer_assignment():
    with pytest.raises(ValueError, match="no program with a buffer assignment"):
        decode(b"\x0a\x00")
    assert make_peak(b"\x0a\x00", (), on_tpu=False, peak_bytes=1) is None
    assert make_peak(b"", (), on_tpu=False, peak_bytes=1) is None


def test_dtypes_are_those_of_jax():
    assert all(jnp.dtype(name).name == name for name in DTYPES.values() if name not in _PACKED)


# Their NumPy dtypes come from ml_dtypes, which not all versions have.
_PACKED = {"int1", "uint1", "int2", "uint2", "int4", "uint4"}


def _assignment(
    sizes: dict[int, int], events: list[Event], allocations: list[Allocation]
) -> BufferAssignment:
    values = {number: Value(number, (), size, 0) for number, size in sizes.items()}
    module = read_module(proto(written("ROOT %p = f32[] parameter(0)")))
    return BufferAssignment(
        module, values, {one.number: one for one in allocations}, {0: tuple(events)}
    )


def _allocation(number: int, size: int, kind: Any = "temporary", color: int = 0) -> Allocation:
    return Allocation(number, size, color, kind, 0, (number,), False)


def test_what_is_live_when_the_most_is():
    events = [
        Event("begin", 1, 0, "a"),
        Event("begin", 2, 0, "b"),
        # In the place of 2: it takes nothing more.
        Event("share", 3, 2, "c"),
        Event("end", 2, 0, "c"),
        Event("begin", 4, 0, "d"),
        Event("end", 1, 0, "e"),
        Event("begin", 5, 0, "f"),
        Event("end", 3, 0, "g"),
        Event("end", 4, 0, "g"),
        Event("end", 5, 0, "g"),
    ]
    sizes = {1: 100, 2: 10, 3: 10, 4: 5, 5: 50}
    allocations = [_allocation(0, 120), _allocation(7, 1000, "thread-local")]
    found = live_buffers(_assignment(sizes, events, allocations), on_tpu=False)
    assert found.at == "d"
    assert [buffer.bytes for buffer in found.buffers] == [100, 10, 5]
    assert [[value.node for value in buffer.values] for buffer in found.buffers] == [[1], [3], [4]]
    assert found.gaps == 5


@pytest.mark.parametrize(("on_tpu", "counted"), [(True, 1), (False, 3)], ids=["tpu", "gpu"])
def test_memory_that_is_not_the_devices(on_tpu: bool, counted: int):
    # Space 1 is on a TPU's chip and in a GPU's memory; space 5 is the host's.
    kinds = [
        _allocation(number, 2**number, "constant", color=color)
        for number, color in ((0, 0), (1, 1), (2, 5))
    ]
    found = live_buffers(_assignment({0: 1, 1: 2, 2: 4}, [], kinds), on_tpu=on_tpu)
    assert found.bytes == counted


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jvp(block/attention)/dot_general", OpName("block/attention", "dot_general", "forward")),
        (
            "jit(call)/call_exported/jit(flat)/transpose(jvp(mlp))/while/body/checkpoint/mul",
            OpName("mlp", "mul", "backward"),
        ),
        ("jit(step)/head/bhqk,bkhd->bqhd/dot_general", OpName("head", "dot_general", "other")),
        ("vmap(jvp(eqx.nn.Linear))/add", OpName("eqx.nn.Linear", "add", "forward")),
        ("jit(call)/call_exported", OpName("", "", "unknown")),
        ("", OpName("", "", "unknown")),
    ],
)
def test_names_of_operations(name: str, expected: OpName):
    assert read(name) == expected


# Shown.


def test_the_table():
    report = halfstep.PreflightReport((entry(peak=made_peak()),))
    lines = str(report.peak).splitlines()
    assert lines[0] == "What fills the peak of bf16 on h100, 10.00 GiB, in tanh at a.py:3:"
    assert lines[3].split() == [
        "6.00", "GiB", "60", "%", "residuals", "12", "x", "bfloat16[8,4]", "mlp", "a.py:3",
    ]  # fmt: skip
    assert "4 more groups" in lines[13]
    assert "Attributed: 90.8 % of the peak; the rest: 946.00 MiB counted" in lines[-1]
    assert "By role: residuals 60 %, parameters 30 %, temporaries 0.8 %." in lines[-2]
    assert "<td" in report.peak._repr_html_()
    assert "a.py:3" in report.peak._repr_html_()
    made = report.peak.to_dict()["entries"][0]["peak"]
    assert made["by_source"]["a.py:3"] == 6 * GIB
    assert made["by_scope"]["mlp"] == 6 * GIB


def test_a_report_without_it():
    report = halfstep.PreflightReport((entry(),))
    assert "the compiler has not said what fills the peak" in str(report.peak)
    assert "has not said" in report.peak._repr_html_()
    assert report.peak.to_dict()["entries"][0]["peak"] is None


def test_the_picture(tmp_path: pathlib.Path):
    pytest.importorskip("matplotlib")
    report = halfstep.PreflightReport(
        (entry(peak=made_peak()), entry(target="v5e", peak=made_peak()))
    )
    report.peak.plot(tmp_path / "peak.png")
    assert (tmp_path / "peak.png").read_bytes().startswith(b"\x89PNG")
    halfstep.PreflightReport((entry(),)).peak.plot(tmp_path / "none.png")


def test_what_has_neither_name_nor_line_is_not_attributed():
    peak = made_peak()
    bare = dataclasses.replace(peak.buffers[0], name="", source="")
    found = dataclasses.replace(peak, buffers=(bare, *peak.buffers[1:]))
    assert found.attributed < 0.4
    assert found.unattributed["buffers without a name"] == 6 * GIB


def test_it_is_said_when_a_step_does_not_fit():
    report = halfstep.PreflightReport((entry(fits=False, usable_bytes=GIB, peak=made_peak()),))
    message = r"at the peak are residuals of a\.py:3, 12 x bfloat16\[8,4\]: 6\.00 GiB"
    with pytest.raises(halfstep.DoesNotFitError, match=message):
        report.require_fit()
