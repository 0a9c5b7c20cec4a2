"""`halfstep.compat.jaxamp`: the calls of jaxamp's README run, and what it gets wrong is right."""

import functools
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep
import halfstep.compat.jaxamp as jaxamp
from tests._jaxprs import contractions, equations

NAMES = {
    *("amp", "amp_stop", "default_amp_policy", "use_compute_precision", "use_original_precision"),
    *("DynamicLossScaler", "DynamicScalerState"),
    *("dynamic_scale_grad", "dynamic_scale_tx", "dynamic_scale_value_and_grad"),
}
X = jnp.linspace(-1, 1, 16).reshape(4, 4)
W = jnp.full((4, 4), 0.1)  # No 16-bit format holds it.


def dtypes_of(name: str, func: Any, *args: Any) -> list[str]:
    return [
        str(equation.invars[0].aval.dtype)
        for equation in equations(jax.make_jaxpr(func)(*args))
        if equation.primitive.name == name
    ]


def test_public_names():
    assert set(jaxamp.__all__) == NAMES
    for name in NAMES:
        assert getattr(jaxamp, name) is not None


# The README's training loop, on the characters of a module of Python's library.

CONTEXT = 4


def minibatches(size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    text = inspect.getsource(textwrap).encode("ascii", "replace")
    codes = np.frombuffer(text, np.uint8).astype(np.int32) % 128
    windows = np.lib.stride_tricks.sliding_window_view(codes, CONTEXT + 1)
    order = np.random.default_rng(0).permutation(len(windows))
    for start in range(0, len(order) - size, size):
        rows = windows[order[start : start + size]]
        yield rows[:, :-1], rows[:, -1]


def initial_model() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embedding": jax.random.normal(keys[0], (128, 16)),
        "hidden": jax.random.normal(keys[1], (16 * CONTEXT, 64)) / 8,
        "out": jax.random.normal(keys[2], (64, 128)) / 8,
    }


def loss_fn(model_state: Any, minibatch: Any) -> tuple[Any, Any]:
    context, target = minibatch
    embedded = model_state["embedding"][context].reshape(len(context), -1)
    with jax.named_scope("hidden"):
        hidden = jax.nn.relu(embedded @ model_state["hidden"])
    with jax.named_scope("out"):
        logits = hidden @ model_state["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    accuracy = jnp.mean((jnp.argmax(logits, axis=-1) == target).astype(jnp.float32))
    return jnp.mean(losses), accuracy


def train_step(
    model_state: Any, opt_state: Any, minibatch: Any, dynamic_scaler_state: Any, optimizer: Any
) -> tuple[Any, ...]:
    amp_loss_fn = jaxamp.amp(loss_fn)

    value_and_grad_fn = jaxamp.dynamic_scale_value_and_grad(amp_loss_fn, has_aux=True)

    dynamic_scaler_state, ((loss, accuracy), grads) = value_and_grad_fn(
        model_state, minibatch, dynamic_scaler_state=dynamic_scaler_state
    )

    updates, opt_state = optimizer.update(grads, opt_state, model_state)
    model_state = optax.apply_updates(model_state, updates)
    return model_state, opt_state, dynamic_scaler_state, loss, accuracy


@pytest.mark.usefixtures("standard_promotion")
def test_the_readme_trains():
    """With `optax.apply_if_finite`, as it advises."""
    optimizer = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=20)
    model_state = initial_model()
    opt_state = optimizer.init(model_state)
    traces: list[int] = []

    def counted_step(*args: Any) -> tuple[Any, ...]:
        traces.append(0)
        return train_step(*args)

    train_step_jit = jax.jit(counted_step, static_argnums=4)
    # So large that the first steps overflow.
    dynamic_scaler_state = jaxamp.DynamicScalerState(
        scaler=jnp.float32(2.0**24), patience=jnp.int32(20)
    )
    losses, scalers = [], []
    for minibatch, _ in zip(minibatches(64), range(100), strict=False):
        model_state, opt_state, dynamic_scaler_state, loss, accuracy = train_step_jit(
            model_state, opt_state, minibatch, dynamic_scaler_state, optimizer
        )
        losses.append(float(loss))
        scalers.append(float(dynamic_scaler_state.scaler))
        assert 0 <= accuracy <= 1
    assert len(traces) == 1
    assert scalers[0] == 2.0**23
    assert min(scalers) < max(scalers[scalers.index(min(scalers)) :])  # It has grown again.
    assert np.mean(losses[-10:]) < 0.6 * losses[0]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model_state))
    minibatch = next(minibatches(8))
    assert contractions(jaxamp.amp(loss_fn), model_state, minibatch) == ["float16", "float16"]


