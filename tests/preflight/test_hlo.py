"""Reading programs: shapes, attributes, what cannot be read, and how often loops turn."""

import pytest

from halfstep._preflight.hlo.analysis import analyze
from halfstep._preflight.hlo.program import Instruction, read_module
from halfstep._preflight.hlo.shapes import Array, Tuple, leaves
from tests.preflight._programs import FIXTURES, count, fixture, program, proto
from tests.preflight._protos import changed, message, put, without


def shape_of(text: str, *, tiled: bool = False):
    """The shape as a parameter's, in a program of a backend with or without tiled layouts."""
    other = "f32[8]{0:T(128)}" if tiled else "f32[8]{0}"
    text = program(f"%o = {other} parameter(1)\nROOT %p = {text} parameter(0)")
    return read_module(proto(text)).entry.root.shape


@pytest.mark.parametrize(
    ("text", "dtype", "dims", "size"),
    [
        ("f32[]", "float32", (), 4),
        ("f32[2,3]{1,0}", "float32", (2, 3), 24),
        ("bf16[256,64,3]{1,2,0:T(8,128)(2,1)}", "bfloat16", (256, 64, 3), 98304),
        ("pred[7]{0:T(512)(4,1)}", "bool", (7,), 7),
        ("f8e4m3fn[5]", "float8_e4m3fn", (5,), 5),
        ("f8e5m2[5]", "float8_e5m2", (5,), 5),
        ("s4[5]{0:E(4)}", "int4", (5,), 3),
        ("c64[2]", "complex64", (2,), 16),
        ("f32[<=8,2]", "float32", (8, 2), 64),
        ("f32[0]{0}", "float32", (0,), 0),
        ("token[]", "token", (), 0),
        ("b(f32[4]{0})", "float32", (4,), 16),
        ("f32[16,16]{1,0:T(1)L(1024)}", "float32", (16, 16), 1024),
    ],
)
def test_arrays(text: str, dtype: str, dims: tuple[int, ...], size: int):
    shape = shape_of(text)
    assert isinstance(shape, Array)
    assert (shape.dtype, shape.dims, shape.bytes) == (dtype, dims, size)


def test_tuples_nest_and_have_comments():
    shape = shape_of(
        "((f32[8]{0:T(128)}), bf16[4,2]{1,0:T(8,128)(2,1)S(1)}, /*index=2*/u32[]{:S(2)})"
    )
    assert isinstance(shape, Tuple)
    assert isinstance(shape.elements[0], Tuple)
    assert [(a.dtype, a.dims, a.space) for a in leaves(shape)] == [
        ("float32", (8,), 0),
        ("bfloat16", (4, 2), 1),
        ("uint32", (), 2),
    ]


def test_where_a_memory_space_is_depends_on_the_backend():
    # Space 1 is on chip for XLA:TPU, whose layouts are tiled, and NCCL's buffers for XLA:GPU.
    for text, tpu, gpu in (("f32[8]{0:S(1)}", False, True), ("f32[8]{0:S(5)}", False, False)):
        for tiled, expected in ((True, tpu), (False, gpu)):
            shape = shape_of(text, tiled=tiled)
            assert isinstance(shape, Array)
            assert shape.in_memory is expected


def named(text: str) -> dict[str, Instruction]:
    """The instructions of an entry computation by name."""
    return {one.name: one for one in read_module(proto(program(text))).entry}


