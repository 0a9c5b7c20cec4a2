"""Collectives: what counts as one, how much it moves, and that each counts once."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from halfstep._preflight.hlo.analysis import Collective, analyze
from halfstep._preflight.hlo.program import read_module
from tests.preflight._programs import ADD, compiled, count, fixture

GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            f"f32[32]{{0}} all-gather(%x), {GROUPS}, dimensions={{0}}",
            [Collective("all-gather", "float32", 128, 1)],
        ),
        (
            f"f32[8]{{0}} all-reduce(%x), {GROUPS}, to_apply=%add",
            [Collective("all-reduce", "float32", 32, 1)],
        ),
        (
            f"f32[2]{{0}} reduce-scatter(%x), {GROUPS}, dimensions={{0}}, to_apply=%add",
            [Collective("reduce-scatter", "float32", 32, 1)],
        ),
        (
            f"f32[8]{{0}} all-to-all(%x), {GROUPS}, dimensions={{0}}",
            [Collective("all-to-all", "float32", 32, 1)],
        ),
        # Each of four pieces to another device.
        (
            f"(f32[8], f32[8], f32[8], f32[8]) all-to-all(%x, %x, %x, %x), {GROUPS}",
            [Collective("all-to-all", "float32", 128, 1)],
        ),
        (
            "f32[8]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}",
            [Collective("collective-permute", "float32", 32, 1)],
        ),
        # In place: of the array only a slice of three goes.
        (
            "f32[8]{0} collective-permute(%x, %x, %i, %i), channel_id=1, "
            "source_target_pairs={{0,1}}, slice_sizes={{3}}",
            [Collective("collective-permute", "float32", 12, 1)],
        ),
        (
            f"f32[8]{{0}} collective-broadcast(%x), {GROUPS}",
            [Collective("collective-broadcast", "float32", 32, 1)],
        ),
        # The offsets and sizes behind the two arrays are no payload.
        (
            f"f32[16] ragged-all-to-all(%x, %out, %i, %i, %i, %i), {GROUPS}",
            [Collective("ragged-all-to-all", "float32", 64, 1)],
        ),
        (
            "(f32[8], u32[], token[]) send(%x, %t), channel_id=1",
            [Collective("send", "float32", 32, 1)],
        ),
        (
            "(f32[8], u32[], token[]) recv(%t), channel_id=1",
            [Collective("recv", "float32", 32, 1)],
        ),
        ("(f32[8], u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true", []),
        ("(f32[8], u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true", []),
        # Several arrays at once count per dtype.
        (
            "(f32[8]{0:T(128)}, bf16[4,2]{1,0:T(8,128)(2,1)S(1)}, f32[2]{0:T(128)}) "
            f"all-reduce(%x, %b, /*index=2*/%s), {GROUPS}, to_apply=%add",
            [
                Collective("all-reduce", "float32", 40, 1),
                Collective("all-reduce", "bfloat16", 16, 1),
            ],
        ),
        (
            f"(f32[32], bf16[16,2]) all-gather(%x, %b), {GROUPS}, dimensions={{0}}",
            [
                Collective("all-gather", "float32", 128, 1),
                Collective("all-gather", "bfloat16", 64, 1),
            ],
        ),
        ("f32[8] negate(%x)", []),
    ],
    ids=range(16),
)
def test_counts_by_hand(line: str, expected: list[Collective]):
    analysis = count(
        f"""
        %x = f32[8]{{0}} parameter(0)
        %b = bf16[4,2]{{1,0}} parameter(1)
        %s = f32[2]{{0}} parameter(2)
        %i = s32[4]{{0}} parameter(3)
        %out = f32[16] parameter(4)
        %t = token[] after-all()
        ROOT %c = {line}""",
        ADD,
    )
    assert list(analysis.collectives) == expected


@pytest.mark.parametrize(
    ("start", "done", "expected"),
    [
        (
            f"(f32[8], f32[32]) all-gather-start(%x), {GROUPS}, dimensions={{0}}",
            "f32[32] all-gather-done(%c)",
            Collective("all-gather", "float32", 128, 1),
        ),
        (
            f"((f32[8], f32[2]), (f32[32], f32[8])) all-gather-start(%x, %s), {GROUPS}, "
            "dimensions={0}",
            "(f32[32], f32[8]) all-gather-done(%c)",
            Collective("all-gather", "float32", 160, 1),
        ),
        (
            f"f32[8] all-reduce-start(%x), {GROUPS}, to_apply=%add",
            "f32[8] all-reduce-done(%c)",
            Collective("all-reduce", "float32", 32, 1),
        ),
        (
            f"(f32[8], f32[2]) all-reduce-start(%x, %s), {GROUPS}, to_apply=%add",
            "(f32[8], f32[2]) all-reduce-done(%c)",
            Collective("all-reduce", "float32", 40, 1),
        ),
        (
            f"((f32[8]), f32[8]) all-reduce-start(%x), {GROUPS}, to_apply=%add",
            "f32[8] all-reduce-done(%c)",
            Collective("all-reduce", "float32", 32, 1),
        ),
        (
            f"((f32[8], f32[2]), (f32[8], f32[2])) all-reduce-start(%x, %s), {GROUPS}, "
            "to_apply=%add",
            "(f32[8], f32[2]) all-reduce-done(%c)",
            Collective("all-reduce", "float32", 40, 1),
        ),
        (
            f"((f32[8]), f32[2]) reduce-scatter-start(%x), {GROUPS}, dimensions={{0}}, "
            "to_apply=%add",
            "f32[2] reduce-scatter-done(%c)",
            Collective("reduce-scatter", "float32", 32, 1),
        ),
        (
            "(f32[8], f32[8], u32[], u32[]) collective-permute-start(%x), channel_id=1, "
            "source_target_pairs={{0,1}}",
            "f32[8] collective-permute-done(%c)",
            Collective("collective-permute", "float32", 32, 1),
        ),
        (
            "((f32[8]), f32[2], u32[]) async-start(%x), calls=%wrapped",
            "f32[2] async-done(%c), calls=%wrapped",
            Collective("reduce-scatter", "float32", 32, 1),
        ),
    ],
    ids=range(9),
)
def test_a_start_and_its_done_count_once(start: str, done: str, expected: Collective):
    wrapped = f"""
