"""`halfstep.compat.jaxamp`: the calls of jaxamp's README run, and what it gets wrong is right."""

import functools
import inspect
import pickle
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import halfstep
import halfstep.compat.jaxamp as jaxamp
from tests._jaxprs import contractions, equations

NAMES = {
    *("amp", "amp_stop", "default_amp_policy", "use_compute_precision", "use_original_precision"),
    *("DynamicLossScaler", "DynamicScalerState"),
    *("dynamic_scale_grad", "dynamic_scale_value_and_grad"),
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
    train_step_jit: Any = jax.jit(train_step, static_argnums=4)
    # So large that the first steps overflow.
    dynamic_scaler_state = jaxamp.DynamicScalerState(scaler=2.0**24, patience=jnp.array(20))
    losses, scalers = [], []
    for minibatch, _ in zip(minibatches(64), range(100), strict=False):
        model_state, opt_state, dynamic_scaler_state, loss, accuracy = train_step_jit(
            model_state, opt_state, minibatch, dynamic_scaler_state, optimizer
        )
        losses.append(float(loss))
        scalers.append(float(dynamic_scaler_state.scaler))
        assert 0 <= accuracy <= 1
    assert train_step_jit._cache_size() == 1
    assert scalers[0] == 2.0**23
    assert min(scalers) < max(scalers[scalers.index(min(scalers)) :])  # It has grown again.
    assert np.mean(losses[-10:]) < 0.6 * losses[0]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model_state))
    minibatch = next(minibatches(8))
    assert contractions(jaxamp.amp(loss_fn), model_state, minibatch) == ["float16", "float16"]


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


@pytest.mark.parametrize("filter", [True, False])
@pytest.mark.parametrize("has_aux", [True, False])
@pytest.mark.parametrize("redo_on_nan", [0, 3])
def test_what_the_gradient_functions_return(filter: bool, has_aux: bool, redo_on_nan: int):
    def loss(w: Any, x: Any, *, factor: float) -> Any:
        value = jnp.sum(w * x) * factor
        aux = {"mean": jnp.mean(x), "name": "a text", "key": jax.random.key(3)}
        return (value, aux) if has_aux else value

    options: Any = {"has_aux": has_aux, "filter": filter, "redo_on_nan": redo_on_nan}
    if filter is False:
        options["argnums"] = 0
    x = jnp.arange(4.0)

    def check_aux(aux: Any) -> None:
        assert aux["mean"] == 1.5
        assert aux["name"] == "a text"
        assert jax.random.key_data(aux["key"]).tolist() == [0, 3]

    state, (value, grads) = jaxamp.dynamic_scale_value_and_grad(loss, **options)(
        jnp.ones(4), x, factor=2.0, dynamic_scaler_state=jaxamp.DynamicScalerState()
    )
    if has_aux:
        value, aux = value
        check_aux(aux)
    assert value == 12
    assert (grads == 2 * x).all()
    assert state.count == 1

    state, grads = jaxamp.dynamic_scale_grad(loss, **options)(
        jnp.ones(4), x, factor=2.0, dynamic_scaler_state=jaxamp.DynamicScalerState()
    )
    if has_aux:
        grads, aux = grads
        check_aux(aux)
    assert (grads == 2 * x).all()
    assert state.count == 1


def test_other_arguments_of_jax():
    func = jaxamp.dynamic_scale_grad(lambda w, x: jnp.sum(w * x), filter=False, argnums=(0, 1))
    _, grads = func(W, X, dynamic_scaler_state=jaxamp.DynamicScalerState())
    assert (grads[0] == X).all()
    assert (grads[1] == W).all()


def test_the_state_is_required():
    func = jaxamp.dynamic_scale_grad(lambda w: jnp.sum(w))
    with pytest.raises(TypeError, match="dynamic_scaler_state"):
        func(W)
    eqx.filter_jit(func)(W, dynamic_scaler_state=jaxamp.DynamicScalerState())


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
    assert contractions(func, PARAMS, X) == ["float16", "float16"]
    func = jaxamp.amp(two_layers, amp_policy={jax.lax.dot_general_p: function})
    assert contractions(func, PARAMS, X) == ["float16", "float16"]
    gradients = jax.grad(lambda p: jnp.sum(func(p, X)))(PARAMS)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(gradients)} == {"float32"}


@pytest.mark.parametrize("function", [readme_precision, jaxamp.use_compute_precision])
def test_a_scope(function: Any):
    func = jaxamp.amp(two_layers, amp_policy={"body": function})
    assert dtypes_of("tanh", func, PARAMS, X) == ["float16"]
    func = jaxamp.amp(two_layers, amp_policy={"head": jaxamp.use_original_precision})
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
    func = jaxamp.amp(nested, amp_policy={scope: jaxamp.use_original_precision})
    assert contractions(func, W, X) == ["float32" if inside else "float16"]