def test_what_an_instruction_says_of_itself():
    found = named(
        '%p = (f32[8], f32[8]) parameter(0), metadata={op_name="jit(step)/a, calls=%no, b} {"}\n'
        "%e = f32[8] get-tuple-element(%p), index=1\n"
        "ROOT %c = (f32[8], s8[4]) custom-call(%e, /*index=1*/%e), "
        'custom_call_target="f,g", frontend_attributes={_xla_compute_type="host"}, '
        r'backend_config={"k":"}\\","n":[1,2]}'
    )
    call, element, parameter = found["c"], found["e"], found["p"]
    assert (call.opcode, call.operands) == ("custom-call", (element.id, element.id))
    assert (call.target, call.backend_config) == ("f,g", r'{"k":"}\\","n":[1,2]}')
    assert call.on_host
    assert not element.on_host
    assert (element.operands, element.element) == ((parameter.id,), 1)
    assert (parameter.parameter, parameter.array((1,)), parameter.array(())) == (
        0,
        "float32[8]",
        "",
    )
    assert parameter.op_name == "jit(step)/a, calls=%no, b} {"
    assert parameter.origin.name == "a, calls=%no, b} {"


@pytest.mark.parametrize(
    ("constant", "number"),
    [
        ("pred[] constant(true)", 1),
        ("pred[] constant(false)", 0),
        ("s8[] constant(-3)", -3),
        ("u8[] constant(200)", 200),
        ("s16[] constant(-300)", -300),
        ("u16[] constant(40000)", 40000),
        ("s32[] constant(-2)", -2),
        ("u32[] constant(3000000000)", 3_000_000_000),
        ("s64[] constant(-5000000000)", -5_000_000_000),
        ("u64[] constant(7)", 7),
        ("f32[] constant(5)", 5),
        ("f64[] constant(-5)", -5),
        ("f32[] constant(1.5)", None),
        ("f32[] constant(inf)", None),
        ("f32[] constant(nan)", None),
        ("bf16[] constant(5)", None),
        ("s32[1] constant({5})", None),
        ("s32[] parameter(0)", None),
    ],
)
def test_numbers(constant: str, number: int | None):
    assert named(f"ROOT %c = {constant}")["c"].number == number


def test_the_root_need_not_be_last():
    module = read_module(proto(program("ROOT %r = f32[] parameter(0)\n%x = f32[] negate(%r)")))
    assert module.entry.root.name == "r"
    assert [one.name for one in module.entry] == ["r", "x"]


FUSED = """
%f (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  ROOT %b = f32[4] negate(%a)
}"""
PLAIN = proto(
    program("%p = f32[4] parameter(0)\nROOT %r = f32[4] fusion(%p), kind=kLoop, calls=%f", FUSED)
)
LOOP = proto(
    program(
        "%p = pred[] parameter(0)\nROOT %w = pred[] while(%p), condition=%c, body=%c",
        "%c (a: pred[]) -> pred[] {\n  ROOT %a = pred[] parameter(0)\n}",
    )
)


def shaped(*dims: int, kind: int = 11) -> bytes:
    return message((2, kind), *((3, size) for size in dims))


def nested(depth: int) -> bytes:
    shape = shaped(4)
    for _ in range(depth):
        shape = message((2, 13), (4, shape))
    return shape


IDS = {one.name: one.id for one in read_module(PLAIN).instructions.values()}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "expected a compiled program with an entry computation.* got 0 bytes"),
        (b"HloModule m", "byte 3 is not the start of a protocol buffer"),
        (PLAIN[:-1], "bytes are expected at|is cut off|entry computation"),
        (put((6, 99))(PLAIN), "with 2 computations and without the entry"),
        (changed(PLAIN, "r", put((38, 99))), "`r` of .*`main` calls a computation that is not bef"),
        (changed(PLAIN, "b", put((38, 2))), "`b` of .*`f` calls a computation that is not before"),
        (changed(PLAIN, "r", put((36, 99))), "`r` of .*`main` uses an instruction that is not bef"),
        (changed(PLAIN, "b", put((36, IDS["b"]))), "`b` of .*`f` uses an instruction that is not"),
        (changed(PLAIN, "b", put((36, IDS["p"]))), "`b` of .*`f` uses an instruction that is not"),
        (changed(PLAIN, "p", put((35, IDS["a"]))), "`p` of .*`main` has the number .* of another"),
        (changed(PLAIN, "r", without(38)), "`r` .* cannot be counted: expected 1 computations"),
        (changed(PLAIN, "a", put((9, 5))), r"`r` .* expected a parameter\(0\) in the computation"),
        (changed(LOOP, "w", put((38, read_module(LOOP).entry.root.called[0]))), "expected 2 comp"),
        (changed(PLAIN, "p", put((3, shaped(4, kind=99)))), "whose size is known, not `type 99`"),
        (changed(PLAIN, "p", put((3, shaped(-1)))), r"64 dimensions of known sizes, not \(-1,\)"),
        (changed(PLAIN, "p", put((3, shaped(*[2] * 65)))), "at most 64 dimensions of known sizes"),
        (changed(PLAIN, "p", put((3, nested(10_000)))), "tuples that are nested 64 times at most"),
        (changed(PLAIN, "p", put((3, b"\x1a\xff\xff\xff\x7f"))), "268435455 bytes are expected"),
    ],
    ids=range(18),
)
def test_what_cannot_be_read_raises(data: bytes, expected: str):
    assert analyze(PLAIN).traffic_bytes == 32
    with pytest.raises(ValueError, match=expected):
        analyze(data)


