"""What autocast leaves as it was written: effects, randomness, dtypes, names, and other leaves."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from halfstep._autocast.transform import autocast
from tests._jaxprs import equations
from tests.autocast._shared import (
    W,
    X,
    compute,
    every_format,
    half_eps,
    stored_as,
    with_and_without_islands,
)

pytestmark = [pytest.mark.core, pytest.mark.types]


def named(name: str, func: Callable, *args: Any) -> list[Any]:
    jaxpr = jax.make_jaxpr(func)(*args)
    return [equation for equation in equations(jaxpr) if equation.primitive.name == name]


def dots(func: Callable, *args: Any) -> list[list[str]]:
    """The dtypes of every dot's operands and of its result."""
    return [
        [str(v.aval.dtype) for v in (*equation.invars, *equation.outvars)]
        for equation in named("dot_general", func, *args)
    ]


# Effects and randomness.


@with_and_without_islands
def test_a_debug_print_happens_once(islands: bool, capfd: pytest.CaptureFixture[str]):
    def loss(w: Any, x: Any) -> Any:
        h = jnp.exp(x @ w)
        jax.debug.print("the sum is {}", jnp.sum(h) > 0)
        return jnp.sum(jnp.exp(-h))

    jax.jit(jax.grad(autocast(loss, stored_as("bf16", islands))))(W, X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("the sum is True") == 1


@with_and_without_islands
def test_callbacks_run_once_in_order(islands: bool):
    seen: list[Any] = []

    def loss(w: Any, x: Any) -> Any:
        def turn(h: Any, i: Any) -> Any:
            h = jnp.tanh(h @ w)
            jax.debug.callback(lambda i, h: seen.append((int(i), h.dtype)), i, h, ordered=True)
            return h, jnp.exp(h)

        return jnp.sum(jax.lax.scan(turn, x, jnp.arange(3))[1])

    jax.jit(jax.grad(autocast(loss, stored_as("bf16", islands))))(W, X)
    jax.effects_barrier()
    # The callback gets the dtype that it was written for.
    assert seen == [(i, np.dtype(np.float32)) for i in range(3)]


@with_and_without_islands
def test_a_callback_with_a_result_runs_once(islands: bool):
    calls: list[Any] = []

    def host(x: Any) -> np.ndarray:
        calls.append(x.dtype)
        return np.asarray(x)

    def loss(w: Any, x: Any) -> Any:
        h = jnp.exp(x @ w)
        shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        seen = jax.experimental.io_callback(host, shape, jax.lax.stop_gradient(h))
        return jnp.sum(jnp.exp(-h) * jnp.exp(seen) + seen)

    jax.jit(jax.grad(autocast(loss, stored_as("bf16", islands))))(W, X)
    jax.effects_barrier()
    assert calls == [np.dtype(np.float32)]


def test_a_pure_callback_gets_what_it_was_written_for():
    def host(x: np.ndarray) -> np.ndarray:
        assert x.dtype == np.float32
        return np.asarray(x) * 2

    def func(w: Any, x: Any) -> Any:
        shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        return jax.pure_callback(host, shape, x @ w) @ w

    np.testing.assert_array_equal(
        jax.jit(autocast(func))(W, jnp.ones((4, 4))), 2 * jnp.ones((4, 4))
    )


@pytest.mark.rows(1)
@every_format
def test_random_draws_are_the_same_with_and_without(policy: str):
    def draws(w: Any, key: Any) -> Any:
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (4, 4))
        return (
            x,
            jax.random.bernoulli(keys[1], 0.5, (64,)),
            jax.random.uniform(keys[2], (4,)),
            x @ w,
        )

    key = jax.random.key(3)
    exact = draws(W, key)
    for islands in (True, False):
        ours = autocast(draws, stored_as(policy, islands))(W, key)
        np.testing.assert_array_equal(ours[0], exact[0])
        np.testing.assert_array_equal(ours[1], exact[1])
        np.testing.assert_array_equal(ours[2], exact[2])


@every_format
@with_and_without_islands
@pytest.mark.parametrize("legacy", [False, True])
def test_dropout_drops_the_same_forward_and_backward(policy: str, islands: bool, legacy: bool):
    def loss(w: Any, x: Any, key: Any) -> Any:
        h = x @ w
        alive = jax.random.bernoulli(key, 0.5, h.shape)
        dropped = jnp.where(alive, jnp.exp(h) / 0.5, 0)
        return jnp.sum(dropped), dropped

    key = jax.random.PRNGKey(5) if legacy else jax.random.key(5)
    func = autocast(loss, stored_as(policy, islands))
    x = jnp.zeros((16, 4))
    gradient, dropped = jax.grad(func, argnums=1, has_aux=True)(W, x, key)
    assert {0.0, 2.0} == set(np.unique(dropped))
    np.testing.assert_array_equal(gradient, dropped)
    np.testing.assert_array_equal(dropped, loss(W, x, key)[1])


