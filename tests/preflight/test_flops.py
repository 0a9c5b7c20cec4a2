"""FLOPs of contractions: against counts by hand, real programs, and convolutions of ones."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import halfstep.kernels._block_product as block_product
from halfstep._preflight.hlo.analysis import Contraction, analyze
from halfstep._preflight.hlo.contraction_flops import _valid_positions
from tests.preflight._programs import compiled, count, fixture, program as written, proto
from tests.preflight._protos import changed, message, put, without

F32 = ("float32", "float32", "float32")


def only(analysis) -> Contraction:
    (contraction,) = analysis.contractions
    return contraction


def shapes(**arrays: str) -> str:
    return "\n".join(
        f"%{name} = {shape} parameter({number})"
        for number, (name, shape) in enumerate(arrays.items())
    )


@pytest.mark.parametrize(
    ("a", "b", "line", "flops"),
    [
        (
            "f32[4,6]{1,0}",
            "f32[6,5]{1,0}",
            "f32[4,5]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            2 * 4 * 5 * 6,
        ),
        (
            "f32[3,4,6]",
            "f32[3,5,6]",
            "f32[3,4,5] dot(%a, %b), lhs_batch_dims={0}, rhs_batch_dims={0}, "
            "lhs_contracting_dims={2}, rhs_contracting_dims={2}",
            2 * 3 * 4 * 5 * 6,
        ),
        (
            "f32[2,4,6]",
            "f32[6,4]",
            "f32[2] dot(%a, %b), lhs_contracting_dims={1,2}, rhs_contracting_dims={1,0}",
            2 * 2 * 24,
        ),
        ("f32[4]", "f32[5]", "f32[4,5] dot(%a, %b)", 2 * 20),
        # XLA:TPU's dots: plain, with a batch dimension as a dilated window, with a padded window.
        ("f32[4,6]", "f32[6,5]", "f32[4,5] convolution(%a, %b), dim_labels=bf_io->bf", 240),
        (
            "f32[8,4,6]",
            "f32[8,5,6]",
            "f32[8,4,5] convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, "
            "dim_labels=0bf_0oi->0bf",
            8 * 240,
        ),
        (
            "f32[4,1,6]",
            "f32[9,6,5]",
            "f32[4,9,5] convolution(%a, %b), window={size=9 pad=8_8 rhs_reversal=1}, "
            "dim_labels=b0f_0io->b0f",
            9 * 240,
        ),
        # Convolutions: padding at both ends, groups of features, groups of the batch.
        (
            "f32[2,6,3]",
            "f32[3,3,5]",
            "f32[2,6,5] convolution(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
            2 * 2 * 5 * 3 * (6 * 3 - 2),
        ),
        (
            "f32[2,6,4]",
            "f32[3,1,8]",
            "f32[2,4,8] convolution(%a, %b), window={size=3}, dim_labels=b0f_0io->b0f, "
            "feature_group_count=4",
            2 * 2 * 8 * 4 * 3,
        ),
        (
            "f32[8,6,3]",
            "f32[3,3,4]",
            "f32[2,4,4] convolution(%a, %b), window={size=3}, dim_labels=b0f_0io->b0f, "
            "batch_group_count=4",
            2 * 2 * 4 * 4 * 3 * 3,
        ),
        # The rows of a ragged dot meet one group each: none, the contracted or a batch dimension.
        (
            "f32[12,6]",
            "f32[3,6,5]",
            "f32[12,5] ragged-dot(%a, %b, %g), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
            "lhs_ragged_dims={0}, rhs_group_dims={0}",
            2 * 12 * 6 * 5,
        ),
        (
            "f32[12,6]",
            "f32[12,5]",
            "f32[3,6,5] ragged-dot(%a, %b, %g), lhs_contracting_dims={0}, "
            "rhs_contracting_dims={0}, lhs_ragged_dims={0}",
            2 * 12 * 6 * 5,
        ),
        (
            "f32[12,2,6]",
            "f32[12,6,5]",
            "f32[12,2,5] ragged-dot(%a, %b, %g), lhs_batch_dims={0}, rhs_batch_dims={0}, "
            "lhs_contracting_dims={2}, rhs_contracting_dims={1}, lhs_ragged_dims={0}",
            2 * 12 * 2 * 6 * 5,
        ),
    ],
    ids=range(13),
)
def test_counts_by_hand(a: str, b: str, line: str, flops: int):
    analysis = count(shapes(a=a, b=b, g="s32[3]") + f"\nROOT %c = {line}")
    assert only(analysis) == Contraction(*F32, flops, 1)
    assert analysis.flops == flops


def test_elementwise_multiplication_is_no_contraction():
    line = "\nROOT %c = f32[4] multiply(%a, %b)"
    analysis = count(shapes(a="f32[4]", b="f32[4]") + line)
    assert analysis.contractions == ()
    assert analysis.uncounted == ()


def test_dtypes_are_those_of_the_instruction():
    inner = """