@pytest.mark.slow
def test_the_readme_in_short():
    def loss(model: Any, minibatch: Any) -> Any:
        return loss_fn(model, minibatch)[0]

    model, minibatch = initial_model(), next(minibatches(8))
    scaler_state = jaxamp.DynamicLossScaler()
    amp_loss = jaxamp.amp(loss)
    grad_fn = jaxamp.dynamic_scale_grad(amp_loss)
    scaler_state, grad = grad_fn(model, minibatch, dynamic_scaler_state=scaler_state)
    exact = jax.grad(loss)(model, minibatch)
    # Forward and backward each pass two products and two roundings of what goes between them.
    bound = 8 * halfstep.FORMATS["f16"].eps / 2
    for ours, right in zip(jax.tree.leaves(grad), jax.tree.leaves(exact), strict=True):
        assert np.linalg.norm(ours - right) <= bound * np.linalg.norm(right)
    assert (scaler_state.scaler, scaler_state.count) == (2**15, 1)


# amp.


def two_layers(params: Any, x: Any) -> Any:
    with jax.named_scope("body"):
        x = jnp.tanh(x @ params["body"])
    with jax.named_scope("head"):
        return x @ params["head"]


PARAMS = {"body": W, "head": W}


def test_compute_dtype():
    rows: Any = (({}, "float16"), ({"compute_dtype": jnp.bfloat16}, "bfloat16"))
    for options, dtype in rows:
        assert contractions(jaxamp.amp(two_layers, **options), PARAMS, X) == [dtype, dtype]
        assert contractions(jaxamp.amp(**options)(two_layers), PARAMS, X) == [dtype, dtype]
        assert jaxamp.amp(two_layers, **options)(PARAMS, X).dtype == jnp.float32


def readme_precision(
    compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    """A function of the kind that the README shows."""
    if not all(map(eqx.is_inexact_array, invars)):
        return invars, bind_params
    if "preferred_element_type" in bind_params:
        bind_params["preferred_element_type"] = compute_dtype
    return [jnp.asarray(x).astype(compute_dtype) for x in invars], bind_params


@pytest.mark.parametrize("function", [readme_precision, jaxamp.use_compute_precision])
def test_a_primitive(function: Any):
    func = jaxamp.amp(two_layers, amp_policy={jax.lax.tanh_p: function})
    assert dtypes_of("tanh", func, PARAMS, X) == ["float16"]
    assert dtypes_of("tanh", jaxamp.amp(two_layers), PARAMS, X) == ["float32"]
    assert contractions(func, PARAMS, X) == ["float32", "float32"]
    func = jaxamp.amp(two_layers, amp_policy=jaxamp.default_amp_policy | {jax.lax.tanh_p: function})
    assert dtypes_of("tanh", func, PARAMS, X) == ["float16"]
    assert contractions(func, PARAMS, X) == ["float16", "float16"]
    func = jaxamp.amp(two_layers, amp_policy={jax.lax.dot_general_p: function})
    assert contractions(func, PARAMS, X) == ["float16", "float16"]
    gradients = jax.grad(lambda p: jnp.sum(func(p, X)))(PARAMS)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(gradients)} == {"float32"}


