"""What a report says about products in 8 and 4 bits."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep._autocast.primitives import CONTRACTIONS
from halfstep._base.calls import FlatCall
from halfstep._explain.stored import residuals
from halfstep._explain.totals import by_dtype
from halfstep._program.control_flow import equations
from halfstep._program.sources import Finder
from tests.explain._functions import shape
from tests.explain.test_report import Balanced

X = shape(4096, 512)
PARAMS = {"up": shape(512, 2048), "down": shape(2048, 512), "head": shape(512, 10)}


def attention(params: Any, x: Any) -> Any:
    hidden = jax.nn.gelu(x @ params["up"]) @ params["down"]
    mixed = jax.nn.softmax(hidden @ hidden.T) @ hidden
    with jax.named_scope("head"):
        return jnp.mean((mixed @ params["head"]) ** 2)


def dense(params: Any, x: Any) -> Any:
    return jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)


def report(loss: Callable[..., Any] = attention, policy: Any = "f8") -> halfstep.ExplainReport:
    return halfstep.explain(loss, policy)(PARAMS, X)


def f8_of(made: halfstep.ExplainReport) -> halfstep.ExplainF8:
    assert made.totals.f8 is not None
    return made.totals.f8


def test_each_contraction_says_its_formats_or_why_not():
    made = [entry for entry in report().operations if entry.is_contraction]
    assert [entry.dtypes for entry in made] == ["e4m3 -> bf16"] * 2 + ["bf16 -> bf16"] * 3
    assert [entry.reason for entry in made[:2]] == ["f8: e4m3, gradients e5m2, per tensor"] * 2
    assert made[2].reason.startswith("not f8: a product of two activations")
    assert made[4].reason == "not f8: 10 is not a multiple of 16"
    names = ["params/up", "params/down", "", "", "params/head"]
    assert [entry.parameter for entry in made] == names
    assert [entry.in_f8 for entry in made] == [True, True, False, False, False]


def test_totals():
    found = f8_of(report())
    assert (found.format, found.recipe, found.count, found.total) == ("fp8", "f8", 2, 5)
    mlp, scores, head = 4096 * 512 * 2048, 4096 * 4096 * 512, 4096 * 512 * 10
    assert found.flops == 2 * mlp / (2 * mlp + 2 * scores + head)
    assert found.eligible == 2 * mlp / (2 * mlp + head)
    missed, aside = found.others
    assert (missed.eligible, missed.count, missed.flops) == (True, 1, 2 * head)
    assert (aside.eligible, aside.count, aside.flops) == (False, 2, 4 * scores)
    assert all(line.startswith("test_f8.py:") for line in (*missed.sources, *aside.sources))
    # Products of fewer bits than the compute dtype are no reason to complain of others.
    assert report().totals.low == 1


def test_text_html_and_json():
    made = report()
    assert "contractions          51.58 GFLOP: bf16 66.7 %, e4m3 33.3 %" in str(made)
    line = (
        "  in fp8              2 of 5 contractions (33.3 % of the FLOPs); 99.8 % of what f8 is for"
    )
    assert line in str(made)
    assert "  missed              1: 10 is not a multiple of 16: test_f8.py:" in str(made)
    assert "  not for it          2: a product of two activations" in str(made)
    assert max(map(len, str(made).splitlines())) <= 120
    page = Balanced()
    page.feed(made._repr_html_())
    assert page.open == []
    assert "2 of 5 contractions (33.3 % of the FLOPs); 99.8 % of what f8 is for" in page.text
    assert "f8: e4m3, gradients e5m2, per tensor" in page.text
    assert "10 is not a multiple of 16" in page.text
    read = json.loads(made.to_json())
    assert read["totals"]["f8"]["count"] == 2
    assert read["totals"]["f8"]["others"][0]["reason"] == "10 is not a multiple of 16"
    assert [entry["in_f8"] for entry in read["operations"] if entry["is_contraction"]][:3] == [
        True,
        True,
        False,
    ]


def test_without_a_recipe_nothing_is_said_of_it():
    made = report(policy="bf16")
    assert made.totals.f8 is None
    assert "fp8" not in str(made)
    assert not any(entry.in_f8 or entry.refusal for entry in made.operations)


def test_check_passes():
    report(dense).check(f8=1.0)
    report().check(f8=0.99)


def test_check_names_what_is_missed():
    with pytest.raises(halfstep.LintError, match="10 is not a multiple of 16") as caught:
        report().check(f8=1.0)
    first, second, third = str(caught.value).splitlines()
    assert first == (
        "required: 100 % of the eligible contractions' FLOPs in fp8; attention has 99.8 %:"
    )
    assert second.startswith("  test_f8.py:")
    assert second.endswith(
        " attention: dot_general bf16[4096,512] x bf16[512,10] by params/head in head: "
        "10 is not a multiple of 16"
    )
    assert third.endswith('`rules=("op:dot_general@head=compute",)`.')


def test_what_it_says_to_type_works():
    policy = halfstep.Policy.parse("f8,op:dot_general@head=compute")
    made = report(policy=policy)
    made.check(f8=1.0)
    assert [other.eligible for other in f8_of(made).others] == [False, False]


def test_check_without_a_recipe():
    with pytest.raises(halfstep.LintError, match='has no recipe: write policy="f8"'):
        report(policy="bf16").check(f8=0.5)


def precise(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.dot(x, params["up"], precision="highest"))


def in_16_bits(params: Any, x: Any) -> Any:
    low = (x.astype(jnp.bfloat16), params["up"].astype(jnp.bfloat16))
    return jnp.mean(jnp.dot(*low).astype(jnp.float32))


def by_a_vector(params: Any, x: Any) -> Any:
    return jnp.mean(x @ params["up"][:, 0])


@pytest.mark.parametrize(
    ("loss", "why", "fix"),
    [
        (precise, "precision=HIGHEST is asked for", "leave `precision=` out"),
        (in_16_bits, "its operands are written in bf16", "write both operands in float32"),
        (by_a_vector, "a product with a vector", 'put it into `jax.named_scope("head")` and leave'),
    ],
    ids=["precision", "16 bits", "a vector"],
)
def test_other_reasons(loss: Callable[..., Any], why: str, fix: str):
    with pytest.raises(halfstep.LintError, match="has 0 %") as caught:
        report(loss).check(low=0, max_findings=9, f8=0.5)
    assert f": {why}\n    Fix: {fix}" in str(caught.value)


def kept(params: Any, x: Any) -> Any:
    return jnp.mean(halfstep.keep_precision(lambda x: x @ params["up"])(x))


def two_parameters(params: Any, x: Any) -> Any:
    return jnp.mean(x @ (params["up"] @ params["down"]))


@pytest.mark.parametrize(
    ("loss", "policy"),
    [
        (kept, "f8"),
        (dense, "f8,scope:**=float32"),
        (dense, "f8,keep=params/up"),
        (two_parameters, "f8"),
    ],
    ids=["keep_precision", "a rule", "keep", "two parameters"],
)
def test_what_the_user_says_is_not_asked_for(loss: Callable[..., Any], policy: str):
    made = report(loss, policy)
    assert f8_of(made).count < f8_of(made).total
    made.check(low=0, max_findings=9, f8=1.0)


def test_activations_are_eligible_where_the_recipe_allows_them():
    recipe = dataclasses.replace(halfstep.RECIPES["f8"], name="mine", activations=True)
    made = report(policy=halfstep.Policy(recipe=recipe))
    assert f8_of(made).count == 4
    assert [other.eligible for other in f8_of(made).others] == [True]


def stacked(params: Any, x: Any) -> Any:
    @jax.checkpoint
    def body(x: Any, layer: Any) -> Any:
        return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"], None

    return jnp.mean(jax.lax.scan(body, x, params)[0])


@pytest.mark.parametrize("recipe", halfstep.RECIPES)
def test_loops_count_their_turns_and_state_is_not_needed(recipe: str):
    params = {"up": shape(3, 512, 2048), "down": shape(3, 2048, 512)}
    made = halfstep.explain(stacked, recipe)(params, X)
    blocked = any(factor.is_blocked for factor in halfstep.RECIPES[recipe].forward)
    assert (f8_of(made).count, f8_of(made).total) == (0 if blocked else 6, 6)
    names = [entry.parameter for entry in made.operations if entry.is_contraction]
    assert names == ["params/up", "params/down"]


@pytest.mark.parametrize("recipe", halfstep.RECIPES)
def test_what_is_said_to_be_multiplied_in_few_bits_is(recipe: str):
    """By the dtypes of the function that autocast makes."""
    x, w = jnp.ones((128, 128)), jnp.ones((128, 128))
    options: dict[str, Any] = {}
    if halfstep.RECIPES[recipe].needs_state:
        key = {"key": jax.random.key(0)} if halfstep.RECIPES[recipe].is_random else {}
        options["scaling"] = halfstep.RECIPES[recipe].init(product, w, x, **key)
    made = jax.make_jaxpr(halfstep.autocast(product, recipe, **options))(w, x)
    few = {np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2), np.dtype(jnp.float4_e2m1fn)}
    factors = [
        {getattr(var.aval, "dtype", None) for var in equation.invars[:2]} <= few
        for equation in equations(made.jaxpr)
        if equation.primitive.name in CONTRACTIONS
    ]
    (entry,) = [e for e in halfstep.explain(product, recipe)(w, x).operations if e.is_contraction]
    assert any(factors) == entry.in_f8
    assert entry.reason.startswith(f"{recipe}: e")
    if not entry.in_f8:
        assert "multiplied in bf16" in entry.reason
        with pytest.raises(halfstep.LintError, match="multiplied in bf16"):
            halfstep.explain(product, recipe)(w, x).check(f8=1.0)


def product(w: Any, x: Any) -> Any:
    return jnp.mean(x @ w)


W = jax.ShapeDtypeStruct((128, 128), jnp.float32)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the kernel takes JAX 0.12")
def test_where_blocks_are_multiplied_is_said():
    native = {"f8-block": "Hopper and Blackwell", "mxfp8": "Blackwell"}
    for recipe, generations in native.items():
        (why,) = {
            entry.reason
            for entry in halfstep.explain(product, recipe)(W, W).operations
            if entry.is_contraction
        }
        assert f"multiplied in bf16 except on {generations}, per 1x" in why
    sizes = jnp.array([64, 64])
    made = halfstep.explain(lambda w, x: jax.lax.ragged_dot(x, w, sizes).sum(), "mxfp8")
    (why,) = {
        entry.reason
        for entry in made(jnp.ones((2, 128, 128)), W).operations
        if entry.is_contraction
    }
    assert "multiplied in bf16 except on Blackwell, per 1x32" in why
    # Each example has sums of its own: there are no groups of rows.
    batched = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((0,), (0,))), [0], [])
    made = halfstep.explain(
        lambda w, x: jax.lax.ragged_dot_general(x, w, sizes, batched).sum(), "mxfp8"
    )
    (why,) = {
        entry.reason
        for entry in made(jnp.ones((128, 128, 128)), W).operations
        if entry.is_contraction
    }
    assert "multiplied in bf16, per 1x32" in why


def test_legs_that_are_not_quantized_are_named():
    made = halfstep.explain(dense, "f8-row-gw")(PARAMS, X)
    (why,) = {entry.reason for entry in made.operations if entry.is_contraction}
    assert why == "f8-row-gw: e4m3, weight gradient bf16, per row"


@pytest.mark.parametrize("recipe", ["f8-delayed", "nvfp4"])
def test_state_that_is_made_up_is_like_real_state(recipe: str):
    key = {"key": jax.random.key(0)} if halfstep.RECIPES[recipe].is_random else {}
    scaling = halfstep.RECIPES[recipe].init(dense, PARAMS, X, calibrate=False, **key)
    lowered = halfstep.autocast(dense, recipe, scaling=scaling)
    call = FlatCall(lowered, (PARAMS, X), {})
    real = residuals(jax.make_jaxpr(call)(*call.arrays), call, [0], Finder())
    totals = report(dense, recipe).totals
    assert totals.stored == by_dtype([found for found in real if not found.of_argument])
    assert totals.stored_casts == by_dtype([found for found in real if found.of_argument])
