"""Every operation is listed as it runs: dtypes, lines, scopes, how often, and why."""

import collections
import inspect
from types import MappingProxyType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import halfstep
from halfstep._program.control_flow import equations
from tests.autocast._shared import stored_as
from tests.explain._functions import F32, W, X, shape

SMALL = shape(8, 8)


def entries(func: Any, *args: Any, policy: Any = "bf16", **options: Any) -> Any:
    return halfstep.explain(func, policy, **options)(*args).operations


def scanned(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])


def branched(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: (x @ w) @ w))


def looped(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.fori_loop(0, jnp.int32(3), lambda _, x: jnp.tanh(x @ w), x))


def rematted(w: Any, x: Any) -> Any:
    return jnp.sum(jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)(x))


def convolved(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.conv(x, w, (1, 1), "SAME"))


def attention(w: Any, x: Any) -> Any:
    return jnp.sum(jax.nn.softmax(x @ w) @ w)


CASES = [
    (attention, (SMALL, SMALL)),
    (scanned, (shape(3, 8, 8), SMALL)),
    (branched, (SMALL, SMALL)),
    (looped, (SMALL, SMALL)),
    (rematted, (SMALL, SMALL)),
    (convolved, (shape(4, 3, 3, 3), shape(2, 3, 8, 8))),
]
# Operations that run as one of halfstep's own.
OWN = MappingProxyType({"halfstep_difference": "sub"})


@pytest.mark.rows(10)
@pytest.mark.parametrize("policy", ["bf16", "f16"])
@pytest.mark.parametrize("islands", [True, False])
@pytest.mark.parametrize(("func", "args"), CASES, ids=lambda v: getattr(v, "__name__", ""))
def test_the_dtypes_are_those_of_the_program(func: Any, args: Any, policy: str, islands: bool):
    """What is listed is what `autocast` makes, operation by operation, but for its casts."""

    def types(avals: Any) -> tuple[str, ...]:
        return tuple(f"{aval.dtype}{list(aval.shape)}" for aval in avals)

    program = jax.make_jaxpr(halfstep.autocast(func, stored_as(policy, islands)))(*args)
    # Calls and loops; what autocast adds by itself, with the names of what is stored; the clamp of
    # a switch's index.
    calls = {"scan", "while", "cond", "checkpoint", "remat", "remat2", "jit", "pjit"}
    casts = {"convert_element_type", "halfstep_settle"}
    left_out = {*calls, *casts, "custom_jvp_call", "broadcast_in_dim", "clamp"}
    made = collections.Counter(
        (
            OWN.get(equation.primitive.name, equation.primitive.name),
            types(var.aval for var in equation.outvars),
        )
        for equation in equations(program.jaxpr)
        if equation.primitive.name not in left_out
        and not str(equation.params.get("name", "")).startswith("halfstep/")
    )
    names = {f.name: f.dtype.name for f in halfstep.FORMATS.values()}
    listed = collections.Counter(
        (
            entry.name,
            tuple(f"{names.get(v.dtype, v.dtype)}{list(v.shape)}" for v in entry.outs),
        )
        for entry in entries(func, *args, policy=stored_as(policy, islands))
        if entry.name not in left_out
    )
    assert listed == made


def test_operations_in_a_scan_run_as_often_as_it_turns():
    (dot,) = [e for e in entries(scanned, shape(3, 8, 8), SMALL) if e.is_contraction]
    assert (dot.count, dot.within, dot.flops) == (3, ("scan x3",), 2 * 8**3)


def test_a_while_loop_counts_once_and_says_so():
    report = halfstep.explain(looped)(SMALL, SMALL)
    (dot,) = [e for e in report.operations if e.is_contraction]
    assert (dot.count, dot.within) == (1, ("while",))
    assert "a while loop is counted as one iteration" in report.notes


def test_all_branches_count_and_it_is_said():
    report = halfstep.explain(branched)(SMALL, SMALL)
    dots = [e for e in report.operations if e.is_contraction]
    assert [e.within for e in dots] == [("branch 0",)] * 2 + [("branch 1",)]
    assert "all branches of a cond are counted" in report.notes