@pytest.mark.parametrize("function", [readme_precision, jaxamp.use_compute_precision])
def test_a_scope(function: Any):
    func = jaxamp.amp(two_layers, amp_policy={"body": function})
    assert dtypes_of("tanh", func, PARAMS, X) == ["float16"]
    assert contractions(func, PARAMS, X) == ["float16", "float32"]
    policy = jaxamp.default_amp_policy | {"head": jaxamp.use_original_precision}
    func = jaxamp.amp(two_layers, amp_policy=policy)
    assert contractions(func, PARAMS, X) == ["float16", "float32"]


def test_a_scope_comes_before_a_primitive():
    policy = {
        jax.lax.dot_general_p: jaxamp.use_compute_precision,
        "head": jaxamp.use_original_precision,
    }
    assert contractions(jaxamp.amp(two_layers, amp_policy=policy), PARAMS, X) == [
        "float16",
        "float32",
    ]


def nested(w: Any, x: Any) -> Any:
    with jax.named_scope("outer"), jax.named_scope("model"), jax.named_scope("inner"):
        return jnp.tanh(x @ w)


@pytest.mark.parametrize("flip", [False, True])
def test_the_outermost_scope_is_used(flip: bool):
    policy = {
        "inner": jaxamp.use_compute_precision,
        "outer": jaxamp.use_original_precision,
    }
    if flip:
        policy = dict(reversed(policy.items()))
    assert contractions(jaxamp.amp(nested, amp_policy=policy), W, X) == ["float32"]
    swapped = dict(zip(policy, reversed(policy.values()), strict=True))
    assert contractions(jaxamp.amp(nested, amp_policy=swapped), W, X) == ["float16"]
    assert dtypes_of("tanh", jaxamp.amp(nested, amp_policy=swapped), W, X) == ["float16"]


@pytest.mark.parametrize(
    ("scope", "inside"),
    [("model", True), ("model/inner", True), ("mod", False), ("x/inner", False)],
)
def test_a_scope_is_whole_names_on_any_level(scope: str, inside: bool):
    policy = jaxamp.default_amp_policy | {scope: jaxamp.use_original_precision}
    func = jaxamp.amp(nested, amp_policy=policy)
    assert contractions(func, W, X) == ["float32" if inside else "float16"]


def test_scopes_and_primitives_hold_inside_of_loops_and_derivatives():
    def func(w: Any, x: Any) -> Any:
        with jax.named_scope("loop"):
            return jnp.sum(jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0])

    policy: Any = {"loop": readme_precision}
    # Once in the forward pass, and once where it is made again.
    twice = dtypes_of("tanh", jax.grad(jaxamp.amp(func, amp_policy=policy)), W, X)
    assert twice == ["float16"] * 2
    policy = {jax.lax.tanh_p: readme_precision}
    # Once in the forward pass, and once where it is made again.
    twice = dtypes_of("tanh", jax.grad(jaxamp.amp(func, amp_policy=policy)), W, X)
    assert twice == ["float16"] * 2
    policy = {"loop": jaxamp.use_original_precision}
    assert set(contractions(jax.grad(jaxamp.amp(func, amp_policy=policy)), W, X)) == {"float32"}


def test_an_entry_for_nothing_is_no_error():
    policy = jaxamp.default_amp_policy | {
        jax.lax.sinh_p: readme_precision,
        "nowhere": readme_precision,
        jax.lax.scan_p: readme_precision,
    }
    assert contractions(jaxamp.amp(two_layers, amp_policy=policy), PARAMS, X) == 2 * ["float16"]