%f (a: f32[4,4], b: bf16[4,4]) -> f32[4,4] {
  %a = f32[4,4] parameter(0)
  %b = bf16[4,4] parameter(1)
  %l = f8e4m3fn[4,4] convert(%a)
  %r = f8e5m2[4,4] convert(%b)
  %d = bf16[4,4] dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %o = f32[4,4] convert(%d)
}"""
    analysis = count(
        shapes(a="f32[4,4]", b="bf16[4,4]")
        + """
        %x = f32[4,4] fusion(%a, %b), kind=kCustom, calls=%f
        %y = f32[4,4] fusion(%x, %b), kind=kCustom, calls=%f
        %z = f32[4,4] dot(%y, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
        %i = s8[4,4] parameter(2)
        ROOT %w = s32[4,4] custom-call(%i, %i), custom_call_target="__cublas$gemm",\
 backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],\
"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}""",
        inner,
    )
    assert set(analysis.contractions) == {
        Contraction("float8_e4m3fn", "float8_e5m2", "bfloat16", 2 * 128, 2),
        Contraction("float32", "bfloat16", "float32", 128, 1),
        Contraction("int8", "int8", "int32", 128, 1),
    }


def gemm(target: str, dims: str) -> str:
    return (
        f'custom_call_target="{target}", metadata={{op_name="dot"}}, backend_config='
        f'{{"operation_queue_id":"0","gemm_backend_config":{{"alpha_real":1,'
        f'"dot_dimension_numbers":{dims},"epilogue":"BIAS"}}}}'
    )


def test_fp8_library_call():
    dims = (
        '{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"],'
        '"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}'
    )
    analysis = count(
        shapes(a="f8e4m3fn[3,4,6]", b="f8e5m2[3,5,6]", s="f32[]", t="f32[]")
        + "\n%c = (bf16[3,4,5]{2,1,0}, s8[33554432]{0}) custom-call(%a, %b, %s, %t), "
        + gemm("__cublas$lt$matmul$f8", dims)
        + "\nROOT %r = bf16[3,4,5]{2,1,0} get-tuple-element(%c), index=0"
    )
    assert only(analysis) == Contraction("float8_e4m3fn", "float8_e5m2", "bfloat16", 720, 1)
    assert analysis.uncounted == ()


@pytest.mark.parametrize(
    ("target", "first", "second", "result"),
    [
        ("convForward", "bf16[2,8,8,3]", "bf16[5,3,3,3]", "bf16[2,4,4,5]"),
        ("convBackwardInput", "bf16[2,4,4,5]", "bf16[5,3,3,3]", "bf16[2,8,8,3]"),
        ("convBackwardFilter", "bf16[2,8,8,3]", "bf16[2,4,4,5]", "bf16[5,3,3,3]"),
        ("convBiasActivationForward", "bf16[2,8,8,3]", "bf16[5,3,3,3]", "bf16[2,4,4,5]"),
    ],
)
def test_library_convolutions(target: str, first: str, second: str, result: str):
    analysis = count(
        shapes(a=first, b=second)
        + f"\nROOT %c = ({result}, u8[64]{{0}}) custom-call(%a, %b), "
        + "window={size=3x3 stride=2x2 pad=0_1x0_1}, dim_labels=b01f_o01i->b01f, "
        + f'custom_call_target="__cudnn${target}"'
    )
    # Eight elements and one of padding: the last of four windows misses one of three.
    positions = (4 * 3 - 1) ** 2
    assert only(analysis).flops == 2 * positions * 2 * 3 * 5


def test_library_block_scaled_dot():
    analysis = count(
        shapes(
            a="f8e4m3fn[1,4,64]", b="f8e4m3fn[1,5,64]", s="f8e8m0fnu[1,4,2]", t="f8e8m0fnu[1,5,2]"
        )
        + "\nROOT %c = (f32[1,4,5], u8[0]{0}) custom-call(%a, %b, %s, %t), "
        'custom_call_target="__cudnn$blockScaledDot"'
    )
    assert only(analysis) == Contraction("float8_e4m3fn", "float8_e4m3fn", "float32", 2560, 1)