%wrapped (x: f32[8]) -> f32[2] {{
  %x = f32[8] parameter(0)
  ROOT %r = f32[2] reduce-scatter(%x), {GROUPS}, dimensions={{0}}, to_apply=%add
}}"""
    analysis = count(
        f"%x = f32[8] parameter(0)\n%s = f32[2] parameter(1)\n%c = {start}\nROOT %d = {done}",
        ADD,
        wrapped,
    )
    assert analysis.collectives == (expected,)


def test_loops_multiply():
    state = "(s32[], f32[8])"
    body = f"""
%body (s: {state}) -> {state} {{
  %s = {state} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8] get-tuple-element(%s), index=1
  %y = f32[8] all-reduce(%x), {GROUPS}, to_apply=%add
  ROOT %t = {state} tuple(%i, %y)
}}

%condition (s: {state}) -> pred[] {{
  %s = {state} parameter(0)
  ROOT %p = pred[] constant(true)
}}"""
    analysis = count(
        f"""
        %s = {state} parameter(0)
        ROOT %w = {state} while(%s), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"6"}}}}""",
        ADD,
        body,
    )
    assert analysis.collectives == (Collective("all-reduce", "float32", 6 * 32, 6),)


def test_a_fused_all_reduce_that_keeps_a_slice_is_a_reduce_scatter():
    fused = f"""