def test_what_no_count_depends_on_may_be_unknown():
    # The shape of a value that stays inside a kernel; an instruction that XLA does not have yet.
    inner = FUSED.replace(
        "ROOT %b = f32[4] negate(%a)", "%u = f32[4] sine(%a)\n  ROOT %b = f32[4] cosine(%u)"
    )
    text = program(
        "%p = f32[4] parameter(0)\nROOT %r = f32[4] fusion(%p), kind=kLoop, calls=%f", inner
    )
    data = changed(proto(text), "u", put((2, b"new"), (3, shaped(4, kind=99)), (200, b"new")))
    assert [(k.read, k.written) for k in analyze(data).kernels] == [(16, 16)]


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.hlo")), ids=lambda path: path.stem)
def test_every_instruction_of_a_real_program_is_read(path):
    module = read_module(fixture(path.stem))
    lines = path.read_text().splitlines()
    assert {one.name for one in module.instructions.values()} >= {
        line.split()[line.split()[0] == "ROOT"].lstrip("%")
        for line in lines
        if " = " in line and line[:2] == "  "
    }
    for computation in module.computations.values():
        for instruction in computation:
            assert instruction.results is not None
            assert len(computation.shapes(instruction)) == len(instruction.operands)
    assert analyze(fixture(path.stem)).unknown_trip_counts == 0


DOT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
STATE = "(s32[], f32[8,8], s32[])"


def loop(
    *,
    first: str = "constant(0)",
    step: str = "add(%i, %one)",
    compare: str = "compare(%i, %bound), direction=LT",
    config: str = "",
    bound: str = "constant(5)",
    by: str = "1",
) -> tuple[str, ...]:
    """A loop with one dot in its body, and its parts."""
    entry = f"""
      %x = f32[8,8] parameter(0)
      %start = s32[] {first}
      %copied = s32[] copy(%start)
      %five = s32[] constant(5)
      %state = {STATE} tuple(%copied, %x, %five)
      ROOT %loop = {STATE} while(%state), condition=%condition, body=%body{config}"""
    body = f"""
%body (s: {STATE}) -> {STATE} {{
  %s = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,8] get-tuple-element(%s), index=1
  %n = s32[] get-tuple-element(%s), index=2
  %one = s32[] constant({by})
  %next = s32[] {step}
  %y = f32[8,8] {DOT}
  ROOT %out = {STATE} tuple(%next, %y, %n)
}}"""
    condition = f"""
%condition (s: {STATE}) -> pred[] {{
  %s = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=2
  %bound = s32[] {bound}
  ROOT %more = pred[] {compare}
}}"""
    return entry, body, condition