def test_integers_are_not_cast():
    """A number made of an index is exact beyond 2048, where float16 counts in steps of two."""

    def func(w: Any, index: Any) -> Any:
        with jax.named_scope("low"):
            return jnp.tanh(w[index]), index.astype(jnp.float32)

    func = jaxamp.amp(func, amp_policy={"low": jaxamp.use_compute_precision})
    assert dtypes_of("tanh", func, W[0], jnp.array(2)) == ["float16"]
    assert func(W[0], jnp.array(4097))[1] == 4097


@pytest.mark.parametrize("scope", ["amp_stop", "amp_step", "amp_default"])
def test_scopes_that_stop(scope: str):
    def func(w: Any, x: Any) -> Any:
        x = x @ w
        with jax.named_scope(scope):
            return x @ w

    other = jaxamp.default_amp_policy | {"other": readme_precision}
    for policy in (jaxamp.default_amp_policy, other):
        assert contractions(jaxamp.amp(func, amp_policy=policy), W, X) == ["float16", "float32"]
    replaced = {**jaxamp.default_amp_policy, scope: jaxamp.use_compute_precision}
    assert contractions(jaxamp.amp(func, amp_policy=replaced), W, X) == ["float16", "float16"]


@pytest.mark.parametrize("how", ["with", "decorator", "called decorator", "call"])
def test_amp_stop(how: str):
    def product(x: Any, w: Any) -> Any:
        return x @ w

    stopped = {
        "decorator": lambda: jaxamp.amp_stop(product),
        "called decorator": lambda: jaxamp.amp_stop()(product),
        "call": lambda: functools.partial(jaxamp.amp_stop(product)),
        "with": lambda: product,
    }[how]()

    def func(w: Any, x: Any) -> Any:
        x = x @ w
        if how == "with":
            with jaxamp.amp_stop():
                return x @ w
        return stopped(x, w)

    assert contractions(jaxamp.amp(func), W, X) == ["float16", "float32"]
    assert (func(W, X) == X @ W @ W).all()


@pytest.mark.slow
def test_leaves_that_are_no_floats():
    """Complex numbers keep their imaginary parts, and keys are keys."""

    def loss(params: Any, x: Any) -> Any:
        noise = jax.random.normal(params["key"], x.shape)
        return jnp.sum(jnp.abs(params["c"]) ** 2) + jnp.sum((x + noise) @ params["w"])

    params = {"c": jnp.array([3 + 4j, 1 - 2j], jnp.complex64), "w": W, "key": jax.random.key(0)}
    for redo_on_nan in (0, 2):
        func = jaxamp.dynamic_scale_value_and_grad(jaxamp.amp(loss), redo_on_nan=redo_on_nan)
        state = jaxamp.DynamicScalerState(scaler=2.0**8)
        state, (value, grads) = jax.jit(func)(params, X, dynamic_scaler_state=state)
        np.testing.assert_array_equal(grads["c"], 2 * params["c"].conj())
        assert grads["key"] is None
        assert state.count == 1
        assert jnp.isfinite(value)


@pytest.mark.parametrize("function", [jaxamp.use_compute_precision, jaxamp.use_original_precision])
def test_precision_functions_can_be_called(function: Any):
    def delegated(*args: Any, **params: Any) -> Any:
        return function(*args, **params)

    dtype = "float16" if function is jaxamp.use_compute_precision else "float32"
    func = jaxamp.amp(two_layers, amp_policy={jax.lax.dot_general_p: delegated})
    assert contractions(func, PARAMS, X) == [dtype, dtype]
    operands = (jnp.ones(2, jnp.bfloat16), jnp.arange(2))
    made, params = function(jnp.float16, [jnp.float32, jnp.int32], *operands, axis=0)
    assert params == {"axis": 0}
    # With an integer among the operands, only what was float32 goes back to it.
    expected = "bfloat16" if dtype == "float16" else "float32"
    assert [str(x.dtype) for x in made] == [expected, "int32"]


