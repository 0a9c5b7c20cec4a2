"""Policies: their text, their rules, their errors."""

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import halfstep
from halfstep import Policy, PrecisionRule
from halfstep._base.formats import parse_dtype
from halfstep._policy.policy import as_policy
from halfstep._policy.rules import OUTCOMES, READINGS, Operation, plain_scope

pytestmark = [pytest.mark.core, pytest.mark.types, pytest.mark.wheel]

NAMES = ("bf16", "f16", "f32", "f64")
# Built in the test and not here: the run-time type checker draws random numbers of its own.
policies = st.fixed_dictionaries(
    {
        "param": st.sampled_from(NAMES),
        "compute": st.sampled_from(NAMES),
        "output": st.sampled_from(NAMES),
        "keep": st.lists(
            st.text("abz_*?0/", min_size=1).filter(lambda s: s[0] != "/" and s[-1] != "/"),
            max_size=3,
        ),
        "rules": st.lists(
            st.builds(
                PrecisionRule,
                st.sampled_from([outcome for outcome in OUTCOMES if outcome not in READINGS]),
                op=st.sampled_from(["tanh", "dot_*", "r?v"]),
                scope=st.sampled_from([None, "head", "**/a?b/*"]),
            )
            | st.builds(PrecisionRule, st.sampled_from(OUTCOMES), scope=st.just("head/out"))
            | st.builds(
                PrecisionRule,
                st.sampled_from(OUTCOMES),
                loop=st.sampled_from(["step", "*"]),
                scope=st.sampled_from([None, "head"]),
            ),
            max_size=3,
        ),
        "accumulate": st.sampled_from([None, "f32"]),
    }
)