@pytest.mark.parametrize(
    ("parts", "turns"),
    [
        ({}, 5),
        ({"first": "constant(-2)"}, 7),
        ({"first": "constant(9)"}, 0),
        ({"compare": "compare(%i, %bound), direction=LE"}, 6),
        ({"compare": "compare(%bound, %i), direction=GT"}, 5),
        ({"compare": "compare(%i, %bound), direction=NE"}, 5),
        ({"compare": "compare(%i, %n), direction=LT"}, 5),
        ({"step": "add(%one, %i)", "bound": "constant(11)"}, 11),
        (
            {
                "first": "constant(20)",
                "step": "subtract(%i, %one)",
                "compare": "compare(%i, %bound), direction=GE",
            },
            16,
        ),
        (
            {
                "first": "constant(20)",
                "step": "subtract(%i, %one)",
                "compare": "compare(%i, %bound), direction=GT",
            },
            15,
        ),
        ({"config": ', backend_config={"known_trip_count":{"n":"31"}}'}, 31),
    ],
)
def test_how_often_a_loop_turns(parts: dict[str, str], turns: int):
    analysis = count(*loop(**parts))
    assert analysis.unknown_trip_counts == 0
    assert analysis.flops == turns * 2 * 8**3
    assert sum(c.count for c in analysis.contractions) == turns


GATE = """
%body (s: (pred[], f32[8,8])) -> (pred[], f32[8,8]) {{
  %s = (pred[], f32[8,8]) parameter(0)
  %flag = pred[] get-tuple-element(%s), index=0
  %x = f32[8,8] get-tuple-element(%s), index=1
  %y = f32[8,8] dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %off = pred[] constant({literal})
  %after = pred[] copy(%off)
  ROOT %t = (pred[], f32[8,8]) tuple({after}, %y)
}}

%condition (s: (pred[], f32[8,8])) -> pred[] {{
  %s = (pred[], f32[8,8]) parameter(0)
  ROOT %flag = pred[] get-tuple-element(%s), index=0
}}"""


@pytest.mark.parametrize(
    ("literal", "after", "unknown"),
    [("false", "%after", 0), ("true", "%after", 1), ("false", "%flag", 1)],
)
def test_update_or_skip_is_not_an_unknown_loop(literal: str, after: str, unknown: int):
    """The loop of `optimizer_update` runs at most once: its body turns its own condition off."""
    analysis = count(
        "%p = (pred[], f32[8,8]) parameter(0)\n"
        "ROOT %w = (pred[], f32[8,8]) while(%p), condition=%condition, body=%body",
        GATE.format(literal=literal, after=after),
    )
    assert analysis.unknown_trip_counts == unknown
    assert analysis.flops == 2 * 8**3


@pytest.mark.parametrize(
    "parts",
    [
        {"first": "parameter(1)"},
        {"step": "multiply(%i, %one)"},
        {"step": "add(%n, %one)"},
        {"step": "subtract(%i, %one)"},
        {"bound": "parameter(1)"},
        {"compare": "compare(%i, %n), direction=NE", "first": "constant(6)"},
        {"compare": 'custom-call(%i), custom_call_target="Sharding"'},
    ],
)
def test_a_loop_that_cannot_be_known_counts_once(parts: dict[str, str]):
    analysis = count(*loop(**parts))
    assert analysis.unknown_trip_counts == 1
    assert analysis.flops == 2 * 8**3


def test_a_step_of_three_rounds_up():
    entry, body, condition = loop(step="add(%i, %one)")
    body = body.replace("constant(1)", "constant(3)")
    assert count(entry, body, condition).flops == 2 * (2 * 8**3)


def test_the_condition_runs_once_more_than_the_body():
    entry, body, condition = loop()
    condition = condition.replace(
        "  %bound",
        f"  %x = f32[8,8] get-tuple-element(%s), index=1\n  %y = f32[8,8] {DOT}\n  %bound",
    )
    assert count(entry, body, condition).flops == (5 + 6) * 2 * 8**3