@pytest.mark.parametrize("n", [1, 4, 5, 128])
@pytest.mark.parametrize("order", ["%a, %b, %s, %t", "%a, %s, %b, %t"])
def test_scales_are_no_factors_however_large(order: str, n: int):
    """Those of 128 rows in blocks of 32 are 256: as large as a second factor of 4 rows."""
    analysis = count(
        shapes(
            a="f8e4m3fn[128,64]",
            s="f8e8m0fnu[128,2]",
            b=f"f8e5m2[{n},64]",
            t=f"f8e8m0fnu[{n},2]",
        )
        + f"\nROOT %c = bf16[128,{n}] scaled-dot({order}), "
        "lhs_contracting_dims={1}, rhs_contracting_dims={1}",
    )
    flops = 2 * 128 * n * 64
    assert only(analysis) == Contraction("float8_e4m3fn", "float8_e5m2", "bfloat16", flops, 1)


def test_a_product_of_two_factors_has_no_scales():
    """Even if its second factor has fewer terms, which no valid program has."""
    analysis = count(
        shapes(a="bf16[128,64]", b="bf16[5,32]")
        + "\nROOT %c = bf16[128,5] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
    )
    assert only(analysis).flops == 2 * 128 * 5 * 64


def test_kernel_for_blocks_of_128():
    call = (
        shapes(a="f8e4m3fn[2,4,256]", s="f32[2,2,128]", b="f8e4m3fn[2,5,256]", t="f32[2,2,128]")
        + "\nROOT %c = f32[2,4,5] custom-call(%a, %s, %b, %t), "
        'custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/NAME/mpmd_map"}'
    )
    analysis = count(call.replace("NAME", block_product.NAME))
    assert only(analysis) == Contraction("float8_e4m3fn", "float8_e4m3fn", "float32", 20480, 1)
    assert analysis.uncounted == ()
    # Nothing is known of other kernels.
    assert count(call).uncounted == (("mosaic_gpu_v2", 1),)
    assert count(call).flops == 0


def test_what_may_compute_is_named_and_what_does_not_is_not():
    entry = """
        %p = f32[4,4] parameter(0)
        %a = f32[4,4] custom-call(%p), custom_call_target="tpu_custom_call"
        %b = f32[4,4] custom-call(%a), custom_call_target="tpu_custom_call"
        %c = f32[4,4] custom-call(%b), custom_call_target="__cudnn$fmhaSoftmax"
        %d = f32[4,4] custom-call(%c), custom_call_target="Sharding"
        %e = f32[4,4] custom-call(), custom_call_target="AllocateBuffer"
        %f = (f32[4,1], s32[4,1]) custom-call(%d), custom_call_target="__gpu$TopK"
        %g = c64[4,4] fft(%d), fft_type=FFT, fft_length={4}
        %h = f32[4,4] custom-call(%p), custom_call_target="xla_ffi_python_gpu_callback"
        %i = ((f32[4,4]), f32[4,4]) custom-call-start(%p), custom_call_target="tpu_custom_call"
        %j = f32[4,4] custom-call-done(%i)
        ROOT %k = f32[4,4] convolution(%p, %j), dim_labels=bf_io->bf"""
    # An operation that XLA does not have yet.
    program = changed(proto(written(entry)), "k", put((2, b"grouped-dot")))
    analysis = analyze(program)
    assert analysis.uncounted == (
        ("tpu_custom_call", 3),
        ("__cudnn$fmhaSoftmax", 1),
        ("fft", 1),
        ("grouped-dot", 1),
    )
    assert analysis.flops == 0


def test_a_conditional_counts_its_most_expensive_branch():
    dot = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    branches = [
        f"%b{n} (x: f32[4,4]) -> f32[4,4] {{\n  %x = f32[4,4] parameter(0)\n"
        + "".join(f"  %y{i} = f32[4,4] {dot}\n" for i in range(n))
        + "  ROOT %z = f32[4,4] negate(%x)\n}"
        for n in (1, 3, 2)
    ]
    entry = shapes(x="f32[4,4]", p="s32[]", q="pred[]")
    switch = entry + (
        "\nROOT %c = f32[4,4] conditional(%p, %x, %x, %x), branch_computations={%b1, %b3, %b2}"
    )
    assert count(switch, *branches).flops == 3 * 128
    cond = entry + (
        "\nROOT %c = f32[4,4] conditional(%q, %x, %x), true_computation=%b1, false_computation=%b2"
    )
    assert count(cond, *branches).flops == 2 * 128


