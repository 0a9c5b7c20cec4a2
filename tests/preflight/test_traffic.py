"""Memory traffic: what each kernel reads and writes, and the least that must cross the memory."""

import jax.numpy as jnp
import pytest
from jax import lax

from halfstep._preflight.hlo.analysis import Collective, Kernel, analyze
from halfstep._preflight.hlo.traffic import memory_floor_bytes
from tests.preflight._programs import ADD, compiled, count, fixture

ENTRY = """
%x = f32[16,8] parameter(0)
%y = f32[16,8] parameter(1)
%r = f32[2,8] parameter(2)
%i = s32[] parameter(3)
%n = s32[2,1] parameter(4)
%c = f32[] constant(2)
%h = bf16[16,8] parameter(5)
%t = token[] after-all()
"""
X, R = 16 * 8 * 4, 2 * 8 * 4
GATHER = """gather(%x, %n), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, \
index_vector_dim=1, slice_sizes={1,8}"""
SCATTER = """scatter(%x, %n, %r), update_window_dims={1}, inserted_window_dims={0}, \
scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add"""


@pytest.mark.parametrize(
    ("line", "read", "written"),
    [
        ("f32[16,8] add(%x, %y)", 2 * X, X),
        ("f32[16,8] multiply(%x, %x)", X, X),
        ("f32[16,8] copy(%x)", X, X),
        ("f32[16,8] broadcast(%c), dimensions={}", 4, X),
        ("s32[16,8] iota(), iota_dimension=0", 0, X),
        ("bf16[16,8] convert(%x)", X, X // 2),
        ("f32[8] reduce(%x, %c), dimensions={0}, to_apply=%add", X + 4, 32),
        ("(f32[16,8], f32[16,8]) sort(%x, %y), dimensions={0}, to_apply=%add", 2 * X, 2 * X),
        ("f32[2,8] slice(%x), slice={[0:2], [0:8]}", R, R),
        ("f32[2,8] dynamic-slice(%x, %i, %i), dynamic_slice_sizes={2,8}", R + 4, R),
        ("f32[16,8] dynamic-update-slice(%x, %r, %i, %i)", R + 4, R),
        (f"f32[2,8] {GATHER}", R + 8, R),
        # Rows are read, added to and written.
        (f"f32[16,8] {SCATTER}", R + 8 + R, R),
        ("((f32[16,8]), f32[2,8], u32[]) slice-start(%x), slice={[0:2], [0:8]}", R, R),
        ('f32[16,8] custom-call(%x), custom_call_target="tpu_custom_call"', X, X),
        ("f32[32,8] all-gather(%x), dimensions={0}", X, 2 * X),
        ("(f32[16,8], f32[32,8]) all-gather-start(%x), dimensions={0}", X, 2 * X),
        ("(f32[16,8], f32[16,8], u32[]) copy-start(%x)", X, X),
        ("(f32[16,8], u32[], token[]) send(%x, %t)", X, 0),
        ("(f32[16,8], u32[], token[]) recv(%t)", 0, X),
    ],
    ids=range(20),
)
def test_kernels_by_hand(line: str, read: int, written: int):
    analysis = count(f"{ENTRY}ROOT %k = {line}", ADD)
    assert analysis.kernels == (Kernel(read, written, 1),)
    assert analysis.traffic_bytes == read + written


@pytest.mark.parametrize(
    "line",
    [
        "f32[128] bitcast(%x)",
        "(f32[16,8], f32[16,8]) tuple(%x, %y)",
        "f32[16,8] copy-done(%x)",
        "f32[16,8] opt-barrier(%x)",
        "u32[] partition-id()",
        "token[] after-all()",
        'f32[16,8] custom-call(%x), custom_call_target="Sharding"',
        'f32[16,8] custom-call(), custom_call_target="AllocateBuffer"',
        'f32[32,8] custom-call(%x, %y), custom_call_target="ConcatBitcast"',
    ],
)
def test_what_is_no_kernel(line: str):
    assert count(f"{ENTRY}ROOT %k = {line}").kernels == ()


def test_the_workspace_of_a_library_call_is_not_written():
    dims = '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}'
    analysis = count(
        f"{ENTRY}ROOT %k = (f32[16,16]{{1,0}}, s8[4096]{{0}}) custom-call(%x, %y), "
        'custom_call_target="__cublas$gemm", '
        f'backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{dims}}}}}'
    )
    assert analysis.kernels == (Kernel(2 * X, 16 * 16 * 4, 1),)


def fusion(body: str, *, out: str = "f32[16,8]", operands: str = "%x, %i, %r, %y, %n") -> Kernel:
    """The kernel of a fusion of x, i, r, y and n."""
    inner = f"""
%f (x: f32[16,8], i: s32[], r: f32[2,8], y: f32[16,8], n: s32[2,1]) -> {out} {{
  %x = f32[16,8] parameter(0)
  %i = s32[] parameter(1)
  %r = f32[2,8] parameter(2)
  %y = f32[16,8] parameter(3)
  %n = s32[2,1] parameter(4)
  %zero = s32[] constant(0)
  {body}
}}"""
    analysis = count(
        f"{ENTRY}ROOT %k = {out} fusion({operands}), kind=kLoop, calls=%f", ADD, NESTED, inner
    )
    (kernel,) = analysis.kernels
    return kernel


NESTED = """
%nested (a: f32[16,8], j: s32[]) -> f32[2,8] {
  %a = f32[16,8] parameter(0)
  %j = s32[] parameter(1)
  %b = f32[16,8] negate(%a)
  ROOT %c = f32[2,8] dynamic-slice(%b, %j, %j), dynamic_slice_sizes={2,8}
}

%renamed (a: f32[16,8]) -> f32[8,16] {
  %a = f32[16,8] parameter(0)
  ROOT %b = f32[8,16] bitcast(%a)
}
"""
SLICE = "dynamic-slice(%x, %i, %zero), dynamic_slice_sizes={2,8}"
UPDATE = "dynamic-update-slice(%x, %r, %i, %zero)"


@pytest.mark.parametrize(
    ("body", "out", "read", "written"),
    [
        # Parameters that nothing uses are not read.
        ("ROOT %o = f32[16,8] add(%x, %y)", "f32[16,8]", 2 * X, X),
        # Slices, also behind element-wise operations and inside another fusion.
        (f"ROOT %o = f32[2,8] {SLICE}", "f32[2,8]", R + 4, R),
        (
            "%m = bf16[16,8] convert(%x)\n  %t = bf16[8,16] transpose(%m), dimensions={1,0}\n"
            "  ROOT %o = bf16[8,2] dynamic-slice(%t, %zero, %i), dynamic_slice_sizes={8,2}",
            "bf16[8,2]",
            R + 4,
            R // 2,
        ),
        ("ROOT %o = f32[2,8] fusion(%x, %i), kind=kLoop, calls=%nested", "f32[2,8]", R + 4, R),
        (
            "%w = f32[8,16] fusion(%x), kind=kLoop, calls=%renamed\n"
            "  ROOT %o = f32[1,16] slice(%w), slice={[0:1], [0:16]}",
            "f32[1,16]",
            64,
            64,
        ),
        # Of two slices both count, but not more than everything.
        (
            "%a = f32[2,8] slice(%x), slice={[0:2], [0:8]}\n"
            "  %b = f32[2,8] slice(%x), slice={[2:4], [0:8]}\n"
            "  ROOT %o = f32[2,8] add(%a, %b)",
            "f32[2,8]",
            2 * R,
            R,
        ),
        (
            f"%a = f32[2,8] {SLICE}\n  %b = f32[16,8] negate(%x)\n"
            "  ROOT %o = (f32[2,8], f32[16,8]) tuple(%a, %b)",
            "(f32[2,8], f32[16,8])",
            X + 4,
            R + X,
        ),
        # What is reduced, contracted or broadcast is needed as a whole.
        (
            "%d = f32[16,16] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={1}\n"
            "  ROOT %o = f32[1,16] slice(%d), slice={[0:1], [0:16]}",
            "f32[1,16]",
            2 * X,
            64,
        ),
        (
            f"ROOT %o = f32[2,8] {GATHER}",
            "f32[2,8]",
            R + 8,
            R,
        ),
        # Updates in place, alone, renamed, as one of two results, and one upon another.
        (f"ROOT %o = f32[16,8] {UPDATE}", "f32[16,8]", R + 4, R),
        (f"%u = f32[16,8] {UPDATE}\n  ROOT %o = f32[128] bitcast(%u)", "f32[128]", R + 4, R),
        (
            f"%u = f32[16,8] {UPDATE}\n  %m = f32[16,8] negate(%y)\n"
            "  ROOT %o = (f32[16,8], f32[16,8]) tuple(%u, %m)",
            "(f32[16,8], f32[16,8])",
            R + 4 + X,
            R + X,
        ),
        (
            f"%u = f32[16,8] {UPDATE}\n"
            "  ROOT %o = f32[16,8] dynamic-update-slice(%u, %r, %zero, %zero)",
            "f32[16,8]",
            R + 4,
            2 * R,
        ),
        (
            f"ROOT %o = f32[16,8] {SCATTER}",
            "f32[16,8]",
            R + 8 + R,
            R,
        ),
        # An update of the slice itself: read, changed, written.
        (
            f"%s = f32[2,8] {SLICE}\n  %p = f32[2,8] add(%s, %r)\n"
            "  ROOT %o = f32[16,8] dynamic-update-slice(%x, %p, %i, %zero)",
            "f32[16,8]",
            R + R + 4,
            R,
        ),
        # An update of a value that is made here, or of which more is made, is not in place.
        (
            "%m = f32[16,8] negate(%x)\n"
            "  ROOT %o = f32[16,8] dynamic-update-slice(%m, %r, %i, %zero)",
            "f32[16,8]",
            X + R + 4,
            X,
        ),
        (
            f"%u = f32[16,8] {UPDATE}\n  ROOT %o = bf16[16,8] convert(%u)",
            "bf16[16,8]",
            X + R + 4,
            X // 2,
        ),
    ],
    ids=range(17),
)
def test_fusions_by_hand(body: str, out: str, read: int, written: int):
    assert fusion(body, out=out) == Kernel(read, written, 1)


def test_a_buffer_is_read_once_whatever_its_names():
    inner = """
%f (a: f32[16,8], b: f32[128], c: f32[16,8], d: f32[16,8]) -> f32[16,8] {
  %a = f32[16,8] parameter(0)
  %b = f32[128] parameter(1)
  %c = f32[16,8] parameter(2)
  %d = f32[16,8] parameter(3)
  %e = f32[16,8] bitcast(%b)
  %f = f32[16,8] add(%a, %e)
  %g = f32[16,8] add(%c, %d)
  ROOT %o = f32[16,8] add(%f, %g)
}"""
    analysis = count(
        f"""{ENTRY}
        %p = (f32[16,8], f32[16,8]) parameter(6)
        %u = f32[16,8] get-tuple-element(%p), index=1
        %v = f32[16,8] get-tuple-element(%p), index=1
        %b = f32[128] bitcast(%x)
        ROOT %k = f32[16,8] fusion(%x, %b, %u, %v), kind=kLoop, calls=%f""",
        inner,
    )
    assert analysis.kernels == (Kernel(2 * X, X, 1),)


def test_an_update_may_change_the_dtype():
    # XLA:TPU updates bfloat16 with float32 values; what is written is bfloat16.
    inner = """
%f (h: bf16[16,8], r: f32[2,8], i: s32[]) -> bf16[16,8] {
  %h = bf16[16,8] parameter(0)
  %r = f32[2,8] parameter(1)
  %i = s32[] parameter(2)
  ROOT %o = bf16[16,8] dynamic-update-slice(%h, %r, %i, %i)
}"""
    analysis = count(f"{ENTRY}ROOT %k = bf16[16,8] fusion(%h, %r, %i), kind=kLoop, calls=%f", inner)
    assert analysis.kernels == (Kernel(R + 4, R // 2, 1),)


def test_what_is_on_chip_or_on_the_host_does_not_count():
    analysis = count(
        """
        %x = f32[8,128]{1,0:T(8,128)} parameter(0)
        %in = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]) copy-start(%x)
        %a = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%in)
        %b = f32[8,128]{1,0:T(8,128)S(1)} negate(%a)
        %out = (f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}, u32[]) copy-start(%b)
        %c = f32[8,128]{1,0:T(8,128)} copy-done(%out)
        %away = (f32[8,128]{1,0:T(8,128)S(5)}, f32[8,128]{1,0:T(8,128)}, u32[]) copy-start(%c)
        ROOT %d = f32[8,128]{1,0:T(8,128)S(5)} copy-done(%away)"""
    )
    size = 8 * 128 * 4
    assert set(analysis.kernels) == {Kernel(size, 0, 2), Kernel(0, size, 1), Kernel(0, 0, 1)}
    assert analysis.traffic_bytes == 3 * size


SPREAD = """
%start (x: f32[8]) -> (f32[8], f32[32], u32[]) {
  %x = f32[8]{0:T(128)} parameter(0)
  %g = f32[32]{0:T(128)} all-gather(%x), channel_id=4, dimensions={0}
  ROOT %c = (f32[8]{0:T(128)}, f32[32]{0:T(128)}, u32[]{:S(2)}) custom-call(%g), \
custom_call_target="AsyncCollectiveStart"
}

%beside () -> (f32[16], f32[8], f32[32], f32[32], u32[]) {
  %x = f32[8]{0:T(128)} parameter(0)
  %b = f32[32]{0:T(128)} parameter(1)
  %f = u32[]{:S(2)} parameter(2)
  %y = f32[16]{0:T(128)} parameter(3)
  %n = f32[16]{0:T(128)} negate(%y)
  %g = f32[32]{0:T(128)} all-gather(%x), channel_id=4, dimensions={0}
  ROOT %t = (f32[16]{0:T(128)}, f32[8]{0:T(128)}, f32[32]{0:T(128)}, f32[32]{0:T(128)}, \
u32[]{:S(2)}) tuple(%n, %x, %b, %g, %f)
}

%end (x: f32[8], b: f32[32], f: u32[]) -> f32[32] {
  %x = f32[8]{0:T(128)} parameter(0)
  %b = f32[32]{0:T(128)} parameter(1)
  %f = u32[]{:S(2)} parameter(2)
  %g = f32[32]{0:T(128)} all-gather(%x), channel_id=4, dimensions={0}
  ROOT %c = f32[32]{0:T(128)} custom-call(%x, %b, %g, %f), custom_call_target="AsyncCollectiveDone"
}"""


def test_a_collective_that_is_spread_over_fusions():
    analysis = count(
        """
        %x = f32[8]{0:T(128)} parameter(0)
        %y = f32[16]{0:T(128)} parameter(1)
        %s = (f32[8]{0:T(128)}, f32[32]{0:T(128)}, u32[]{:S(2)}) fusion(%x), kind=kCustom, \
calls=%start
        %a = f32[8]{0:T(128)} get-tuple-element(%s), index=0
        %b = f32[32]{0:T(128)} get-tuple-element(%s), index=1
        %f = u32[]{:S(2)} get-tuple-element(%s), index=2
        %m = (f32[16]{0:T(128)}, f32[8]{0:T(128)}, f32[32]{0:T(128)}, f32[32]{0:T(128)}, \
u32[]{:S(2)}) fusion(%a, %b, %f, %y), kind=kCustom, calls=%beside
        %c = f32[8]{0:T(128)} get-tuple-element(%m), index=1
        %d = f32[32]{0:T(128)} get-tuple-element(%m), index=2
        %e = u32[]{:S(2)} get-tuple-element(%m), index=4
        ROOT %r = f32[32]{0:T(128)} fusion(%c, %d, %e), kind=kCustom, calls=%end""",
        SPREAD,
    )
    assert set(analysis.kernels) == {Kernel(32, 128, 1), Kernel(64, 64, 1), Kernel(0, 0, 1)}
    assert analysis.collectives == (Collective("all-gather", "float32", 128, 1),)


def test_loops_multiply_and_a_scan_reads_its_slices():
    state = "(s32[], f32[8], f32[10,8])"
    body = f"""
%step (x: f32[8], w: f32[10,8], i: s32[]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %w = f32[10,8] parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  %a = f32[1,8] dynamic-slice(%w, %i, %z), dynamic_slice_sizes={{1,8}}
  %b = f32[8] bitcast(%a)
  ROOT %c = f32[8] add(%x, %b)
}}

%body (s: {state}) -> {state} {{
  %s = {state} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8] get-tuple-element(%s), index=1
  %w = f32[10,8] get-tuple-element(%s), index=2
  %y = f32[8] fusion(%x, %w, %i), kind=kLoop, calls=%step
  ROOT %t = {state} tuple(%i, %y, %w)
}}

%condition (s: {state}) -> pred[] {{
  %s = {state} parameter(0)
  ROOT %p = pred[] constant(true)
}}"""
    analysis = count(
        f"%s = {state} parameter(0)\nROOT %w = {state} while(%s), condition=%condition, "
        'body=%body, backend_config={"known_trip_count":{"n":"10"}}',
        body,
    )
    assert analysis.kernels == (Kernel(32 + 32 + 4, 32, 10),)
    assert analysis.traffic_bytes == 10 * 100


def test_a_conditional_without_contractions_counts_the_branch_with_most_traffic():
    branches = """
%small (x: f32[16,8]) -> f32[16,8] {
  %x = f32[16,8] parameter(0)
  ROOT %y = f32[16,8] bitcast(%x)
}

%large (x: f32[16,8]) -> f32[16,8] {
  %x = f32[16,8] parameter(0)
  ROOT %y = f32[16,8] negate(%x)
}"""
    line = "conditional(%i, %x, %x), branch_computations={%large, %small}"
    assert count(f"{ENTRY}ROOT %k = f32[16,8] {line}", branches).traffic_bytes == 2 * X


def test_the_floor_leaves_out_what_a_cache_can_hold():
    kernels = (Kernel(100, 40, 3), Kernel(10, 70, 1), Kernel(5, 5, 1000))
    assert memory_floor_bytes(kernels, 0) == 3 * 140 + 80 + 10_000
    assert memory_floor_bytes(kernels, 50) == 3 * 50 + 20
    assert memory_floor_bytes(kernels, 1000) == 0
    assert memory_floor_bytes((), 50) == 0


def test_a_real_embedding_and_its_gradient():
    # 512 rows of a float32 (32768, 256): zeros are filled in, the rows read, doubled and added to
    # zeros; the rows read again, squared and summed in two steps.
    table, rows, ids = 32768 * 256 * 4, 512 * 256 * 4, 512 * 4
    assert set(analyze(fixture("h100_embedding")).kernels) == {
        Kernel(0, table, 1),
        Kernel(rows + ids + rows, rows, 1),
        Kernel(rows + ids, 256 * 4, 1),
        Kernel(256 * 4, 4, 1),
    }


def test_a_real_offload():
    # sin, to the host and back, and a product with itself, of (1024, 1024) float32.
    size = 1024 * 1024 * 4
    assert set(analyze(fixture("v5e_offload")).kernels) == {
        Kernel(size, size, 1),
        Kernel(size, 0, 1),
        Kernel(0, size, 1),
        Kernel(2 * size, size, 1),
    }


def test_a_real_collective_that_is_spread_over_fusions():
    # Per device: x and two weights come in, 16 MiB each, x twice (the second time for the program's
    # next run), and the result goes out. Everything between stays on chip.
    analysis = analyze(fixture("v5e_async_collective"))
    assert analysis.traffic_bytes == 5 * 1024 * 4096 * 4


def test_compiled_scan_moves_each_slice_once():
    def run(ws):
        return lax.scan(lambda x, w: (jnp.sin(x) + w, None), jnp.zeros((128, 128)), ws)[0]

    analysis = compiled(run, jnp.ones((64, 128, 128)))
    size = 128 * 128 * 4
    # A turn reads the carry and its slice and writes the carry; copying the carry, too, or slicing
    # in a kernel of its own, makes it more. Reading all of `ws` each time would be over sixty.
    assert 3 * 64 * size <= analysis.traffic_bytes <= 7 * 64 * size
