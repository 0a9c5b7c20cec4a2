"""Reading HLO text: shapes, attributes, lines that cannot be read, and how often loops turn."""

import pytest

from halfstep._preflight.hlo.analysis import analyze
from halfstep._preflight.hlo.parser import Array, Tuple, leaves, parse
from tests.preflight._programs import FIXTURES, count, fixture, program


def shape_of(text: str, *, tiled: bool = False):
    """The shape as a parameter's, in a program of a backend with or without tiled layouts."""
    other = "f32[8]{0:T(128)}" if tiled else "f32[8]{0}"
    module = parse(program(f"%o = {other} parameter(1)\nROOT %p = {text} parameter(0)"))
    return module.entry.result.shape


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


def test_attributes_may_hold_anything_in_quotes_and_brackets():
    module = parse(
        program(
            r'%p = f32[8] parameter(0), metadata={op_name="a, calls=%no, b} \" {"}'
            "\n"
            r'ROOT %c = (f32[8], s8[4]) custom-call(%p, /*index=1*/%p), custom_call_target="f,g", '
            r"output_to_operand_aliasing={{0}: (0, {})}, "
            r"replica_groups=mesh['x'=2,'y'=1] {'x'}, sharding={devices=[4,1]<=[4]}, "
            r'backend_config={k = "\22}\\", n = [1, 2]}'
        )
    )
    root = module.entry.result
    assert root.operands == ("p", "p")
    assert root.attributes == {
        "custom_call_target": '"f,g"',
        "output_to_operand_aliasing": "{{0}: (0, {})}",
        "replica_groups": "mesh['x'=2,'y'=1] {'x'}",
        "sharding": "{devices=[4,1]<=[4]}",
        "backend_config": r'{k = "\22}\\", n = [1, 2]}',
    }
    assert module.entry.instructions["p"].names("calls") == ()


def test_names_without_percent_signs_and_operands_with_shapes():
    text = """HloModule m

inner {
  a = f32[4]{0:T(128)} parameter(0)
  ROOT n = f32[4]{0:T(128)} negate(a)
}

ENTRY main {
  p = f32[4]{0:T(128)} parameter(0)
  ROOT f = f32[4]{0:T(128)} fusion(f32[4]{0:T(128)} p), kind=kLoop, calls=inner
}
"""
    module = parse(text)
    assert module.entry.result.operands == ("p",)
    assert [k.read + k.written for k in analyze(text).kernels] == [32]


def test_a_literal_may_go_over_lines():
    module = parse(
        "HloModule m\n\nENTRY %main () -> f32[2,2] {\n"
        "  %c = f32[2,2]{1,0} constant({\n    { 1, 2 },\n    { 3, 4 }\n  })\n"
        '  ROOT %n = f32[2,2]{1,0} negate(%c)\n}, execution_thread="main"\n'
    )
    assert list(module.entry.instructions) == ["c", "n"]


def test_the_root_need_not_be_last():
    module = parse(program("ROOT %r = f32[] parameter(0)\n%x = f32[] negate(%r)"))
    assert module.entry.result.name == "r"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the HLO text of a compiled program"),
        ("module @jit_f {}\n", "expected the HLO text of a compiled program"),
        (program("ROOT %r = f32[] constant(0)") * 2, "of one module; got several ENTRY"),
        ("HloModule m\n\n  %a = f32[] parameter(0)\n", "line 3 of the HLO text is outside"),
        (program("ROOT %r = f32[] parameter(0"), "line 6 of the HLO text is not an instruction"),
        (program("%r = nonsense"), "line 6 of the HLO text is not an instruction"),
        (program("ROOT %r = f32[] constant(0)\nmore"), "line 7 of the HLO text is not an instr"),
        (
            program("ROOT %f = f32[] fusion(), calls=%gone"),
            r"line 6 .*expected `calls=` with a comp",
        ),
        (program("ROOT %f = f32[] while(), body=%gone"), "line 6 .*expected `condition=`"),
        (program("ROOT %f = f32[4] negate(%gone)"), "`main` .* uses `gone` and does not"),
        (
            program("%p = f32[?] parameter(0)\nROOT %f = f32[4] negate(%p)"),
            r"line 6 .*not `f32\[\?\]`",
        ),
        (program("%p = f6[4] parameter(0)\nROOT %f = f32[4] negate(%p)"), "line 7 .*not `f6`"),
    ],
    ids=range(12),
)
def test_what_cannot_be_read_raises(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        analyze(text)


def test_what_no_count_depends_on_may_be_unknown():
    inner = """
%f (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  %b = f6e3m2[4] convert(%a), rounding=<new syntax>
  ROOT %c = f32[4] convert(%b)
}"""
    analysis = count("%p = f32[4] parameter(0)\nROOT %f = f32[4] fusion(%p), calls=%f", inner)
    assert [(k.read, k.written) for k in analysis.kernels] == [(16, 16)]


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.hlo")), ids=lambda path: path.stem)
def test_every_instruction_of_a_real_program_is_read(path):
    text = path.read_text()
    module = parse(text)
    instructions = [i for computation in module.computations.values() for i in computation]
    assert len(instructions) == sum(
        " = " in line and line[:2] == "  " for line in text.splitlines()
    )
    for computation in module.computations.values():
        assert computation.result
        for instruction in computation:
            assert instruction.results is not None
            assert len(computation.shapes(instruction)) == len(instruction.operands)
    assert analyze(text).unknown_trip_counts == 0


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

%plus (a: s32[], b: s32[]) -> s32[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = s32[] add(%a, %b)
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
    entry = f"""
      %p = pred[] parameter(1)
      %x = f32[8,8] parameter(0)
      %zero = s32[] constant(0)
      %five = s32[] constant(5)
      %state = {STATE} tuple(%zero, %x, %five)
      ROOT %c = {STATE} conditional(%p, %state, %state), branch_computations={{%branch, %branch}}"""
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