# Names.


def test_named_scopes_survive():
    def func(w: Any, x: Any) -> Any:
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jax.jit(lambda x: jnp.tanh(x @ w))(x)

    (equation,) = named("dot_general", autocast(func), W, X)
    assert str(equation.source_info.name_stack).startswith("outer/inner")
    assert "outer/inner" in jax.jit(autocast(func)).lower(W, X).as_text(debug_info=True)


def test_the_name_and_the_docstring_are_kept():
    def loss(w: Any) -> Any:
        """What it says."""
        return w

    assert autocast(loss).__name__ == "loss"
    assert autocast(loss).__doc__ == "What it says."


# Precision that the user asked for.


@every_format
def test_conversions_by_the_user_are_respected(policy: str):
    def func(w: Any, x: Any) -> Any:
        low = x.astype(jnp.bfloat16)
        back = (x @ w).astype(jnp.bfloat16).astype(jnp.float32)
        return low, low * 2, back, jnp.arange(4000).astype(jnp.float32) + (x @ w)[0, 0]

    low, doubled, back, numbers = autocast(func, policy)(W, X)
    assert low.dtype == doubled.dtype == jnp.bfloat16
    np.testing.assert_array_equal(low, X.astype(jnp.bfloat16))
    np.testing.assert_array_equal(doubled, 2 * X.astype(jnp.bfloat16))
    in_compute = X.astype(compute(policy)).astype(jnp.float32)
    np.testing.assert_array_equal(back, in_compute.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(numbers, np.arange(4000.0) - 1)  # Neither format holds them all.


def test_dots_of_16_bit_operands_are_left_alone():
    def func(w: Any, x: Any) -> Any:
        return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    assert dots(autocast(func, "f16"), W, X) == [["bfloat16"] * 3]


@every_format
@pytest.mark.parametrize(
    "precision", ["highest", jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGH]
)
def test_a_dot_whose_precision_is_given_stays_in_float32(policy: str, precision: Any):
    def func(w: Any, x: Any) -> Any:
        return jnp.dot(x @ w, w, precision=precision)

    low = str(compute(policy))
    assert dots(autocast(func, policy), W, X) == [[low] * 3, ["float32"] * 3]
    gradient = jax.grad(lambda *args: jnp.sum(autocast(func, policy)(*args)))
    assert [d[:2] for d in dots(gradient, W, X)].count(["float32"] * 2) == 3


def test_default_precision_is_not_asking():
    def func(w: Any, x: Any) -> Any:
        return jnp.dot(x, w, precision=jax.lax.Precision.DEFAULT)

    assert dots(autocast(func), W, X) == [["bfloat16"] * 3]


@every_format
def test_a_preferred_type_other_than_float32_is_kept(policy: str):
    def func(w: Any, x: Any) -> Any:
        x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return jax.lax.dot(x, w, preferred_element_type=jnp.float32)

    assert dots(autocast(func, policy), W, X) == [["bfloat16", "bfloat16", "float32"]]


def test_integer_dots_are_left_alone():
    def func(w: Any, x: Any, i: Any) -> Any:
        return x @ w, i @ i

    low, whole = dots(autocast(func), W, X, jnp.ones((4, 4), jnp.int32))
    assert (low, whole) == (["bfloat16"] * 3, ["int32"] * 3)


@every_format
def test_a_function_applied_by_a_scatter(policy: str):
    def func(w: Any, x: Any) -> Any:
        return (x @ w).at[jnp.array([0, 1])].apply(jnp.exp)

    # x as it enters, and the result.
    ours = jax.jit(autocast(func, policy))(W, X)
    np.testing.assert_allclose(ours, func(W, X), rtol=2 * half_eps(policy))


# Other values.


@every_format
def test_complex_numbers_are_left_alone(policy: str):
    def func(w: Any, x: Any, z: Any) -> Any:
        spectrum = jnp.fft.fft(x @ w)
        return z @ z + spectrum * (1 + 1j), jnp.abs(spectrum), jax.lax.complex(x, x)

    z = jnp.full((4, 4), 1 + 2j)
    args = W, jnp.ones((4, 4)), z
    ours, exact = autocast(func, policy)(*args), func(*args)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@every_format
def test_float64_is_left_alone(policy: str):
    def func(w: Any, x: Any, wide: Any) -> Any:
        return x @ w, wide @ wide, jnp.exp(wide), wide.astype(jnp.float32) @ w

    with jax.enable_x64(True):
        args = jnp.eye(4, dtype=jnp.float32), jnp.ones((4, 4), jnp.float32), jnp.full((4, 4), 1 / 3)
        assert args[2].dtype == jnp.float64
        low = [str(compute(policy))] * 3
        assert dots(autocast(func, policy), *args) == [low, ["float64"] * 3, low]
        ours, exact = autocast(func, policy)(*args), func(*args)
        assert [x.dtype for x in ours] == [x.dtype for x in exact]
        np.testing.assert_array_equal(ours[1], exact[1])
        np.testing.assert_array_equal(ours[2], exact[2])
        gradient = jax.grad(lambda *a: jnp.sum(autocast(func, policy)(*a)[3]))
        assert gradient(*args).dtype == jnp.float32
        assert gradient(*args)[0, 0] == args[2].astype(compute(policy))[:, 0].sum(dtype=jnp.float32)


@every_format
def test_numpy_float64_without_x64(policy: str):
    def func(w: Any, x: Any) -> Any:
        return x @ w

    ours = autocast(func, policy)(np.eye(4), np.ones((4, 4)))
    assert ours.dtype == jnp.float32
    np.testing.assert_array_equal(ours, np.ones((4, 4)))


def test_leaves_of_every_kind():
    class Config:
        pass

    config = Config()

    def func(params: Any, x: Any, *, scale: float, activation: Callable) -> Any:
        assert params["config"] is config
        assert params["name"] == "dense"
        assert params["none"] is None
        assert isinstance(params["rate"], float)
        assert params["f8"].dtype == jnp.float8_e4m3fn
        out = activation(x @ params["w"]) * scale * params["rate"]
        kept = {name: params[name] for name in ("i", "flag", "key", "f8", "half", "name", "rate")}
        return {"out": out, **kept, "config": config, "function": activation, "text": "done"}

    params = {
        "w": W,
        "i": jnp.arange(3),
        "flag": jnp.array(True),
        "key": jax.random.key(1),
        "f8": jnp.ones(3, jnp.float8_e4m3fn),
        "half": jnp.ones(3, jnp.float16),
        "empty": jnp.zeros((0, 4)),
        "name": "dense",
        "rate": 0.5,
        "none": None,
        "config": config,
    }
    out = autocast(func)(params, jnp.ones((4, 4)), scale=4.0, activation=jnp.tanh)
    # x and w are exact; the dot's 1 too; the tanh is rounded at most once.
    np.testing.assert_allclose(out["out"], 2 * np.tanh(1.0), rtol=half_eps("bf16"))
    for name in ("i", "flag", "f8", "half"):
        assert out[name].dtype == params[name].dtype
        np.testing.assert_array_equal(out[name], params[name])
    assert jax.random.key_data(out["key"]).tolist() == jax.random.key_data(params["key"]).tolist()
    assert (out["name"], out["text"], out["config"]) == ("dense", "done", config)
    assert out["function"] is jnp.tanh
    assert out["rate"] == 0.5


@every_format
def test_empty_arrays(policy: str):
    def func(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.exp(x @ w)), jax.lax.scan(lambda h, x: (h @ w, h), x, None, length=0)

    empty = jnp.zeros((0, 4))
    total, (carry, ys) = autocast(func, policy)(W, empty)
    assert total == 0
    assert carry.shape == (0, 4)
    assert ys.shape == (0, 0, 4)
    assert jax.grad(lambda *args: autocast(func, policy)(*args)[0])(W, empty).shape == (4, 4)


def test_a_function_of_nothing_and_an_argument_that_is_returned():
    assert autocast(lambda: 3)() == 3
    x = jnp.full(3, 1 / 3)
    # No operation, no rounding.
    np.testing.assert_array_equal(autocast(lambda x: x)(x), x)
    np.testing.assert_array_equal(autocast(lambda x: (x, x + 0))(x)[1], x)


@every_format
def test_weak_types_are_kept(policy: str):
    def func(w: Any, x: float) -> Any:
        return jnp.sum(w) * 0 + x, jnp.multiply(x, 2.0)

    ours, exact = (jax.eval_shape(f, W, 1.0) for f in (autocast(func, policy), func))
    assert [(x.dtype, x.weak_type) for x in ours] == [(x.dtype, x.weak_type) for x in exact]


def test_constant_results_are_arrays():
    """Equinox keeps such a flag in the state of a BatchNorm."""

    def func(w: Any) -> Any:
        return jnp.sum(w), jnp.array(False), jnp.int32(3), jnp.float32(0.1), jnp.zeros(())

    ours, exact = autocast(func)(W), func(W)
    for got, right in zip(ours, exact, strict=True):
        assert isinstance(got, jax.Array)
        assert got.dtype == right.dtype
        assert got == right


# Inside of something else.


@every_format
def test_inside_of_other_transformations(policy: str):
    def outer(w: Any, x: Any) -> Any:
        bias = jnp.sum(w, axis=0, keepdims=True)

        def inner(x: Any) -> Any:  # Closes over tracers.
            return jnp.tanh(x @ w + bias)

        return jnp.sum(autocast(inner, policy)(x))

    low = [str(compute(policy))] * 2
    for func in (outer, jax.jit(outer), jax.grad(outer), jax.jit(jax.grad(outer))):
        assert {tuple(d[:2]) for d in dots(func, W, X)} == {tuple(low)}
    # x, w and the bias on their way in, the dot, its sum with the bias, the tanh; backward twice.
    tolerance = 3 * 6 * half_eps(policy)
    wide_policy = jax.grad(
        lambda w, x: jnp.sum(jnp.tanh(x @ w + jnp.sum(w, axis=0, keepdims=True)))
    )
    exact = wide_policy(W, X)
    ours = jax.jit(jax.grad(outer))(W, X)
    assert np.linalg.norm(ours - exact) <= tolerance * np.linalg.norm(exact)
    each = jax.vmap(jax.grad(outer), (None, 0))(W, jnp.stack([X, X]))
    np.testing.assert_array_equal(each[0], each[1])
    assert np.linalg.norm(each[0] - exact) <= tolerance * np.linalg.norm(exact)
    in_scan = jax.lax.scan(lambda c, x: (c, outer(W, x)), 0, jnp.stack([X, X]))[1]
    assert in_scan.shape == (2,)


def test_autocast_inside_of_autocast():
    def inner(w: Any, x: Any) -> Any:
        return x @ w

    def outer(w: Any, x: Any) -> Any:
        return autocast(inner, "f16")(w, x) @ w

    found = dots(autocast(outer, "bf16"), W, X)
    # The inner one has said float16, and the outer one leaves it.
    assert found == [["float16"] * 3, ["bfloat16"] * 3]


def test_as_a_decorator():
    @autocast(policy="f16")
    def func(w: Any, x: Any) -> Any:
        """Multiply."""
        return x @ w

    assert func.__doc__ == "Multiply."
    assert dots(func, W, X) == [["float16"] * 3]


@every_format
def test_keyword_arguments(policy: str):
    def func(w: Any, *, x: Any, target: Any) -> Any:
        return jnp.sum(x @ w) - target

    # A target that neither format can hold.
    ours = autocast(func, policy)(W, x=jnp.ones((1, 4)), target=jnp.float32(100_003.0))
    assert ours == 4 - 100_003


# Islands.


def model(params: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        mean = jnp.mean(h, axis=-1, keepdims=True)
        h = (h - mean) / jnp.sqrt(jnp.var(h, axis=-1, keepdims=True) + 1e-5)
        weights = jax.nn.softmax(h @ h.T / 2)
        return h + jax.nn.gelu(weights @ h @ w), None

    h, _ = jax.lax.scan(layer, x @ params["in"], params["layers"])
    return jnp.mean(jax.nn.log_softmax(h @ params["out"])[:, 0])


PARAMS = {"in": W, "layers": jnp.stack([W, W]), "out": W}


@every_format
def test_no_contraction_is_made_again(policy: str):
    remats = named("checkpoint", autocast(model, policy), PARAMS, X)
    remats += named("remat2", autocast(model, policy), PARAMS, X)
    assert remats
    for remat in remats:
        inside = {equation.primitive.name for equation in equations(remat.params["jaxpr"])}
        assert not inside & {"scan", "while", "cond", "debug_callback"}
    gradients = jax.grad(model), jax.grad(autocast(model, policy))
    plain, ours = (named("dot_general", gradient, PARAMS, X) for gradient in gradients)
    assert len(plain) == len(ours)


@every_format
def test_without_islands_nothing_is_computed_again(policy: str):
    func = autocast(model, f"{policy},store:op:*=keep")
    for name in ("checkpoint", "remat", "remat2"):
        assert not named(name, func, PARAMS, X)


@every_format
def test_no_dot_is_computed_twice(policy: str):
    counts = [
        len(named("dot_general", jax.grad(func), PARAMS, X))
        for func in (model, autocast(model, policy), autocast(model, f"{policy},store:op:*=keep"))
    ]
    assert counts[0] == counts[1] == counts[2]


@every_format
def test_the_users_own_checkpoint_keeps_its_policy(policy: str):
    def loss(w: Any, x: Any) -> Any:
        saved = jax.checkpoint_policies.save_only_these_names("kept")

        def layer(w: Any, x: Any) -> Any:
            return jnp.tanh(checkpoint_name(x @ w, "kept")) @ w

        return jnp.sum(jax.checkpoint(layer, policy=saved)(w, x) ** 2)

    counts = [
        len(named("dot_general", jax.grad(func), W, X)) for func in (loss, autocast(loss, policy))
    ]
    # Two forward; three for the gradients: of w in both, of what lies between. None again.
    assert counts == [5, 5]