def test_calls_and_asynchronous_calls_are_followed_but_not_to_the_host():
    inner = """
%f (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4] parameter(0)
  ROOT %y = f32[4,4] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""
    # XLA has a computation of its own for each asynchronous call.
    wrapped, hosted = inner.replace("%f", "%w"), inner.replace("%f", "%h")
    analysis = count(
        """
        %x = f32[4,4] parameter(0)
        %a = f32[4,4] call(%x), to_apply=%f
        %b = ((f32[4,4]), f32[4,4], u32[]) async-start(%x), calls=%w
        %c = ((f32[4,4]), f32[4,4], u32[]) async-update(%b)
        %d = f32[4,4] async-done(%c)
        %e = ((f32[4,4]), f32[4,4]) call-start(%x), to_apply=%f
        %g = f32[4,4] call-done(%e)
        %h = ((f32[4,4]), f32[4,4]) async-start(%x), async_execution_thread="host", calls=%h
        ROOT %i = f32[4,4] async-done(%h)""",
        inner,
        wrapped,
        hosted,
    )
    assert analysis.contractions == (Contraction(*F32, 3 * 128, 3),)


NUMBERED = 'custom-call(%a, %b), custom_call_target="__cublas$gemm"'


@pytest.mark.parametrize(
    ("line", "change", "expected"),
    [
        ("dot(%a, %b), lhs_contracting_dims={2}", None, r"dimensions \(2,\) within"),
        ("dot(%a, %b)", put((30, message((1, -1)))), r"dimensions \(-1,\) within"),
        ("dot(%a, %b)", without(36), "two arrays"),
        ("convolution(%a, %b), dim_labels=bf_io->bf", without(16), "`convolution_dimension_numb"),
        ("convolution(%a, %b), dim_labels=b0f_0io->b0f", None, "dimension numbers that fit"),
        (
            "convolution(%a, %b), dim_labels=bf_io->bf, window={size=3x3}",
            None,
            "a window with 0 dimensions",
        ),
        (
            "ragged-dot(%a, %b, %b), lhs_contracting_dims={1}, lhs_ragged_dims={0}",
            put((90, b"")),
            "`lhs_ragged_dimensions`",
        ),
        (NUMBERED, None, "`dot_dimension_numbers`"),
        (NUMBERED + ', backend_config={"a":1}', None, "`dot_dimension_numbers`"),
        (NUMBERED, put((43, b"[" * 10**5)), "`dot_dimension_numbers`"),
        (NUMBERED, without(28), "a `custom_call_target`"),
    ],
    ids=range(11),
)
def test_a_contraction_that_cannot_be_read_raises(line: str, change: Any, expected: str):
    program = proto(written(shapes(a="f32[4,4]", b="f32[4,4]") + f"\nROOT %c = f32[4,4] {line}"))
    with pytest.raises(ValueError, match=f"the instruction `c` .* cannot be counted.*{expected}"):
        analyze(program if change is None else changed(program, "c", change))


def test_a_window_that_no_program_has_is_refused():
    """Its elements are gone through one by one, which would take years."""
    entry = shapes(a="f32[2,6,3]", b="f32[3,3,5]")
    line = "convolution(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f"
    program = proto(written(f"{entry}\nROOT %c = f32[2,6,5] {line}"))
    assert analyze(program).flops
    wide = changed(program, "c", put((15, message((1, message((1, 2**62)))))))
    with pytest.raises(ValueError, match="a window of at most 4194304 elements, not 4611686018"):
        analyze(wide)


def test_window_positions_against_a_search():
    grid = itertools.product((1, 4), (1, 5), (1, 3, 6), (1, 2, 5), (-1, 0, 2), (1, 3), (1, 2, 4, 6))
    for inputs, outputs, size, stride, pad, dilation, base in grid:
        meetings = sum(
            (where := o * stride + k * dilation - pad) % base == 0 and 0 <= where // base < inputs
            for o in range(outputs)
            for k in range(size)
        )
        found = _valid_positions(inputs, outputs, size, stride, pad, dilation, base)
        assert found == meetings, (inputs, outputs, size, stride, pad, dilation, base)


@pytest.mark.parametrize(
    ("name", "dtypes", "flops"),
    [
        # (512, 256) by (1024, 256), float8 operands scaled after the product.
        ("h100_fp8_gemm", {("float8_e4m3fn", "float8_e4m3fn", "bfloat16")}, 2 * 512 * 256 * 1024),
        # (16, 32, 32, 64) by 3 x 3 x 64 x 128, stride 2, "SAME", with both gradients; cuDNN gets an
        # input that was padded before, so no position falls outside.
        ("h100_convolution", {F32}, 3 * 2 * 16 * 16 * 16 * 9 * 64 * 128),
        ("v5e_batched_dot", {F32}, 2 * 8 * 512 * 256 * 128),
        # (16, 32, 32, 64) by 3 x 3 x 16 x 128 in four groups, window dilated by 2, both gradients.
        (
            "v5e_grouped_convolution",
            {
                ("bfloat16", "bfloat16", "float32"),
                ("bfloat16", "float32", "float32"),
                ("float32", "bfloat16", "float32"),
            },
            3 * 2 * 16 * 28 * 28 * 9 * 16 * 128,
        ),
        # A scan over 16 layers of (1024, 4096) by (4096, 4096) per device; rematerialized, so
        # four dots each.
        ("h100_fsdp", {F32}, 16 * 4 * 2 * 1024 * 4096 * 4096),
        (
            "v5e_fsdp",
            {("bfloat16", "bfloat16", "float32"), ("float32", "bfloat16", "float32")},
            16 * 4 * 2 * 1024 * 4096 * 4096,
        ),
    ],
)
def test_real_programs(name: str, dtypes: set[tuple[str, str, str]], flops: int):
    analysis = analyze(fixture(name))
    assert {(c.lhs, c.rhs, c.out) for c in analysis.contractions} == dtypes
    assert analysis.flops == flops
    assert analysis.uncounted == ()


def test_a_real_kernel_of_unknown_flops():
    assert analyze(fixture("v5e_pallas")).uncounted == (("tpu_custom_call", 1),)


def test_compiled_dots():
    a, b = jnp.ones((64, 48)), jnp.ones((48, 80))
    assert compiled(jnp.matmul, a, b).flops == 2 * 64 * 48 * 80
    x, y = jnp.ones((4, 64, 48)), jnp.ones((4, 48, 32))
    assert (
        compiled(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), x, y).flops == 2 * 4 * 64 * 48 * 32
    )


def test_compiled_gradient():
    def loss(w, v, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ v) ** 2)

    args = jnp.ones((48, 64)), jnp.ones((64, 80)), jnp.ones((32, 48))
    forward = 2 * 32 * (48 * 64 + 64 * 80)
    assert compiled(loss, *args).flops == forward
    # Two products more for each, but nobody needs the gradient of x.
    assert compiled(jax.grad(loss, (0, 1)), *args).flops == 3 * forward - 2 * 32 * 48 * 64


def test_compiled_scan():
    def run(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    x, ws = jnp.ones((32, 64)), jnp.ones((7, 64, 64))
    one = 7 * 2 * 32 * 64 * 64
    assert compiled(run, x, ws).flops == one
    gradient = compiled(jax.grad(lambda ws: run(x, ws).sum()), ws)
    assert gradient.flops == 3 * one
    assert gradient.unknown_trip_counts == 0
    nested = compiled(lambda x, ws: lax.fori_loop(0, 3, lambda _, x: run(x, ws), x), x, ws)
    assert nested.flops == 3 * one


def test_compiled_loop_of_unknown_length():
    x = jnp.ones((64, 64))
    analysis = compiled(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x), x)
    assert (analysis.flops, analysis.unknown_trip_counts) == (2 * 64**3, 1)


def test_compiled_conditional():
    def run(x, flag):
        return lax.cond(flag, lambda x: jnp.sin(x @ x) @ x, lambda x: x @ x, x)

    assert compiled(run, jnp.ones((64, 64)), True).flops == 2 * 2 * 64**3


CONVOLUTIONS = {
    "plain": {"window_strides": (1, 1), "padding": "VALID"},
    "padded": {"window_strides": (1, 1), "padding": "SAME"},
    "strided": {"window_strides": (2, 3), "padding": ((2, 1), (0, 3))},
    "window_dilated": {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 3)},
    "input_dilated": {
        "window_strides": (1, 2),
        "padding": ((2, 2), (1, 0)),
        "lhs_dilation": (2, 3),
    },
    "grouped": {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 4},
}


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_compiled_convolutions(options: dict):
    groups = options.get("feature_group_count", 1)
    x, k = jnp.ones((2, 14, 17, 16)), jnp.ones((3, 3, 16 // groups, 32))

    def convolve(x, k):
        return lax.conv_general_dilated(x, k, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    # A convolution of ones counts, for each output, the pairs it sums.
    pairs = int(convolve(x, k).sum())
    assert 0 < pairs <= math.prod(convolve(x, k).shape) * 9 * 16 // groups
    assert compiled(convolve, x, k).flops == 2 * pairs
    # In the gradients the same pairs meet again.
    gradient = jax.grad(lambda x, k: (convolve(x, k) ** 2).sum(), (0, 1))
    assert compiled(gradient, x, k).flops == 3 * 2 * pairs
