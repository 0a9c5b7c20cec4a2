"""Which contractions of a compiled program are in 8 bits: on small programs, and on real ones."""

import dataclasses
import json
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import halfstep
import halfstep.kernels._block_product as block_product
from halfstep._autocast.f8 import blocks, shards
from halfstep._preflight import ACCELERATORS, Product
from halfstep._preflight.hlo.analysis import analyze
from halfstep._preflight.hlo.products import f8_count
from tests.preflight._compilers import need, own_cache as own_cache
from tests.preflight._entries import entry
from tests.preflight._programs import fixture, program, proto

HEAD = """
FileNames
1 "/home/user/train.py"
2 "JAX/_src/lax.py"
3 "/home/user/model.py"

FunctionNames
1 "<module>"
2 "dot"
3 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=40 end_line=40 column=8 end_column=31}
2 {file_name_id=3 function_name_id=3 line=12 end_line=12 column=8 end_column=31}
3 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=8 end_column=31}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

""".replace("JAX", os.path.dirname(jax.__file__))
LOOP = """
%cond (s: (s32[], f32[4,4])) -> pred[] {
  %s = (s32[], f32[4,4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (s: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %s = (s32[], f32[4,4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[4,4] get-tuple-element(%s), index=1
  %l = f8e4m3fn[4,4] convert(%x)
  %r = f8e5m2[4,4] convert(%x)
  %d = f32[4,4] dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(step)/while/body/halfstep_f8/dot_general" stack_frame_id=3}
  ROOT %t = (s32[], f32[4,4]) tuple(%next, %d)
}"""
MIXED = proto(
    program(
        """
    %zero = s32[] constant(0)
    %w = f32[4,4] parameter(0)
    %init = (s32[], f32[4,4]) tuple(%zero, %w)
    %loop = (s32[], f32[4,4]) while(%init), condition=%cond, body=%body
    %y = f32[4,4] get-tuple-element(%loop), index=1
    %lost = f32[4,4] dot(%y, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(step)/transpose(jvp(mlp))/halfstep_f8/dot_general" stack_frame_id=1}
    %h = bf16[4,4] convert(%y)
    %blocks = f32[4,4] dot(%h, %h), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(step)/halfstep_rounded/dot_general" source_file="a.py" source_line=5}
    ROOT %o = f32[4,4] dot(%lost, %blocks), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    """,
        LOOP,
    ).replace("HloModule test\n", f"HloModule test\n{HEAD}")
)


def test_every_product_with_its_place_and_loops_by_their_turns():
    products = {product.name: product for product in analyze(MIXED).products}
    inside = products["while/body/halfstep_f8/dot_general"]
    assert inside == Product(
        "float8_e4m3fn[4,4]",
        "float8_e5m2[4,4]",
        "float32[4,4]",
        3 * 128,
        3,
        "while/body/halfstep_f8/dot_general",
        # Innermost of the user's own: the frame of JAX's does not count.
        "model.py:12",
    )
    assert products["transpose(jvp(mlp))/halfstep_f8/dot_general"].source == "train.py:40"
    assert products["halfstep_rounded/dot_general"].source == "a.py:5"
    assert products[""].source == ""


def test_counts():
    found = f8_count(analyze(MIXED).products, units=True)
    assert (found.count, found.total) == (3, 6)
    assert found.flops == 3 / 6
    # The last product is none of a recipe's.
    assert found.eligible == 3 / 5


def test_why_not():
    why = {product.name: product.why_not for product in analyze(MIXED).products}
    assert why["while/body/halfstep_f8/dot_general"] == ""
    lost = why["transpose(jvp(mlp))/halfstep_f8/dot_general"]
    assert lost == "the compiler multiplies in float32 what the recipe wrote in 8 bits"
    rounded = why["halfstep_rounded/dot_general"]
    assert rounded == "the recipe rounds to 8 or 4 bits and multiplies in bfloat16"
    assert "halfstep.explain says why" in why[""]


