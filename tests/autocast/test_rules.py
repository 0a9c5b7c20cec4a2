"""Rules of the user's: for operations, scopes and paths, by predicate and by function."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import Policy, PrecisionRule, autocast, keep_precision
from tests._jaxprs import contractions, equations
from tests.autocast._shared import W, X, compute, every_format

pytestmark = [pytest.mark.core, pytest.mark.types]

TENTH = jnp.full((4, 4), 0.1)  # No 16-bit format holds it.


def two_layers(params: Any, x: Any) -> Any:
    with jax.named_scope("body"):
        x = jnp.tanh(x @ params["body"])
    with jax.named_scope("head"):
        return x @ params["head"]


PARAMS = {"body": TENTH, "head": TENTH}


def dtypes_of(name: str, func: Any, *args: Any) -> list[str]:
    return [
        str(equation.invars[0].aval.dtype)
        for equation in equations(jax.make_jaxpr(func)(*args))
        if equation.primitive.name == name
    ]


def policy_of(text: str, *rules: PrecisionRule | str, **fields: Any) -> Policy:
    return Policy(compute=text, rules=rules, **fields)


# Where a rule applies.


@every_format
def test_a_scope(policy: str):
    func = autocast(two_layers, policy_of(policy, "scope:head=float32"))
    low = str(compute(policy))
    assert contractions(func, PARAMS, X) == [low, "float32"]
    assert contractions(jax.grad(lambda p, x: jnp.sum(func(p, x))), PARAMS, X) == [
        *[low, "float32"],
        *["float32", "float32"],
        low,
    ]


def test_an_operation():
    func = autocast(two_layers, policy_of("bf16", "op:tanh=compute", "op:dot_*@head=as_traced"))
    assert dtypes_of("tanh", func, PARAMS, X) == ["bfloat16"]
    assert contractions(func, PARAMS, X) == ["bfloat16", "float32"]
    assert dtypes_of("tanh", autocast(two_layers), PARAMS, X) == ["float32"]


def test_the_first_rule_that_matches():
    rules = ("op:dot_general@head=compute", "op:dot_general=float32")
    assert contractions(autocast(two_layers, policy_of("bf16", *rules)), PARAMS, X) == [
        "float32",
        "bfloat16",
    ]


def test_a_predicate():
    seen = []

    def wide(operation: halfstep.Operation) -> bool:
        seen.append(operation)
        return operation.primitive == "dot_general" and operation.ins[1].shape[0] > 4

    def func(w: Any, x: Any) -> Any:
        return (x @ w) @ jnp.ones((6, 2))

    rule = PrecisionRule("float32", where=wide)
    w = jnp.ones((4, 6))
    assert contractions(autocast(func, policy_of("bf16", rule)), w, X) == ["bfloat16", "float32"]
    first = next(operation for operation in seen if operation.primitive == "dot_general")
    assert first.outs == (jax.ShapeDtypeStruct((4, 6), jnp.float32),)
    assert first.params["dimension_numbers"] == (((1,), (0,)), ((), ()))


@pytest.mark.parametrize("rule", ["scope:outer/inner=float32", "scope:**/inner=float32"])
def test_scopes_reach_into_loops_and_calls(rule: str):
    def layer(h: Any, w: Any) -> Any:
        with jax.named_scope("inner"):
            return jnp.tanh(h @ w), None

    def func(w: Any, x: Any) -> Any:
        layers = jnp.stack([w, w])
        with jax.named_scope("outer"):
            x, _ = jax.lax.scan(layer, x, layers)
            x = jax.checkpoint(lambda x: layer(x, w)[0])(x)
            x = jax.lax.cond(x[0, 0] > 0, lambda x: layer(x, w)[0], lambda x: x, x)
            x = jax.jit(lambda x: layer(x, w)[0])(x)
            x = jax.vmap(lambda row: layer(row, w)[0])(x)
        return x @ w

    assert contractions(autocast(func, policy_of("bf16", rule)), W, X) == [
        *["float32"] * 5,
        "bfloat16",
    ]


def test_a_rule_for_a_loop():
    def func(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=2)[0] @ w

    func = autocast(func, policy_of("bf16", "op:scan=float32"))
    assert contractions(func, W, X) == ["float32", "bfloat16"]
    # Of an identity nothing is rounded but what enters the last product.
    got = jax.grad(lambda w: jnp.sum(func(w, X)))(W)
    exact = jax.grad(lambda w: jnp.sum(X @ w @ w @ w))(W)
    np.testing.assert_allclose(got, exact, atol=4 * 4 * halfstep.FORMATS["bf16"].eps)


def test_a_rule_for_a_function_with_its_own_derivative():
    @jax.custom_vjp
    def layer(w: Any, x: Any) -> Any:
        return x @ w

    layer.defvjp(lambda w, x: (x @ w, (w, x)), lambda res, ct: (res[1].T @ ct, ct @ res[0].T))

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(layer(w, x))

    plain = contractions(jax.grad(autocast(loss)), W, X)
    kept = contractions(jax.grad(autocast(loss, "bf16,op:custom_vjp_call=as_traced")), W, X)
    assert set(plain) == {"bfloat16"}
    assert set(kept) == {"float32"}


# What a rule does.


@every_format
def test_accumulate(policy: str):
    def func(w: Any, x: Any) -> Any:
        return (x @ w) * 3

    made = autocast(func, policy_of(policy, "op:dot_general=accumulate"))
    (dot,) = [e for e in equations(jax.make_jaxpr(made)(TENTH, TENTH)) if "dot" in str(e.primitive)]
    assert [str(v.aval.dtype) for v in (*dot.invars, *dot.outvars)] == [
        *[str(compute(policy))] * 2,
        "float32",
    ]
    # The gradients are products in the compute dtype all the same.
    gradient = jax.grad(lambda w, x: jnp.sum(made(w, x)), argnums=(0, 1))
    assert set(contractions(gradient, TENTH, TENTH)) == {str(compute(policy))}
    low = np.asarray(TENTH.astype(compute(policy)), np.float64)
    exact = low @ low * 3
    # Four additions and two roundings in float32.
    np.testing.assert_allclose(made(TENTH, TENTH), exact, rtol=6 * halfstep.FORMATS["f32"].eps)


def test_a_dot_beyond_the_range():
    def func(w: Any, x: Any) -> Any:
        return (x @ w)[0, 0] / 1024

    x, w = jnp.ones((1, 80)), jnp.full((80, 1), 1024.0)
    assert not jnp.isfinite(autocast(func, "f16")(w, x))
    for policy in ("f16,accumulate=f32", "f16,op:dot_general=accumulate"):
        assert autocast(func, policy)(w, x) == 80
        gradient = jax.grad(autocast(func, policy), argnums=(0, 1))(w, x)
        np.testing.assert_array_equal(gradient[0], np.full((80, 1), 1 / 1024))
        np.testing.assert_array_equal(gradient[1], np.ones((1, 80)))


def as_float16(dtype: Any, original: Sequence[Any], *operands: Any, **params: Any) -> Any:
    """A precision function of the kind that jaxamp takes."""
    assert [str(d) for d in original] == ["float32", "float32"]
    operands = tuple(jax.lax.convert_element_type(x, jnp.float16) for x in operands)
    return operands, {**params, "preferred_element_type": jnp.float32}


def test_a_function():
    rule = PrecisionRule(as_float16, op="dot_general", scope="head")
    func = autocast(two_layers, policy_of("bf16", rule))
    assert contractions(func, PARAMS, X) == ["bfloat16", "float16"]
    assert func(PARAMS, X).dtype == jnp.float32
    x = jnp.abs(X)
    gradients = jax.grad(lambda p, x: jnp.sum(func(p, x)))(PARAMS, x)
    exact = jax.grad(lambda p, x: jnp.sum(two_layers(p, x)))(PARAMS, x)
    for ours, right in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
        # Five roundings on the way to any of them, and as many backward.
        error = np.linalg.norm(ours - right) / np.linalg.norm(right)
        assert error <= 10 * halfstep.FORMATS["bf16"].eps / 2


def test_compute_is_the_users_word():
    """Against the table: a sum in 16 bits, if somebody wants it."""
    func = autocast(lambda w, x: jnp.sum(x @ w), "bf16,op:reduce_sum=compute")
    assert dtypes_of("reduce_sum", func, W, X) == ["bfloat16"]


# Parts that are kept.


@every_format
@pytest.mark.parametrize("how", ["with", "function", "module", "force_full_precision"])
def test_keep_precision(policy: str, how: str):
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))

    def func(linear: Any, x: Any) -> Any:
        x = jax.vmap(linear)(x)
        if how == "with":
            with keep_precision():
                return jax.vmap(linear)(x)
        if how == "function":
            return keep_precision(lambda x: jax.vmap(linear)(x))(x)
        if how == "module":
            return jax.vmap(keep_precision(linear))(x)
        return jax.vmap(halfstep.force_full_precision(linear))(x)

    assert contractions(autocast(func, policy), linear, X) == [str(compute(policy)), "float32"]


def test_a_kept_module_is_a_pytree():
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    kept = keep_precision(linear)
    pairs = zip(jax.tree.leaves(kept), jax.tree.leaves(linear), strict=True)
    assert all(ours is theirs for ours, theirs in pairs)
    np.testing.assert_array_equal(kept(jnp.ones(4)), linear(jnp.ones(4)))


@every_format
def test_paths(policy: str):
    func = autocast(two_layers, Policy(compute=policy, keep=("params/head",)))
    assert contractions(func, PARAMS, X) == [str(compute(policy)), "float32"]
    # An argument that is no parameter, and what is made of it alone.
    func = autocast(lambda w, x: (2 * x + 1).T @ w, Policy(compute=policy, keep=("x",)))
    assert contractions(func, W, X) == ["float32"]


# Mistakes.


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("scope:heat=float32", "is for nothing in this function.*scopes: 'head'"),
        ("scope:decoder/head=float32", "scopes: 'head'"),
        ("op:tan=compute", "operations: 'tanh'"),
        ("op:tanh@head=compute", "scopes: 'head'"),
        ("op:dot_general@hed=accumulate", "scopes: 'head'"),
    ],
)
def test_a_rule_for_nothing(rule: str, message: str):
    with pytest.raises(ValueError, match=message):
        autocast(two_layers, policy_of("bf16", rule))(PARAMS, X)


def test_a_path_for_nothing():
    with pytest.raises(ValueError, match=r"'params/heat' in `keep` selects nothing.*'params/head'"):
        autocast(two_layers, Policy(compute="bf16", keep=("params/heat",)))(PARAMS, X)


def test_a_loop_cannot_run_in_the_compute_dtype():
    def func(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=2)[0]

    for rule in ("op:scan=compute", PrecisionRule(as_float16, op="scan")):
        with pytest.raises(ValueError, match="`scan`, which is a call or a loop"):
            autocast(func, policy_of("bf16", rule))(W, X)


def test_a_policy_for_inputs_only():
    with pytest.raises(ValueError, match="casts arguments and nothing else"):
        autocast(two_layers, "bf16:inputs")


@pytest.mark.parametrize("dtype", ["bf16", "f64"])
def test_reduce_dtype_is_one_of_two(dtype: str):
    with pytest.raises(ValueError, match="float32 or the compute dtype, f16"):
        autocast(two_layers, "f16", reduce_dtype=dtype)