def test_mistakes_in_a_policy():
    with pytest.raises(TypeError, match=r"a key of `amp_policy` is a primitive such as jax\.lax"):
        jaxamp.amp(two_layers, amp_policy={jnp.add: readme_precision})
    words: Any = {"head": "compute"}
    with pytest.raises(TypeError, match=r"a value of `amp_policy` is a function.*got 'compute'"):
        # Unwrapped: in tests beartype would object first.
        inspect.unwrap(jaxamp.amp)(two_layers, amp_policy=words)
    func = jaxamp.amp(
        lambda w, x: jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=2)[0],
        amp_policy={jax.lax.scan_p: readme_precision},
    )
    with pytest.raises(ValueError, match="`scan`, which is a call or a loop"):
        func(W, X)


# What a policy does not name.


def softmax_head(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["body"]) + 0.1 * x
    return jax.nn.softmax(jnp.maximum(hidden, 0.1) @ params["head"])


@pytest.mark.rows(1)
@pytest.mark.parametrize("policy", [{}, {"nowhere": jaxamp.use_compute_precision}])
def test_a_policy_for_nothing_changes_no_bit(policy: Any):
    params = {"body": W, "head": jnp.linspace(-1, 1, 16).reshape(4, 4) / 3}
    func = jaxamp.amp(softmax_head, amp_policy=policy)
    assert contractions(func, params, X) == ["float32", "float32"]
    np.testing.assert_array_equal(func(params, X), softmax_head(params, X))
    assert (jaxamp.amp(softmax_head)(params, X) != softmax_head(params, X)).any()


def test_the_default_without_its_contractions_leaves_them_in_float32():
    policy = dict(jaxamp.default_amp_policy)
    del policy[jax.lax.dot_general_p]
    assert contractions(jaxamp.amp(two_layers, amp_policy=policy), PARAMS, X) == 2 * ["float32"]

    def convolution(w: Any, x: Any) -> Any:
        return jax.lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0] @ w

    assert contractions(jaxamp.amp(convolution), W, X) == ["float16", "float16"]
    assert contractions(jaxamp.amp(convolution, amp_policy=policy), W, X) == ["float16", "float32"]
    policy[jax.lax.dot_general_p] = policy.pop(jax.lax.conv_general_dilated_p)
    assert contractions(jaxamp.amp(convolution, amp_policy=policy), W, X) == ["float32", "float16"]


def test_operations_without_an_entry_run_in_their_original_precision():
    """As jaxamp's README has it: also where a product has left 16 bits, and inside a loop."""

    def loop(w: Any, x: Any) -> Any:
        def body(h: Any, _: Any) -> Any:
            return jnp.maximum(h @ w, 0.5) + h, None

        return jax.lax.scan(body, x, None, length=2)[0]

    policy = {jax.lax.dot_general_p: jaxamp.use_compute_precision}
    func = jaxamp.amp(loop, amp_policy=policy)
    assert contractions(func, W, X) == ["float16"]
    assert dtypes_of("max", func, W, X) == ["float32"]
    assert dtypes_of("add", func, W, X)[0] == "float32"


def test_amp_default_is_for_what_no_other_entry_is_for():
    policy = {
        "amp_default": jaxamp.use_compute_precision,
        jax.lax.dot_general_p: jaxamp.use_original_precision,
    }
    func = jaxamp.amp(two_layers, amp_policy=policy)
    assert dtypes_of("tanh", func, PARAMS, X) == ["float16"]
    assert contractions(func, PARAMS, X) == ["float32", "float32"]


def test_the_default_policy_can_be_called_and_merged():
    for function in jaxamp.default_amp_policy.values():
        made, params = function(jnp.bfloat16, [jnp.float32], jnp.ones(2), axis=0)
        assert made[0].dtype in (jnp.float32, jnp.bfloat16)
        assert params == {"axis": 0}
    merged = {**jaxamp.default_amp_policy, "head": jaxamp.use_original_precision}
    assert merged == jaxamp.default_amp_policy | {"head": jaxamp.use_original_precision}