@pytest.mark.parametrize(
    ("lhs", "rhs", "expected"),
    [
        ("float8_e4m3fn", "float8_e5m2", True),
        ("float4_e2m1fn", "float4_e2m1fn", True),
        ("float8_e4m3fn", "bfloat16", False),
        ("int8", "int8", False),
    ],
)
def test_both_operands_have_to_have_8_bits(lhs: str, rhs: str, expected: bool):
    assert Product(f"{lhs}[2]", f"{rhs}[2]", "float32[2]", 1, 1, "", "").in_f8 is expected


def test_a_library_call_of_a_real_program():
    (product,) = analyze(fixture("h100_fp8_gemm")).products
    assert product.in_f8
    assert product.lhs == "float8_e4m3fn[512,256]"
    assert (product.name, product.source) == ("dot_general", "step.py:32")


def made(**changes: Any) -> halfstep.PreflightReport:
    changed = entry(products=analyze(MIXED).products, variant="f8", **changes)
    return halfstep.PreflightReport((changed,))


def test_check_names_what_is_missed():
    made().check(f8=0.6)
    with pytest.raises(halfstep.LintError, match="f8 on h100 has 60 %:") as caught:
        made().check(f8=1.0)
    required, *lines, fix = str(caught.value).splitlines()
    assert required.startswith("required: 100 % of the eligible contractions' FLOPs in fp8; ")
    assert sorted(lines) == [
        "  a.py:5: bfloat16[4,4] x bfloat16[4,4] (1x, 128 FLOP), halfstep_rounded/dot_general: "
        "the recipe rounds to 8 or 4 bits and multiplies in bfloat16",
        "  train.py:40: float32[4,4] x float32[4,4] (1x, 128 FLOP), "
        "transpose(jvp(mlp))/halfstep_f8/dot_general: the compiler multiplies in float32 what the "
        "recipe wrote in 8 bits",
    ]
    assert fix.startswith("    Fix: try gemm='library'")


def test_check_of_a_step_without_a_recipe():
    report = halfstep.PreflightReport((entry(),))
    with pytest.raises(halfstep.LintError, match=r'bf16 on h100 has 0 %, .* policy="f8"'):
        report.check(f8=0.1)
    report.check(f8=0)


def test_check_of_a_target_without_units():
    report = made(target="v5e", f8_units=False)
    with pytest.raises(halfstep.LintError, match="v5e has no fp8 units"):
        report.check(f8=0.1)
    assert "v5e has no fp8 units, and multiplies operands of 8 bits at the rate of 16" in str(
        report
    )
    assert "no fp8 units" not in str(made())


def test_check_of_a_step_without_a_program():
    report = halfstep.PreflightReport((entry(products=None, notes=("the compiler gave up",)),))
    with pytest.raises(halfstep.LintError, match=r"there is no program .*: the compiler gave up"):
        report.check(f8=0.1)
    assert report.entries[0].f8 is None
    assert report.entries[0].to_dict()["f8"] is None


def test_text_html_and_json():
    text = str(made())
    assert "h100    f8    3 of 6 contractions" in text
    assert "not 1: float32[4,4] x float32[4,4]" in text
    assert "3 of 6 contractions, 50 % of the FLOPs" in made().detail()
    page = made()._repr_html_()
    assert "3 of 6 contractions" in page
    assert "the recipe rounds to 8 or 4 bits" in page
    assert page.count("<tr") == page.count("</tr>")
    (read,) = json.loads(made().to_json())["entries"]
    assert read["f8"] == {"count": 3, "total": 6, "flops": 0.5, "eligible": 0.6, "units": True}
    assert [product["in_f8"] for product in read["products"]].count(True) == 1


def test_without_a_recipe_nothing_is_said_of_it():
    report = halfstep.PreflightReport((entry(),))
    assert "fp8" not in str(report)
    assert "fp8" not in report._repr_html_()
    assert "fp8" not in report.detail()


def test_a_long_list_is_cut():
    other = next(product for product in analyze(MIXED).products if not product.of_recipe)
    many = tuple(dataclasses.replace(other, name=str(number)) for number in range(9))
    report = halfstep.PreflightReport((entry(products=(*analyze(MIXED).products, *many)),))
    assert "not 6 more" in str(report)
    assert str(report).count("  not 1: ") == 6
    assert report.detail().count("not in fp8") == 12