def line_of(func: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(func)
    return first + next(number for number, line in enumerate(lines) if text in line)


class Layer(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __call__(self, x: Any) -> Any:
        x = jax.vmap(self.linear)(x)
        x = jax.vmap(self.norm)(x)
        return jax.nn.relu(x)


def test_the_line_is_the_one_that_the_user_wrote():
    layer = Layer(eqx.nn.Linear(8, 8, key=jax.random.key(0)), eqx.nn.LayerNorm(8))
    found = entries(lambda layer, x: jnp.sum(layer(x)), layer, SMALL)
    by_name = {entry.name: entry.source for entry in found}
    assert {source.file for source in by_name.values()} == {"tests/explain/test_entries.py"}
    assert by_name["dot_general"].line == line_of(Layer, "self.linear)(x)")
    assert by_name["rsqrt"].line == line_of(Layer, "self.norm)(x)")
    assert by_name["dot_general"].function == "Layer.__call__"
    relu = [entry for entry in found if "custom_jvp_call" in entry.within]
    assert {entry.source.line for entry in relu} == {line_of(Layer, "relu(x)")}


def two_lines(x: Any) -> Any:
    first = jnp.where(x > 0, x, 1.0)
    second = jnp.where(x > 0, x, 1.0)
    return jnp.sum(first + second)


def test_functions_that_jax_has_traced_before_have_the_line_of_this_call():
    # `jnp.where` is jitted: the second call, and that of another trace, find the first in a cache.
    for _ in range(2):
        lines = [e.source.line for e in entries(two_lines, SMALL) if e.name == "select_n"]
        assert lines == [line_of(two_lines, "first ="), line_of(two_lines, "second =")]


def test_scopes():
    def func(w: Any, x: Any) -> Any:
        with jax.named_scope("encoder"), jax.named_scope("head"):
            return jnp.sum(x @ w)

    assert {e.scope for e in entries(func, W, X) if e.is_contraction} == {"encoder/head"}


def test_reasons():
    def func(w: Any, x: Any, y: Any) -> Any:
        hidden = x @ w
        return jnp.exp(hidden * 2) + (hidden - y) + 3

    reasons = {entry.name: entry.reason for entry in entries(func, SMALL, SMALL, SMALL)}
    assert reasons["dot_general"].startswith("contractions")
    assert reasons["exp"] == "powers, exponentials, logarithms and roots"
    assert reasons["mul"] == "its operands are bf16"
    assert reasons["sub"] == "as argument `y`"
    assert reasons["add"].startswith("as `")


def test_islands_are_numbered():
    found = entries(attention, SMALL, SMALL)
    assert {e.island for e in found if e.name in ("exp", "div")} == {1}
    assert {e.island for e in found if e.is_contraction} == {None}
    without = entries(attention, SMALL, SMALL, policy="bf16,store:op:*=keep")
    assert {e.island for e in without} == {None}


def test_types_have_bytes():
    (dot,) = [e for e in entries(lambda w, x: x @ w, W, X) if e.is_contraction]
    assert [str(value) for value in (*dot.ins, *dot.outs)] == [
        "bf16[2048,1024]",
        "bf16[1024,1024]",
        "bf16[2048,1024]",
    ]
    assert dot.bytes_in == 2 * (2048 * 1024 + 1024 * 1024)
    assert dot.bytes_out == 2 * 2048 * 1024


def test_keys_and_integers_are_listed():
    def func(w: Any, x: Any, key: Any) -> Any:
        return jnp.sum(x @ w * jax.random.bernoulli(key, 0.5, x.shape).astype(F32))

    found = entries(func, SMALL, SMALL, jax.eval_shape(lambda: jax.random.key(0)))
    assert any("key" in value.dtype for entry in found for value in entry.ins)


def test_a_policy_of_float32_changes_nothing():
    report = halfstep.explain(attention, "f32")(W, X)
    report.check(low=1.0, max_findings=0)
    assert report.totals.casts == 0
    assert report.totals.contraction_flops.keys() == {"f32"}
