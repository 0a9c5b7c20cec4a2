"""Products in low precision: their numbers, their derivatives, and which products are none."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import halfstep
from halfstep import RECIPES
from halfstep._autocast import settings_of, trace
from halfstep._autocast.plans import decided
from halfstep._policy.policy import as_policy
from tests._jaxprs import equations

BF16 = np.dtype(jnp.bfloat16)
STATELESS = [name for name, recipe in RECIPES.items() if not recipe.needs_state]
E4, E5 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


# One recipe without blocks and one with them; the rest is for before a release.
FEW = [
    pytest.param(name, marks=() if name in ("f8", "mxfp8") else pytest.mark.slow)
    for name in STATELESS
]


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def cosine(first: Any, second: Any) -> float:
    a, b = (np.asarray(x, np.float64).ravel() for x in (first, second))
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


# The numbers, by a formula in NumPy.


def quantized(value: np.ndarray, dtype: Any, axis: int | None) -> np.ndarray:
    """Scaled by a power of two, rounded, and scaled back."""
    limit = float(ml_dtypes.finfo(dtype).max)
    amax = np.max(np.abs(value), axis=axis, keepdims=True)
    scale = 2.0 ** np.floor(np.log2(limit / amax))
    return (value * scale).astype(dtype).astype(np.float64) / scale


@pytest.mark.parametrize("name", ["f8", "f8-e4m3", "f8-row"])
def test_the_formula(name: str):
    x, w = normal(0, 48, 64), normal(1, 64, 32)
    given = jnp.asarray(normal(2, 48, 32), jnp.bfloat16)
    loss = halfstep.autocast(lambda w, x: jnp.sum((x @ w) * given.astype(jnp.float32)), name)
    made = jax.jit(halfstep.autocast(lambda w, x: x @ w, name))(w, x)
    dw, dx = jax.jit(jax.grad(loss, argnums=(0, 1)))(w, x)
    # What enters: activations and cotangents in bfloat16, parameters as they are.
    x64 = np.asarray(x.astype(jnp.bfloat16), np.float64)
    w64, g64 = np.asarray(w, np.float64), np.asarray(given, np.float64)
    by_row = name == "f8-row"
    grad = E5 if name == "f8" else E4

    def of(value: np.ndarray, dtype: Any, axis: int) -> np.ndarray:
        return quantized(value, dtype, axis if by_row else None)

    expected = of(x64, E4, 1) @ of(w64, E4, 0)
    expected_dx = of(g64, grad, 1) @ of(w64, E4, 1).T
    expected_dw = of(x64, E4, 0).T @ of(g64, grad, 0)
    for got, want in ((made, expected), (dx, expected_dx), (dw, expected_dw)):
        # One rounding to bfloat16, and the sum's in float32.
        error = np.abs(np.asarray(got, np.float64) - want)
        bound = 2.0**-8 * np.abs(want) + 64 * 2.0**-23 * np.max(np.abs(want))
        assert (error <= bound).all()


def test_no_accumulator_overflows_in_float16():
    # Both are numbers of e4m3. Their product before it is scaled is 2**18 * 192.
    x, w = 192 * jnp.ones((16, 512)), jnp.ones((512, 16)) / 512
    low = halfstep.autocast(lambda w, x: x @ w, "p=f32,c=f16,o=f32,recipe=f8")
    np.testing.assert_array_equal(jax.jit(low)(w, x), jnp.full((16, 16), 192.0))


# Every contraction, and its gradients.


def experts(w: Any, x: Any) -> Any:
    return jnp.einsum("bed,edf->bef", x, w)


def weight_first(w: Any, x: Any) -> Any:
    return jnp.einsum("fd,btd->tfb", w, x)


def two_sums(w: Any, x: Any) -> Any:
    return jnp.einsum("bthd,dhf->btf", x, w)


def ragged(w: Any, x: Any) -> Any:
    return jax.lax.ragged_dot(x, w, jnp.asarray([10, 0, 22, 16], jnp.int32))


def conv(w: Any, x: Any) -> Any:
    return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME")


CONTRACTIONS = {
    "plain": (lambda w, x: x @ w, (64, 32), (48, 64)),
    "three dimensions": (lambda w, x: x @ w, (64, 32), (4, 12, 64)),
    "experts": (experts, (4, 64, 32), (16, 4, 64)),
    "weight first": (weight_first, (32, 64), (4, 12, 64)),
    "two sums": (two_sums, (16, 4, 32), (3, 16, 4, 16)),
    "ragged": (ragged, (4, 64, 32), (48, 64)),
    "convolution": (conv, (32, 16, 3, 3), (4, 16, 8, 8)),
}


PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
FAST = (*((which, "f8") for which in CONTRACTIONS), ("plain", "mxfp8"), ("ragged", "mxfp8"))


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("which", "name"),
    [
        pytest.param(which, name, marks=() if (which, name) in FAST else pytest.mark.slow)
        for which in CONTRACTIONS
        for name in STATELESS
    ],
)
def test_every_contraction(which: str, name: str):
    func, of_weight, of_input = CONTRACTIONS[which]
    w, x = normal(0, *of_weight), normal(1, *of_input)
    given = normal(2, *jax.eval_shape(func, w, x).shape)

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(func(w, x) * given)

    low = halfstep.autocast(loss, name)
    exact = jax.jit(jax.grad(loss, argnums=(0, 1)))(w, x)
    found = jax.jit(jax.grad(low, argnums=(0, 1)))(w, x)
    for want, got in zip(exact, found, strict=True):
        assert got.dtype == jnp.float32
        # e5m2 errs by 2**-3 of each gradient at most, evenly: a deviation of 2**-3 / sqrt(3).
        assert cosine(want, got) >= 1 - (2.0**-3) ** 2 / 3
    if which == "convolution" and name not in ("f8", "f8-e4m3"):
        return
    assert not all(jnp.array_equal(a, b) for a, b in zip(exact, found, strict=True))


def operand_dtypes(func: Any, *args: Any) -> list[tuple[str, ...]]:
    jaxpr = jax.make_jaxpr(func)(*args)
    return [
        tuple(var.aval.dtype.name for var in eqn.invars[:2])
        for eqn in equations(jaxpr)
        if eqn.primitive.name in PRODUCTS
    ]


@pytest.mark.parametrize("which", ["plain", "experts", "weight first", "two sums", "ragged"])
def test_three_legs_in_eight_bits(which: str):
    func, of_weight, of_input = CONTRACTIONS[which]
    w, x = normal(0, *of_weight), normal(1, *of_input)
    low = halfstep.autocast(lambda w, x: jnp.sum(func(w, x) ** 2), "f8")
    found = operand_dtypes(jax.grad(low, argnums=(0, 1)), w, x)
    e4, e5 = "float8_e4m3fn", "float8_e5m2"
    assert sorted(tuple(sorted(pair)) for pair in found) == [(e4, e4), (e4, e5), (e4, e5)]


def test_a_convolution_has_one_dtype():
    func, of_weight, of_input = CONTRACTIONS["convolution"]
    w, x = normal(0, *of_weight), normal(1, *of_input)
    low = halfstep.autocast(lambda w, x: jnp.sum(func(w, x) ** 2), "f8")
    assert operand_dtypes(jax.grad(low, argnums=(0, 1)), w, x) == [("float8_e4m3fn",) * 2] * 3


@pytest.mark.parametrize(
    ("func", "of_weight", "of_input"),
    [
        (lambda w, x: ragged(x, w), (48, 64), (4, 64, 32)),
        (lambda w, x: conv(x, w), (16, 16, 8, 8), (32, 16, 3, 3)),
    ],
    ids=["ragged", "convolution"],
)
def test_a_parameter_that_is_the_first_factor_stays_in_16_bits(
    func: Any, of_weight: tuple[int, ...], of_input: tuple[int, ...]
):
    """Recipes scale the second factor of these two as a weight, and know no other."""
    w, x = normal(0, *of_weight), normal(1, *of_input)

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(func(w, x) ** 2)

    found = operand_dtypes(jax.grad(halfstep.autocast(loss, "f8"), argnums=(0, 1)), w, x)
    assert found == [("bfloat16",) * 2] * 3
    assert refusals(loss, w, x)[0].startswith("a parameter that is the first factor of")


def mlp(params: Any, x: Any) -> Any:
    return jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)


PARAMS = {"up": normal(0, 64, 128) / 8, "down": normal(1, 128, 64) / 11}
X = normal(2, 48, 64)


def test_residuals_are_in_eight_bits():
    _, pull = jax.vjp(jax.jit(lambda p: halfstep.autocast(mlp, "f8")(p, X)), PARAMS)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= 48 * 64]
    # Both inputs and the second weight (no gradient goes back through the first one); and what the
    # activation and the loss are recomputed from.
    assert sorted(leaf.dtype.name for leaf in kept) == ["bfloat16"] * 2 + ["float8_e4m3fn"] * 3


# Derivatives.


@pytest.mark.parametrize("name", FEW)
def test_forward_derivatives_are_in_the_compute_dtype(name: str):
    low = halfstep.autocast(mlp, name)

    def pushed(func: Any) -> Any:
        return lambda p: jax.jvp(lambda p: func(p, X), (p,), (p,))[1]

    # Along the parameters themselves, where nothing cancels: the relative error of e4m3.
    assert abs(jax.jit(pushed(low))(PARAMS) / jax.jit(pushed(mlp))(PARAMS) - 1) < 2.0**-4
    text = jax.jit(pushed(low)).lower(PARAMS).as_text()
    assert re.search(r"dot_general .*: \(tensor<[^>]*xbf16>, tensor<[^>]*xbf16>\)", text)


def test_second_derivatives_are_refused():
    low = halfstep.autocast(mlp, "f8")
    with pytest.raises(TypeError, match=r"no second derivatives, and one with a saved factor of"):
        jax.jit(lambda p: jax.jvp(jax.grad(lambda p: low(p, X)), (p,), (p,)))(PARAMS)


def test_mapped_gradients_are_those_of_each():
    low = halfstep.autocast(mlp, "f8")
    xs = normal(5, 3, 48, 64)
    mapped = jax.jit(jax.vmap(jax.grad(low), in_axes=(None, 0)))(PARAMS, xs)
    single = jax.jit(jax.grad(low))
    for number in range(3):
        one = single(PARAMS, xs[number])
        # Each example has its own scale; the rest is one sum in another order.
        for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(one), strict=True):
            most = 2.0**-7 * float(jnp.max(jnp.abs(b)))
            np.testing.assert_allclose(a[number], b, rtol=2.0**-7, atol=most)
    both = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    twice = jax.jit(jax.vmap(jax.vmap(jax.grad(low), (None, 0)), (0, None)))(both, xs)
    assert twice["up"].shape == (2, 3, 64, 128)
    np.testing.assert_array_equal(twice["up"][0], mapped["up"])


# What is not finite is seen.


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
def test_what_is_not_finite_is_not_hidden(name: str, value: float):
    bad = X.at[3, 5].set(value)
    gradient = halfstep.filter_grad(mlp, policy=name, check_finite=True)
    _, finite, _ = jax.jit(gradient)(PARAMS, bad)
    assert not finite


# Which products are none.


def refusals(loss: Any, params: Any, *args: Any, policy: Any = "f8") -> list[str]:
    settings = settings_of(as_policy(policy))
    call = trace(loss, settings, (params, *args), {}, params=[0], keep=())
    return [
        plan.decisions[index].refusal or "in low precision"
        for plan, index in decided(call.plan)
        if plan.graph.nodes[index].name in PRODUCTS
    ]


def test_which_products_are_none():
    w = normal(0, 32, 48)
    assert refusals(lambda w, x: x @ w, w, normal(1, 16, 32)) == ["in low precision"]
    assert refusals(lambda w, x: x @ x.T, w, normal(1, 16, 32))[0].startswith(
        "a product of two activations"
    )
    assert refusals(lambda w, x: x @ w[:, :10], w, normal(1, 16, 32)) == [
        "10 is not a multiple of 16"
    ]
    assert refusals(lambda w, x: x @ w[:, 0], w, normal(1, 16, 32)) == ["a product with a vector"]
    assert refusals(lambda w, x: w.T @ w * x, w, 2.0) == ["a product of two parameters"]
    assert refusals(lambda w, x: x @ w, w, normal(1, 16, 32), policy="f8,op:dot*=compute") == [
        "the rule 'op:dot*=compute'"
    ]
    low = halfstep.autocast(lambda w, x: x @ w, "f8,op:dot*=accumulate")
    assert refusals(lambda w, x: x @ w, w, normal(1, 16, 32), policy="f8,op:dot*=accumulate") == [
        "in low precision"
    ]
    made = jax.jit(low)(w, normal(1, 16, 32))
    assert (made != made.astype(jnp.bfloat16).astype(jnp.float32)).any()
    kernel, image = normal(0, 16, 16, 3, 3), normal(1, 1, 16, 8, 8)
    assert refusals(conv, kernel, image, policy="mxfp8") == [
        "a convolution has one scale for each tensor"
    ]
    every = dataclasses.replace(RECIPES["f8"], name="every", activations=True)
    policy = halfstep.Policy(recipe=every)
    assert refusals(lambda w, x: x @ x.T, w, normal(1, 16, 32), policy=policy) == [
        "in low precision"
    ]


def test_a_stored_parameter_is_one():
    w, x = normal(0, 32, 48).astype(jnp.bfloat16), normal(1, 16, 32)
    assert refusals(lambda w, x: x @ w, w, x) == ["in low precision"]
    assert refusals(lambda w, x: x @ w.T.reshape(48, 32).T, w, x) == ["in low precision"]

    def scanned(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    stacked = normal(0, 3, 32, 32).astype(jnp.bfloat16)
    assert refusals(scanned, stacked, x) == ["in low precision"]


def test_where_state_does_not_reach():
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))
    w, x = normal(0, 32, 32) / 8, normal(1, 16, 32)

    def mapped(w: Any, x: Any) -> Any:
        run = jax.shard_map(
            lambda w, x: jnp.tanh(x @ w), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
        )
        return jnp.sum(run(w, x))

    def looped(w: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, jnp.asarray(3), lambda _, x: jnp.tanh(x @ w), x)

    for loss in (mapped, looped):
        assert refusals(loss, w, x) == ["in low precision"]
        assert refusals(loss, w, x, policy="nvfp4")[0].startswith("its random key does not reach")
    both = (mapped, halfstep.autocast(mapped, "f8"))
    exact, found = (jax.jit(jax.grad(f))(w, x) for f in both)
    assert cosine(exact, found) > 0.99
    made = jax.jit(halfstep.autocast(looped, "f8"))(w, x)
    assert cosine(made, looped(w, x)) > 0.99