def test_which_targets_have_units():
    with_units = {name for name, found in ACCELERATORS.items() if "float8" in found.peak_flops}
    assert with_units >= {"h100", "h200", "b200", "l4", "rtx4070", "tpu7x"}
    assert not with_units & {"a100-40gb", "a100-80gb", "v4", "v5e", "v5p", "v6e"}


# By the compilers.


def loss(params: Any, x: Any) -> Any:
    with jax.named_scope("mlp"):
        hidden = jax.nn.gelu(x @ params["up"])
        return jnp.mean((hidden @ params["down"]) ** 2)


def compiled(target: str, policy: str, **settings: Any) -> halfstep.PreflightReport:
    def step(params: Any, x: Any, state: Any) -> Any:
        grads = halfstep.filter_grad(loss, state, policy=policy)(params, x)[-1]
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)

    params = {
        "up": jax.ShapeDtypeStruct((256, 512), jnp.float32),
        "down": jax.ShapeDtypeStruct((512, 256), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    recipe, state = halfstep.RECIPES.get(policy), None
    if recipe is not None and recipe.needs_state:
        made = recipe.init(loss, params, x, key=jax.random.key(0), calibrate=False)
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), made)
    args = (params, x, state)
    return halfstep.preflight(step, args, targets=target, donate_argnums=0, **settings)


TARGETS = [
    pytest.param("h100", "cuda", id="h100"),
    pytest.param("b200", "cuda", id="b200", marks=pytest.mark.slow),
    pytest.param("tpu7x", "tpu", id="tpu7x"),
]


@pytest.mark.rows(1)
@pytest.mark.parametrize(("target", "platform"), TARGETS)
@pytest.mark.usefixtures("own_cache")
def test_all_products_of_a_dense_model(target: str, platform: str):
    """Two forward, and three backward: the batch has no gradient."""
    need(platform)
    report = compiled(target, "f8")
    report.check(f8=1.0)
    found = report[target].f8
    assert found is not None
    assert (found.count, found.total, found.flops, found.units) == (5, 5, 1.0, True)
    assert "5 of 5 contractions  100 %" in str(report)
    lines = {product.source for product in report[target].products or ()}
    assert len(lines) == 2
    assert all(line.startswith("test_f8.py:") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "limit"), [("mxfp8", 0.7), ("nvfp4", 1.8)])
@pytest.mark.usefixtures("own_cache")
def test_factors_are_encoded_from_16_bits_on_a_b200(policy: str, limit: float):
    """With copies in float32, and rotations level by level, they took 0.73 and 2.35 times."""
    need("cuda")
    plain, made = (compiled("b200", name)["b200"].traffic_bytes for name in ("bf16", policy))
    assert plain is not None
    assert made is not None
    assert made < limit * plain


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_four_bits_are_multiplied_with_their_scales_on_a_b200():
    """A product by which rows are rotated would be one for which XLA has no tiles."""
    need("cuda")
    report = compiled("b200", "nvfp4")
    report.check(f8=1.0)
    found = report["b200"].f8
    assert found is not None
    assert (found.count, found.total) == (5, 5)
    assert {product.lhs.partition("[")[0] for product in report["b200"].products or ()} == {
        "float4_e2m1fn"
    }


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_blocks_are_multiplied_with_their_scales_on_a_b200(monkeypatch: pytest.MonkeyPatch):
    need("cuda")
    report = compiled("b200", "mxfp8")
    report.check(f8=1.0)
    found = report["b200"].f8
    assert found is not None
    assert (found.count, found.total) == (5, 5)
    assert report["b200"].hlo.count(" scaled-dot(") >= 4
    # XLA forgets the lines of these products: they are those of their factors.
    lines = {product.source for product in report["b200"].products or ()}
    assert len(lines) == 2
    assert all(line.startswith("test_f8.py:") for line in lines)
    # Decoded factors are multiplied in 16 bits, also there.
    monkeypatch.setattr(blocks, "has_units", lambda *_: False)
    with pytest.raises(halfstep.LintError, match="multiplies in bfloat16"):
        compiled("b200", "mxfp8").check(f8=1.0)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the kernel takes JAX 0.12")