%scatter (x: f32[8]) -> f32[2] {{
  %x = f32[8] parameter(0)
  %r = f32[8] all-reduce(%x), {GROUPS}, to_apply=%add
  %p = u32[] partition-id()
  ROOT %d = f32[2] dynamic-slice(%r, %p), dynamic_slice_sizes={{2}}
}}"""
    entry = "%x = f32[8] parameter(0)\n"
    analysis = count(
        entry + "ROOT %f = f32[2] fusion(%x), kind=kCustom, calls=%scatter", ADD, fused
    )
    assert analysis.collectives == (Collective("reduce-scatter", "float32", 32, 1),)
    # The same two instructions one after the other are an all-reduce and a slice.
    called = count(entry + "ROOT %f = f32[2] call(%x), to_apply=%scatter", ADD, fused)
    assert called.collectives == (Collective("all-reduce", "float32", 32, 1),)


@pytest.mark.parametrize("name", ["h100_collectives", "v5e_collectives"])
def test_real_collectives(name: str):
    # Of a (1024, 512) float32 array over four devices: psum, all_gather, psum_scatter of what was
    # gathered, all_to_all and ppermute.
    part = 256 * 512 * 4
    assert set(analyze(fixture(name)).collectives) == {
        Collective("all-reduce", "float32", part, 1),
        Collective("all-gather", "float32", 4 * part, 1),
        Collective("reduce-scatter", "float32", 4 * part, 1),
        Collective("all-to-all", "float32", part, 1),
        Collective("collective-permute", "float32", part, 1),
    }


def test_a_real_all_reduce_of_two_dtypes():
    # psum of a float32 (512,), a bfloat16 (256,) and a float32 (128, 256).
    assert analyze(fixture("h100_all_reduce")).collectives == (
        Collective("all-reduce", "float32", (512 + 128 * 256) * 4, 1),
        Collective("all-reduce", "bfloat16", 256 * 2, 1),
    )


def test_a_real_collective_that_is_spread_over_fusions_counts_once():
    # Two gathers of (4096, 4096) weights; one starts in a fusion, runs beside a dot and ends in a
    # third, and stands in all three of them.
    program = fixture("v5e_async_collective")
    gathers = [i for i in read_module(program).instructions.values() if i.opcode == "all-gather"]
    assert len(gathers) == 4
    assert analyze(program).collectives == (
        Collective("all-gather", "bfloat16", 2 * 4096**2 * 2, 2),
    )


def test_real_fsdp_steps():
    # Sixteen layers of (4096, 4096): gathered forward and again backward, gradients scattered.
    layer = 4096 * 4096 * 4
    assert analyze(fixture("h100_fsdp")).collectives == (
        Collective("all-gather", "float32", 2 * 16 * layer, 32),
        Collective("reduce-scatter", "float32", 16 * layer, 16),
        Collective("all-reduce", "float32", 4, 1),
    )
    # XLA:TPU gathers bfloat16, and pads what it scatters to 4480 rows; a permutation brings the
    # rest to where it belongs.
    assert analyze(fixture("v5e_fsdp")).collectives == (
        Collective("reduce-scatter", "float32", 16 * 4480 * 4096 * 4, 16),
        Collective("all-gather", "bfloat16", 2 * 16 * layer // 2, 32),
        Collective("collective-permute", "float32", 16 * 288 * 4096 * 4, 16),
        Collective("all-reduce", "float32", 4, 1),
    )


def test_compiled_collectives(mesh: jax.sharding.Mesh):
    def body(x, y):
        ring = [(i, (i + 1) % 4) for i in range(4)]
        gathered = lax.all_gather(x, "data", tiled=True)
        scattered = lax.psum_scatter(jnp.sin(gathered), "data", tiled=True)
        moved = lax.fori_loop(0, 3, lambda _, y: jnp.sin(lax.ppermute(y, "data", ring)), y)
        return scattered, moved, lax.psum(jnp.cos(x), "data")

    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P("data"), P("data")),
        out_specs=(P("data"), P("data"), P()),
        check_vma=False,
    )
    x, y = jnp.ones((64, 16)), jnp.ones((8, 32), jnp.float16)
    assert set(compiled(run, x, y).collectives) == {
        Collective("all-gather", "float32", 64 * 16 * 4, 1),
        Collective("reduce-scatter", "float32", 64 * 16 * 4, 1),
        Collective("all-reduce", "float32", 16 * 16 * 4, 1),
        Collective("collective-permute", "float16", 3 * 2 * 32 * 2, 3),
    }
