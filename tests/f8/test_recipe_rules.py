"""Rules that give products another recipe than the policy's."""

import dataclasses
import pathlib
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import RECIPES, Policy, PrecisionRule
from halfstep._policy.recipe import RecipeName

pytestmark = pytest.mark.core

MIXED = "nvfp4,scope:last=mxfp8"
KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {name: jax.random.normal(key, (64, 64)) / 8 for name, key in zip("ab", KEYS, strict=False)}
X = jax.random.normal(KEYS[2], (32, 64))


def hidden(params: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("first"):
        return jnp.tanh(x @ params["a"])


def model(params: Any, x: jax.Array) -> jax.Array:
    x = hidden(params, x)
    with jax.named_scope("last"):
        return x @ params["b"]


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(params, x) ** 2)


def reasons(policy: Policy | str) -> list[str]:
    operations = halfstep.explain(loss, policy)(PARAMS, X).operations
    return [entry.reason for entry in operations if entry.name == "dot_general"]


def test_names_are_those_of_the_recipes():
    assert get_args(RecipeName) == tuple(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_text_and_file(name: str, tmp_path: pathlib.Path):
    # A rule with delayed scales needs that recipe as the policy's own.
    own = "f8-delayed" if name == "f8-delayed" else "nvfp4"
    policy = Policy.parse(f"{own},op:dot_general@last={name},scope:first=compute")
    assert Policy.parse(str(policy)) == policy
    policy.save(tmp_path / "policy.toml")
    assert Policy.load(tmp_path / "policy.toml") == policy
    assert policy.rules[0].recipe == RECIPES[name]
    assert policy.rules[1].recipe is None


def test_a_recipe_itself():
    named = PrecisionRule("mxfp8", scope="last")
    assert PrecisionRule(RECIPES["mxfp8"], scope="last") == named
    assert str(named) == "scope:last=mxfp8"
    assert named.is_text
    mine = PrecisionRule(dataclasses.replace(RECIPES["mxfp8"], name="mine"), scope="last")
    assert str(mine) == "scope:last=mine"
    assert not mine.is_text
    with pytest.raises(ValueError, match="cannot be written into a file"):
        Policy(compute="bf16", recipe="f8", rules=(mine,)).save("policy.toml")
    assert reasons(Policy(compute="bf16", rules=(mine,)))[1].startswith("mine: e4m3")


@pytest.mark.rows(1)
@pytest.mark.parametrize("own", ["f8", "bf16"])
def test_the_scope_has_the_recipe_and_nothing_else(own: str):
    # One scale for the whole weight makes zeros of its small columns; scales of blocks do not.
    params = {**PARAMS, "b": PARAMS["b"].at[:, :32].mul(2.0**-24)}
    mixed = halfstep.autocast(model, f"{own},scope:last=mxfp8")(params, X)
    between = halfstep.autocast(hidden, own)(params, X)
    alone = halfstep.autocast(lambda b, x: x @ b, "mxfp8")(params["b"], between)
    np.testing.assert_array_equal(mixed, alone)
    assert not np.array_equal(mixed, halfstep.autocast(model, own)(params, X))


def test_both_gradients_have_the_recipe():
    found = jax.grad(halfstep.autocast(loss, "bf16,scope:first=f8"))(PARAMS, X)
    own, other = (jax.grad(halfstep.autocast(loss, name))(PARAMS, X) for name in ("f8", "bf16"))
    for name in "ab":
        assert not np.array_equal(found[name], other[name])
        assert not np.array_equal(found[name], own[name])


def test_the_first_rule_that_matches_decides():
    first, last = reasons("f8,scope:last=compute,scope:**=mxfp8")
    assert first.startswith("mxfp8:")
    assert last == "rule scope:last=compute"


def test_explain_names_the_rule_and_both_recipes():
    assert reasons(MIXED) == [
        "nvfp4: e2m1, multiplied in bf16 except on Blackwell, per 1x16 x per 16x16",
        "mxfp8: e4m3, multiplied in bf16 except on Blackwell, per 1x32, rule scope:last=mxfp8",
    ]
    report = halfstep.explain(loss, "f8,scope:last=f8-row")(PARAMS, X)
    f8 = report.totals.f8
    assert f8 is not None
    assert (f8.count, f8.total, f8.eligible) == (2, 2, 1)
    assert "100 % of what f8 and f8-row are for" in str(report)
    report.check(f8=1.0)


def test_what_no_rule_gives_a_recipe_is_not_missed():
    report = halfstep.explain(loss, "bf16,scope:last=f8")(PARAMS, X)
    assert report.totals.f8 is not None
    (other,) = report.totals.f8.others
    assert (other.eligible, other.fix) == (False, "")
    assert other.reason == "no rule gives it a recipe, and the policy has none"
    report.check(f8=1.0)


def test_a_refused_product_names_the_rules_recipe():
    def small(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ w)

    report = halfstep.explain(small, "f8,op:dot_general=f8-row")(jnp.ones((64, 10)), X)
    assert report.operations[0].reason == "not f8-row: 10 is not a multiple of 16"
    with pytest.raises(AssertionError, match="10 is not a multiple of 16"):
        report.check(f8=1.0)


def test_formats_are_counted_together():
    f8 = halfstep.explain(loss, MIXED)(PARAMS, X).totals.f8
    assert f8 is not None
    assert (f8.format, f8.recipe) == ("fp4 and fp8", "nvfp4 and mxfp8")


@pytest.mark.slow
def test_state_has_all_products_and_trains():
    scaling = RECIPES["nvfp4"].init(loss, PARAMS, X, policy=MIXED, key=jax.random.key(0))
    assert sorted(scaling.sites) == ["first/dot_general.0", "last/dot_general.0"]
    gradient = jax.jit(halfstep.filter_grad(loss, scaling, policy=MIXED))
    following, finite, grads = gradient(PARAMS, X)
    assert finite
    assert (following.sites["last/dot_general.0"].seen[:, 0] > 0).all()
    exact = jax.grad(loss)(PARAMS, X)
    wholly = halfstep.filter_grad(loss, scaling, policy="nvfp4")(PARAMS, X)[2]

    def error(found: Any) -> float:
        return float(jnp.linalg.norm(found["b"] - exact["b"]) / jnp.linalg.norm(exact["b"]))

    # The activation is still that of a layer in 4 bits; the product is not.
    assert error(grads) < error(wholly)


def test_a_random_rule_needs_a_key():
    policy = "f8,scope:last=nvfp4"
    with pytest.raises(ValueError, match=r"'nvfp4' has state.*RECIPES\['f8'\].*policy=policy"):
        halfstep.autocast(loss, policy)
    with pytest.raises(ValueError, match="'nvfp4' rounds at random: pass key="):
        RECIPES["f8"].init(loss, PARAMS, X, policy=policy)
    keyless = RECIPES["f8"].init(loss, PARAMS, X)
    with pytest.raises(ValueError, match=r"no random key.*'nvfp4'.*RECIPES\['f8'\]\.init"):
        halfstep.filter_grad(loss, keyless, policy=policy)
    scaling = RECIPES["f8"].init(loss, PARAMS, X, policy=policy, key=jax.random.key(0))
    _, finite, _ = halfstep.filter_grad(loss, scaling, policy=policy)(PARAMS, X)
    assert finite


def test_a_rules_recipe_does_not_read_delayed_scales():
    policy = "f8-delayed,scope:last=f8"
    scaling = RECIPES["f8-delayed"].init(loss, PARAMS, X, policy=policy)
    large = {**PARAMS, "b": 1000 * PARAMS["b"]}
    mixed = halfstep.autocast(model, policy, scaling=scaling)(large, X)
    delayed = halfstep.autocast(model, "f8-delayed", scaling=scaling)(large, X)
    exact = model(large, X)
    # Delayed scales are those of the first weights: a thousand times larger ones saturate.
    assert jnp.linalg.norm(mixed - exact) < 0.1 * jnp.linalg.norm(exact)
    assert jnp.linalg.norm(delayed - exact) > 0.5 * jnp.linalg.norm(exact)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f8,scope:last=f8-delayed", r"'scope:last=f8-delayed' gives products delayed scales"),
        ("bf16,scope:last=nvfp4", r"the random recipe 'nvfp4'.*'nvfp4,scope:head=compute'"),
        ("f32,scope:last=f8", r"the recipe 'f8' is for a compute dtype of 16 bits"),
        ("f8,scope:last=f9", r"a recipe such as 'f8' or 'mxfp8', or a function; got 'f9'"),
    ],
)
def test_what_cannot_be(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        Policy.parse(text)


@pytest.mark.parametrize("rule", ["scope:nowhere=mxfp8", "op:tanh=mxfp8"])
def test_a_rule_for_nothing(rule: str):
    with pytest.raises(ValueError, match="is for nothing in this function"):
        halfstep.autocast(loss, f"f8,{rule}")(PARAMS, X)


def test_tangents_stay_linear():
    @jax.custom_jvp
    def scaled(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ w

    @scaled.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (w, x), (dw, dx) = primals, tangents
        return scaled(w, x), x @ dw + dx @ w

    def func(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(scaled(w, x))

    made = jax.grad(halfstep.autocast(func, "bf16,op:dot_general=f8"))(PARAMS["a"], X)
    np.testing.assert_allclose(made, jax.grad(func)(PARAMS["a"], X), rtol=0.1, atol=0.5)


def test_bisect_takes_products_out_of_a_rules_recipe():
    params = {**PARAMS, "b": PARAMS["b"].at[:, :32].mul(2.0**-24)}

    def of_small_columns(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((2.0**24 * model(params, x)[:, :32]) ** 2)

    # One scale for the whole weight makes zeros of its small columns.
    found = halfstep.debug.bisect(
        of_small_columns, [(params, X)], policy="bf16,scope:last=f8", tolerance=0.1
    )
    assert found.error <= 0.1 < found.before
    assert str(found.policy).startswith("p=f32,c=bf16,o=f32,op:dot_general@last=compute")