@pytest.mark.usefixtures("own_cache")
def test_blocks_of_128_are_multiplied_in_8_bits_on_an_h100(monkeypatch: pytest.MonkeyPatch):
    need("cuda")
    report = compiled("h100", "f8-block")
    report.check(f8=1.0)
    found = report["h100"].f8
    assert found is not None
    assert (found.count, found.total) == (5, 5)
    products = report["h100"].products or ()
    lines = {product.source for product in products}
    assert len(lines) == 2
    assert all(line.startswith("test_f8.py:") for line in lines)
    assert report["h100"].contraction_flops() == {"float8_e4m3fn": 5 * 2 * 1024 * 256 * 512}
    assert report["h100"].notes == ()
    # The instruction of every kernel multiplies e4m3: nothing is converted before it.
    kernels = [line for line in report["h100"].hlo.splitlines() if "mosaic_gpu" in line]
    assert len(kernels) == 5
    for kernel in kernels:
        assert set(re.findall(r"wgmma\.mma_async[\w.]+", kernel)) == {
            "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"
        }
    # Decoded factors are multiplied in 16 bits.
    monkeypatch.setattr(block_product, "refusal", lambda *_: "is away for this test")
    with pytest.raises(halfstep.LintError, match="multiplies in bfloat16") as caught:
        compiled("h100", "f8-block").check(f8=1.0)
    assert str(caught.value).count("test_f8.py:") == 5


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_blocks_of_128_elsewhere():
    need("cuda")
    # Blackwell has units for blocks of 32, and XLA an operation for them.
    report = compiled("b200", "f8-block")
    report.check(f8=1.0)
    assert report["b200"].f8 is not None
    assert (report["b200"].f8.count, report["b200"].f8.total) == (5, 5)
    for target in ("l4", "a100-80gb"):
        (entry,) = compiled(target, "f8-block").entries
        assert {product.lhs.partition("[")[0] for product in entry.products or ()} == {"bfloat16"}
        assert all("halfstep_rounded" in product.name for product in entry.products or ())


def sharded(policy: str, weights: P, *, width: int = 256, kind: AxisType = AxisType.Auto) -> Any:
    """The step over 8 GPUs: its batch is divided, and its weights are divided as is said."""
    params = {
        "up": jax.ShapeDtypeStruct((width, 512), jnp.float32),
        "down": jax.ShapeDtypeStruct((512, width), jnp.float32),
    }
    # With fewer rows, XLA gathers activations instead of weights.
    x = jax.ShapeDtypeStruct((8192, width), jnp.float32)
    recipe = halfstep.RECIPES.get(policy)
    state = None
    if recipe is not None and recipe.needs_state:
        state = recipe.init(loss, params, x, calibrate=False, key=jax.random.key(0))

    def wanted(params: Any, x: Any) -> Any:
        if kind is AxisType.Explicit:
            params = jax.sharding.reshard(params, P())
        return loss(params, x)

    def step(state: Any, params: Any, x: Any) -> Any:
        *_, grads = halfstep.filter_grad(wanted, state, policy=policy)(params, x)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)

    report = halfstep.preflight(
        step,
        (state, params, x),
        targets="b200:8",
        mesh=AbstractMesh((8,), ("data",), axis_types=(kind,)),
        shardings=(P(), {"up": weights, "down": weights}, P("data")),
        donate_argnums=1,
    )
    return report["b200:8"]


def gathered(entry: Any) -> dict[str, int]:
    return {c.dtype: c.bytes for c in entry.collectives if c.kind == "all-gather"}