def test_scopes_and_primitives_hold_inside_of_loops_and_derivatives():
    def func(w: Any, x: Any) -> Any:
        with jax.named_scope("loop"):
            return jnp.sum(jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0])

    policy: Any = {"loop": readme_precision}
    assert dtypes_of("tanh", jax.grad(jaxamp.amp(func, amp_policy=policy)), W, X) == ["float16"]
    policy = {jax.lax.tanh_p: readme_precision}
    assert dtypes_of("tanh", jax.grad(jaxamp.amp(func, amp_policy=policy)), W, X) == ["float16"]
    policy = {"loop": jaxamp.use_original_precision}
    assert set(contractions(jax.grad(jaxamp.amp(func, amp_policy=policy)), W, X)) == {"float32"}


def test_an_entry_for_nothing_is_no_error():
    policy = {
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

    for policy in (jaxamp.default_amp_policy, {"other": readme_precision}):
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


# The scaler.


def test_the_structure_of_the_state():
    state = jaxamp.DynamicScalerState()
    assert (state.patience, state.adjust_factor, state.scaler, state.count) == (2000, 2, 2**15, 0)
    assert (state.scaler.dtype, state.count.dtype) == (jnp.float32, jnp.int32)
    state = jaxamp.DynamicScalerState(
        jnp.array(10), jnp.array(4.0), jnp.array(1000.0), jnp.array(3)
    )
    assert (state.patience, state.adjust_factor, state.scaler, state.count) == (10, 4, 512, 3)
    assert isinstance(state, halfstep.DynamicLossScaling)
    copy = pickle.loads(pickle.dumps(state))
    assert (copy.patience, copy.scaler, copy.count) == (10, 512, 3)


def test_mistakes_in_a_state():
    with pytest.raises(ValueError, match="`patience` must be an integer, 1 or more; got 0"):
        jaxamp.DynamicScalerState(patience=0)
    with pytest.raises(ValueError, match="`adjust_factor` must be a power of two"):
        jaxamp.DynamicScalerState(adjust_factor=1.5)
    with pytest.raises(ValueError, match=r"`scaler` must be a power of two.*got 0"):
        jaxamp.DynamicScalerState(scaler=0.0)
    with pytest.raises(ValueError, match="`redo_on_nan` is an integer, 0 or more; got -1"):
        jaxamp.dynamic_scale_grad(jnp.sum, redo_on_nan=-1)


def mean(w: Any, x: Any) -> Any:
    return jnp.mean(w * x)


def run(state: Any, x: Any, **options: Any) -> tuple[Any, Any]:
    return jaxamp.dynamic_scale_grad(mean, **options)(W, x, dynamic_scaler_state=state)


def test_the_scaler_grows_after_its_patience_exactly():
    state = jaxamp.DynamicScalerState(patience=3)
    scalers = []
    for _ in range(7):
        state, _ = run(state, X)
        scalers.append(int(state.scaler) // 2**15)
    assert scalers == [1, 1, 2, 2, 2, 4, 4]
    # A state of jaxamp's that has reached its patience has waited long enough.
    state, _ = run(jaxamp.DynamicScalerState(patience=3, count=3), X)
    assert state.scaler == 2**16


def test_the_scaler_has_limits_and_returns_from_them():
    bad = X.at[0, 0].set(jnp.nan)
    state = jaxamp.DynamicScalerState(patience=1, scaler=4.0)
    for _ in range(5):
        state, _ = run(state, bad)
    assert state.scaler == 1
    state, grads = run(state, X)
    assert state.scaler == 2
    assert (grads == X / 16).all()
    state = jaxamp.DynamicScalerState(patience=1, scaler=2.0**125)
    for _ in range(3):
        state, _ = run(state, 2.0**-20 * X)
    assert state.scaler == 2.0**126
    state, _ = run(state, bad)
    assert state.scaler == 2.0**125


def test_an_infinite_metric_is_no_overflow():
    def loss(w: Any, x: Any) -> tuple[Any, Any]:
        return mean(w, x), {"metric": jnp.float32(jnp.inf), "nan": jnp.array([jnp.nan])}

    for redo_on_nan in (0, 4):
        func = jaxamp.dynamic_scale_grad(loss, has_aux=True, redo_on_nan=redo_on_nan)
        state, (_, aux) = func(W, X, dynamic_scaler_state=jaxamp.DynamicScalerState(scaler=1024.0))
        assert (state.scaler, state.count) == (1024, 1)
        assert aux["metric"] == jnp.inf


# Again, if it is not finite.


def overflowing(w: Any, x: Any) -> Any:
    """The cotangent of its product is x times the scale, in float16."""
    return jnp.sum(jaxamp.amp(lambda w, ones: ones @ w)(w, jnp.ones_like(x)) * x)


# 1024 * 64 is above 65504, and 1024 * 32 is not.
OPERANDS = jnp.ones((4, 4)), jnp.full((1, 4), 1024.0)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("redo_on_nan", [0, 4, 5, 9])
def test_redo(redo_on_nan: int, jit: bool):
    func = jaxamp.dynamic_scale_value_and_grad(overflowing, redo_on_nan=redo_on_nan)
    state = jaxamp.DynamicScalerState(scaler=1024.0)
    state, (value, grads) = (jax.jit(func) if jit else func)(*OPERANDS, dynamic_scaler_state=state)
    assert value == 4 * 4096
    if redo_on_nan < 5:
        assert not jnp.isfinite(grads).any()
        assert (state.scaler, state.count) == (1024 / 2 ** (redo_on_nan + 1), 0)
    else:
        assert (grads == 1024).all()
        assert (state.scaler, state.count) == (32, 1)


@pytest.mark.parametrize("redo_on_nan", [0, 9])
def test_the_gradient_is_in_the_program_once(redo_on_nan: int):
    traces = []

    def loss(w: Any, x: Any) -> Any:
        traces.append(0)
        return jnp.sum(jnp.sin(w) * x)

    func = jax.jit(jaxamp.dynamic_scale_grad(loss, redo_on_nan=redo_on_nan))
    lowered = func.lower(W, X, dynamic_scaler_state=jaxamp.DynamicScalerState()).as_text()
    assert lowered.count("stablehlo.cosine") == 1
    assert len(traces) == 1


def test_a_loss_that_is_not_finite_is_not_computed_again():
    """The loss does not depend on the scaler, so one bad batch costs one step of it."""
    state, grads = run(jaxamp.DynamicScalerState(), X.at[0, 0].set(jnp.nan), redo_on_nan=9)
    assert state.scaler == 2**14
    assert jnp.isnan(grads[0, 0])


def test_redo_under_vmap():
    def one(scaler: Any, x: Any) -> Any:
        state = eqx.tree_at(lambda s: s.loss_scaling, jaxamp.DynamicScalerState(), scaler)
        func = jaxamp.dynamic_scale_grad(overflowing, redo_on_nan=9)
        state, grads = func(OPERANDS[0], x, dynamic_scaler_state=state)
        return state.scaler, grads

    x = jnp.stack([OPERANDS[1], OPERANDS[1] / 64])
    scalers, grads = jax.vmap(one)(jnp.array([1024.0, 1024.0]), x)
    assert scalers.tolist() == [32, 1024]
    assert (grads[0] == 1024).all()
    assert (grads[1] == 16).all()


def test_redo_in_shard_map(mesh: jax.sharding.Mesh):
    """Where the loss is one for all, one shard's overflow is everybody's."""

    def loss(w: Any, x: Any) -> tuple[Any, Any]:
        return jax.lax.psum(overflowing(w, x), "data"), jnp.max(x)[None]

    func = jaxamp.dynamic_scale_value_and_grad(loss, has_aux=True, redo_on_nan=9)
    whole, parted = PartitionSpec(), PartitionSpec("data")
    step = jax.shard_map(
        lambda w, x, s: func(w, x, dynamic_scaler_state=s),
        mesh=mesh,
        in_specs=(whole, parted, whole),
        out_specs=(whole, ((whole, parted), whole)),
    )
    x = jnp.ones((4, 4)).at[2].set(1024.0)
    state, ((_, aux), grads) = jax.jit(step)(
        OPERANDS[0], x, jaxamp.DynamicScalerState(scaler=1024.0)
    )
    assert aux.tolist() == [1, 1, 1024, 1]
    assert (grads == 1027).all()
    assert (state.scaler, state.count) == (32, 1)


def test_donation():
    """No two states share a buffer."""

    @functools.partial(jax.jit, donate_argnames="state")
    def step(state: Any) -> Any:
        return run(state, X)[0]

    first, second = jaxamp.DynamicScalerState(), jaxamp.DynamicScalerState()
    step(first)
    assert step(second).count == 1
    assert jaxamp.DynamicScalerState().scaler == 2**15


def test_the_state_is_halfsteps():
    state = jaxamp.DynamicScalerState(scaler=1024.0)
    state, finite, _ = halfstep.filter_grad(mean, state, policy="f16")(W, X)
    assert finite
    assert isinstance(state, jaxamp.DynamicScalerState)
    assert state.count == 1
    state = halfstep.DynamicLossScaling(1024.0)
    assert run(state, X)[0].counter == 1