NESTED = f"""
%plus (a: s32[], b: s32[]) -> s32[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = s32[] add(%a, %b)
}}

%outer (s: {STATE}) -> {STATE} {{
  %s = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,8] get-tuple-element(%s), index=1
  %n = s32[] get-tuple-element(%s), index=2
  %zero = s32[] constant(0)
  %state = {STATE} tuple(%zero, %x, %n)
  %inner = {STATE} while(%state), condition=%condition, body=%body
  %y = f32[8,8] get-tuple-element(%inner), index=1
  %one = s32[] constant(1)
  %next = s32[] fusion(%i, %one), kind=kLoop, calls=%plus
  ROOT %out = {STATE} tuple(%next, %y, %n)
}}

%less (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = pred[] compare(%a, %b), direction=LT
}}

%outer_condition (s: {STATE}) -> pred[] {{
  %s = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %seven = s32[] constant(7)
  ROOT %more = pred[] fusion(%i, %seven), kind=kLoop, calls=%less
}}"""


def test_nested_loops_multiply_and_constants_reach_the_inner_one():
    # The inner loop's bound, 5, is an element of the outer loop's state that no turn changes.
    entry, body, condition = loop(compare="compare(%i, %n), direction=LT")
    entry = entry.replace(
        "condition=%condition, body=%body", "condition=%outer_condition, body=%outer"
    )
    analysis = count(entry, body, condition, NESTED)
    assert analysis.unknown_trip_counts == 0
    assert analysis.flops == 7 * 5 * 2 * 8**3


def test_constants_reach_a_loop_in_a_branch():
    _, body, condition = loop(compare="compare(%i, %n), direction=LT")
    branch = f"""
%branch (s: {STATE}) -> {STATE} {{
  %s = {STATE} parameter(0)
  ROOT %l = {STATE} while(%s), condition=%condition, body=%body
}}"""
    branches = "true_computation=%branch, false_computation=%branch"
    entry = f"""
      %p = pred[] parameter(1)
      %x = f32[8,8] parameter(0)
      %zero = s32[] constant(0)
      %five = s32[] constant(5)
      %state = {STATE} tuple(%zero, %x, %five)
      ROOT %c = {STATE} conditional(%p, %state, %state), {branches}"""
    analysis = count(entry, body, condition, branch)
    assert (analysis.flops, analysis.unknown_trip_counts) == (5 * 2 * 8**3, 0)


@pytest.mark.parametrize(
    ("first", "by", "bound", "turns"),
    [
        (0, 1, 1, 1),
        (0, 3, 12, 4),
        (-4, 2, 6, 5),
        (12, -3, 0, 4),
        (6, -1, 5, 1),
        (7, 3, 7, 0),
        # It steps over the number, or away from it.
        (0, 3, 13, None),
        (0, 3, 14, None),
        (12, -3, 1, None),
        (12, 3, 0, None),
        (6, 1, 5, None),
        (0, -3, 12, None),
        (0, 0, 5, None),
    ],
)
def test_a_loop_that_ends_at_one_number(first: int, by: int, bound: int, turns: int | None):
    parts = loop(
        first=f"constant({first})",
        by=str(by),
        bound=f"constant({bound})",
        compare="compare(%i, %bound), direction=NE",
    )
    analysis = count(*parts)
    assert analysis.unknown_trip_counts == (turns is None)
    # A loop of unknown length counts as one iteration.
    assert analysis.flops == (1 if turns is None else turns) * 2 * 8**3


@pytest.mark.parametrize("name", ["h100_nested_loops", "v5e_nested_loops"])
def test_real_nested_loops(name: str):
    # Five turns of a scan over (5, 256, 256), each of three turns of one 256 x 256 dot.
    assert analyze(fixture(name)).flops == 5 * 3 * 2 * 256**3


def test_a_real_loop_that_counts_down():
    # while i >= 2: i -= 3, from 20: seven turns of a dot.
    assert analyze(fixture("v5e_loop_down")).flops == 7 * 2 * 256**3