@pytest.mark.rows(1)
@pytest.mark.parametrize("policy", ["mxfp8", "nvfp4"])
@pytest.mark.usefixtures("own_cache")
def test_blocks_are_multiplied_with_their_scales_on_several_b200s(
    policy: str, monkeypatch: pytest.MonkeyPatch
):
    """Two products forward, and three backward: the batch has no gradient."""
    need("cuda")
    entry = sharded(policy, P("data"))
    assert entry.f8 is not None
    products = [product for product in entry.products if product.of_recipe]
    assert sum(product.count for product in products) == 5
    assert all(product.in_f8 for product in products)
    assert entry.hlo.count('custom_call_target="__cudnn$blockScaledDot"') == 5
    # Three of these products take weights, and gather them as they are multiplied.
    elements = 3 * 256 * 512
    size, of_scales = (1.0, "float8_e8m0fnu") if policy == "mxfp8" else (0.5, "float8_e4m3fn")
    scales = elements // (32 if policy == "mxfp8" else 16)
    # Two elements of 4 bits are gathered as a byte.
    of_elements = "float8_e4m3fn" if policy == "mxfp8" else "int8"
    assert gathered(entry) == {of_elements: size * elements, of_scales: scales}
    # Decoded factors are gathered and multiplied in 16 bits.
    monkeypatch.setattr(shards, "is_known", lambda *_: False)
    entry = sharded(policy, P("data"))
    products = [product for product in entry.products if product.of_recipe]
    assert not any(product.in_f8 for product in products)
    assert "bfloat16" in gathered(entry)


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_blocks_over_explicit_axes():
    need("cuda")
    entry = sharded("mxfp8", P("data"), kind=AxisType.Explicit)
    assert entry.hlo.count('custom_call_target="__cudnn$blockScaledDot"') == 5


@pytest.mark.usefixtures("own_cache")
def test_blocks_inside_a_shard_map():
    need("cuda")
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def part(params: Any, x: Any) -> Any:
        grads = halfstep.filter_grad(loss, policy="mxfp8")(params, x)[2]
        return jax.lax.pmean(grads, "data")

    params = {
        "up": jax.ShapeDtypeStruct((256, 512), jnp.float32),
        "down": jax.ShapeDtypeStruct((512, 256), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((8192, 256), jnp.float32)
    report = halfstep.preflight(
        jax.shard_map(part, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False),
        (params, x),
        targets="b200:8",
        mesh=mesh,
        shardings=(P(), P("data")),
    )
    assert report["b200:8"].hlo.count('custom_call_target="__cudnn$blockScaledDot"') == 5
    report.check(f8=1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_blocks_are_not_cut():
    """Rows of 128 elements are 4 blocks of 32, and their weights are divided over 8 devices."""
    need("cuda")
    entry = sharded("mxfp8", P("data"), width=128)
    assert entry.hlo.count('custom_call_target="__cudnn$blockScaledDot"') == 5


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_products_by_the_library():
    need("cuda")
    report = compiled("h100", "f8", gemm="library")
    report.check(f8=1.0)
    assert "__cublas$lt$matmul$f8" in report["h100"].hlo


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_what_misses_on_an_h100():
    need("cuda")
    half = compiled("h100", "bf16")
    assert half["h100"].f8 is not None
    assert (half["h100"].f8.count, half["h100"].f8.total) == (0, 5)
    with pytest.raises(halfstep.LintError, match='policy="f8"'):
        half.check(f8=1.0)
    blocks = compiled("h100", "mxfp8")
    with pytest.raises(halfstep.LintError, match="multiplies in bfloat16") as caught:
        blocks.check(f8=1.0)
    assert str(caught.value).count("test_f8.py:") == 5
    # The recipe leaves the gradients of weights in 16 bits.
    rows = compiled("h100", "f8-row-gw")
    rows.check(f8=1.0)
    assert rows["h100"].f8 is not None
    assert (rows["h100"].f8.count, rows["h100"].f8.total) == (3, 5)


@pytest.mark.usefixtures("own_cache")
def test_what_a_gpu_without_units_makes_of_it():
    need("cuda")
    report = compiled("a100-80gb", "f8")
    assert report["a100-80gb"].f8 is not None
    assert (report["a100-80gb"].f8.count, report["a100-80gb"].f8.total) == (0, 5)
    for product in report["a100-80gb"].products or ():
        # Some in bfloat16, and some in float16.
        assert re.fullmatch(
            "the compiler multiplies in b?float16 what the recipe wrote in 8 bits", product.why_not
        )
    with pytest.raises(halfstep.LintError, match="a100-80gb has no fp8 units"):
        report.check(f8=1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_tpu_without_units():
    need("tpu")
    report = compiled("v5e", "f8")
    assert report["v5e"].f8 is not None
    assert (report["v5e"].f8.count, report["v5e"].f8.units) == (5, False)
    with pytest.raises(halfstep.LintError, match="v5e has no fp8 units"):
        report.check(f8=1.0)