# The first draw imports what the others have, which takes a busy machine a second.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(policies)
def test_text_round_trips(fields: dict):
    policy = Policy(**fields)
    assert Policy.parse(str(policy)) == policy
    assert hash(Policy.parse(str(policy))) == hash(policy)
    assert eval(repr(policy), {"Policy": Policy}) == policy


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("bf16", "p=f32,c=bf16,o=f32"),
        ("f16", "p=f32,c=f16,o=f32"),
        ("f32", "p=f32,c=f32,o=f32"),
        ("float16", "p=f32,c=f16,o=f32"),
        ("half", "p=f32,c=bf16,o=f32"),
        ("c=f16", "p=f32,c=f16,o=f16"),
        ("p=f16,c=bf16", "p=f16,c=bf16,o=bf16"),
        ("p=bf16", "p=bf16,c=bf16,o=bf16"),
        ("params=float32, compute=bfloat16, output=float32", "p=f32,c=bf16,o=f32"),
        ("o=f32,c=bf16,keep=state,keep=**/var", "p=f32,c=bf16,o=f32,keep=state,keep=**/var"),
        ("bf16:inputs", "p=f32,c=bf16,o=f32:inputs"),
        ("f16,keep=state:inputs", "p=f32,c=f16,o=f32,keep=state:inputs"),
        ("f16,accumulate=f32", "p=f32,c=f16,o=f32,accumulate=f32"),
        (
            "f16, op:tanh=compute, op:dot_*@a/b=accumulate, scope:c=float32",
            "p=f32,c=f16,o=f32,op:tanh=compute,op:dot_*@a/b=accumulate,scope:c=float32",
        ),
        ("c=f32,accumulate=f32", "p=f32,c=f32,o=f32"),
    ],
)
def test_grammar(text: str, full: str):
    assert str(Policy.parse(text)) == full


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf17", r"unknown format 'bf17'.*Did you mean 'bf16'"),
        ("c=bf17", r"unknown format 'bf17'"),
        ("q=f32", r"'q=f32' in the policy 'q=f32' is not known; write parts such as"),
        ("c=f16,c=f32", r"'c=f32' in the policy .* is given twice"),
        ("c=f16,f32", r"'f32' in the policy .* is not known"),
        ("", r"unknown format ''"),
        ("keep=/a,c=f16", r"a path rule is a text such as"),
        ("f9", r"unknown format 'f9'.*Or name a recipe: 'f8'"),
    ],
)
def test_bad_text(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        Policy.parse(text)


def test_bad_objects():
    with pytest.raises(TypeError, match=r"write keep=\('state',\)"):
        Policy(keep="state")
    with pytest.raises(ValueError, match="cannot contain a comma"):
        Policy(keep=("a,b",))
    with pytest.raises(ValueError, match=r"cannot cast to float8_e4m3fn.*need a scale"):
        Policy(compute=jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"cannot cast to int32; required one of 'bf16'"):
        Policy(compute=jnp.int32)
    with pytest.raises(ValueError, match=r"required a dtype or its name, got 3\.5"):
        parse_dtype(3.5)
    with pytest.raises(TypeError, match=r"a policy is a Policy or a text.*got 3"):
        as_policy(3)
    with pytest.raises(TypeError, match=r"no field loss; use one of param, compute, output, keep"):
        Policy().replace(loss="f32")


def test_immutable_hashable_static():
    policy = Policy.parse("bf16")
    with pytest.raises(dataclasses.FrozenInstanceError, match="compute"):
        policy.compute = np.dtype(np.float16)  # pyright: ignore[reportAttributeAccessIssue]
    assert jax.tree.leaves(policy) == []
    assert {policy: 1}[Policy(compute=jnp.bfloat16)] == 1
    assert policy.replace(keep=("state",)).keep == ("state",)
    assert policy.keep == ()
    assert pickle.loads(pickle.dumps(policy)) == policy

    @jax.jit
    def cast(policy, x):
        return policy.cast_to_compute(x)

    assert cast(policy, jnp.ones(2)).dtype == jnp.bfloat16
    assert cast(Policy.parse("f16"), jnp.ones(2)).dtype == jnp.float16


def test_casts():
    policy = Policy(param="f32", compute="f16", output="bf16")
    tree = {"w": jnp.ones(2), "n": jnp.arange(2)}
    assert policy.cast_to_compute(tree)["w"].dtype == jnp.float16
    assert policy.cast_to_output(tree)["w"].dtype == jnp.bfloat16
    assert policy.cast_to_param(policy.cast_to_compute(tree))["w"].dtype == jnp.float32
    assert policy.cast_to_compute(tree)["n"] is tree["n"]


def test_half_precision_context():
    x = jnp.ones(2)
    traces = []

    @jax.jit
    def half(x):
        traces.append(halfstep.half_dtype().name)
        return halfstep.cast_to_half_precision(x)

    assert half(x).dtype == jnp.bfloat16
    with halfstep.half_precision("f16"):
        # The context is part of the cache key: no stale bfloat16 program is reused.
        assert half(x).dtype == jnp.float16
        assert Policy.parse("half").compute == np.float16
        with halfstep.half_precision(jnp.bfloat16):
            assert half(x).dtype == jnp.bfloat16
    assert half(x).dtype == jnp.bfloat16
    assert traces == ["bfloat16", "float16"]
    with (
        pytest.raises(ValueError, match=r"half precision is a 16-bit format; got 'f32'"),
        halfstep.half_precision("f32"),
    ):
        pass
    assert halfstep.cast_to_half_precision(x, "f16").dtype == jnp.float16


def test_format_facts():
    f16, bf16 = halfstep.FORMATS["f16"], halfstep.FORMATS["bf16"]
    assert (f16.bits, f16.mantissa_bits, f16.max, f16.eps) == (16, 10, 65504.0, 2.0**-10)
    assert (f16.tiny, f16.smallest) == (2.0**-14, 2.0**-24)
    assert (bf16.bits, bf16.mantissa_bits, bf16.eps, bf16.tiny) == (16, 7, 2.0**-7, 2.0**-126)
    assert bf16.max == (2 - 2.0**-7) * 2.0**127


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16:inputs,c=f16", "':inputs' ends a policy"),
        ("bf16:inputs,op:tanh=compute", "':inputs' ends a policy"),
        ("bf16,op:tanh=compute:inputs", "has no say over single operations"),
        ("bf16,op:tanh", "a rule is a text such as 'op:tanh=compute'"),
        ("bf16,op:tanh=low", "outcome is one of compute, float32"),
        ("bf16,scope:/a=float32", "a path rule is a text"),
        ("bf16,accumulate=f16", "`accumulate` is float32 or the compute dtype; got"),
        ("bf16,f16", "'f16' in the policy 'bf16,f16' is not known"),
        ("bf16,c=f16", "'c=f16' in the policy 'bf16,c=f16' is given twice"),
    ],
)
def test_rules_that_cannot_be_read(text: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        Policy.parse(text)


def test_a_rule_says_what_it_is_for():
    with pytest.raises(
        ValueError, match=r"got 'float32' alone\. Give op=, scope=, loop= or where="
    ):
        PrecisionRule("float32")
    with pytest.raises(ValueError, match="cannot contain a comma or one of '=@:'"):
        PrecisionRule("float32", op="a=b")


def test_functions_in_rules_are_shown_by_name():
    def large(operation: Operation) -> bool:
        return True

    policy = Policy(rules=(PrecisionRule("float32", where=large),))
    assert str(policy) == "p=f32,c=bf16,o=f32,op:* where large=float32"
    assert repr(policy) == "Policy('p=f32,c=bf16,o=f32,op:* where large=float32')"


@pytest.mark.parametrize(
    ("scope", "plain"),
    [
        ("a/b", "a/b"),
        ("outer/transpose(jvp(loss))", "outer/loss"),
        ("a/vmap(b/c)/d", "a/b/c/d"),
    ],
)
def test_scopes_without_what_transformations_write(scope: str, plain: str):
    assert plain_scope(scope) == plain


FILES = (
    "bf16",
    "f32",
    "f16:inputs",
    "p=bf16,c=bf16,o=f32,keep=state,keep=**/scale",
    "f16,op:exp@a/b=float32,scope:head=float32,op:*=compute,accumulate=f32",
    "f8-delayed,residuals=e4m3",
)


@pytest.mark.parametrize("text", FILES)
def test_files(text, tmp_path):
    policy = Policy.parse(text)
    policy.save(tmp_path / "policy.toml", notes=("two\nlines", 'a "quote" and a \\'))
    written = (tmp_path / "policy.toml").read_text()
    assert written.startswith('# two\n# lines\n# a "quote" and a \\\n')
    assert Policy.load(tmp_path / "policy.toml") == policy


def test_names_in_files(tmp_path):
    policy = Policy(rules=('scope:a "b" \\ c=float32', "op:exp@\u03b1=compute"))
    policy.save(tmp_path / "policy.toml")
    assert Policy.load(tmp_path / "policy.toml") == policy


@pytest.mark.parametrize(
    ("written", "match"),
    [
        ("a." * 20_000 + "b = 1", "line 1 is nested too deep"),
        ("\n\n[" + "a." * 20_000 + "b]", "line 3 is nested too deep"),
        ("a = {" + "b." * 20_000 + "c = 1}", "line 1 is nested too deep"),
        ("keep = " + "[" * 100_000, "line 1 is nested too deep"),
        ("keep = " + "[\n" * 20_000, "policy.toml is not valid TOML: "),
        ("a = " + "{b=" * 20_000, "line 1 is nested too deep"),
        ('compute = "bf16"\n' * 20_000, "a policy at most 262,144"),
        ("compute = f16", "policy.toml is not valid TOML: "),
        ('copmute = "f16"', "says 'copmute', which no policy has; use param, compute"),
        ("compute = 16", 'compute in policy.toml must be written compute = "..."; got 16'),
        ('rules = "op:exp=float32"', r'written rules = \["...", "..."\]; got'),
        ("keep = [1]", r"written keep = .*; got \[1\]"),
        ('compute = "f17"', "policy.toml: .*f17"),
        (
            'rules = ["op:exp"]',
            "policy.toml: `rules` of `Policy` must be a sequence, each a PrecisionRule or a text: "
            "a rule is a text such as",
        ),
        ('recipe = "f9"', "policy.toml: .*f9"),
    ],
    ids=lambda text: text[:24],
)
def test_files_that_are_wrong(written, match, tmp_path):
    (tmp_path / "policy.toml").write_text(written)
    with pytest.raises(ValueError, match=match):
        Policy.load(tmp_path / "policy.toml")


def test_functions_are_not_written(tmp_path):
    policy = Policy(rules=(halfstep.PrecisionRule("float32", where=lambda operation: True),))
    with pytest.raises(ValueError, match="has rules with functions"):
        policy.save(tmp_path / "policy.toml")
