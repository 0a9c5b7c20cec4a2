"""`halfstep.compat.jaxamp`: the scaler's state, and the transformations that it is applied to."""

import functools
import inspect
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import halfstep
import halfstep.compat.jaxamp as jaxamp

X = jnp.linspace(-1, 1, 16).reshape(4, 4)
W = jnp.full((4, 4), 0.1)  # No 16-bit format holds it.


@pytest.mark.rows(2)
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


# The state.


def test_the_state_is_a_named_tuple():
    state = jaxamp.DynamicScalerState(patience=3)
    assert isinstance(state, tuple)
    assert state._fields == ("patience", "adjust_factor", "scaler", "count", "total_resets")
    assert tuple(state) == (3, 2, 2**15, 0, 0)
    patience, adjust_factor, scaler, count, total_resets = state
    assert (patience, adjust_factor, scaler, count, total_resets) == state
    assert state._replace(scaler=1024.0)._asdict() == {
        "patience": 3,
        "adjust_factor": 2,
        "scaler": 1024,
        "count": 0,
        "total_resets": 0,
    }
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    assert paths == [f".{name}" for name in state._fields]


def test_a_state_is_changed_inside_jit():
    @jax.jit
    def step(state: Any, x: Any) -> Any:
        state, _ = run(state._replace(patience=jnp.int32(0)), x)
        return state

    state = step(jaxamp.DynamicScalerState(), X)
    assert (state.patience, state.scaler, state.count) == (0, 2**16, 0)
    made = jax.jit(lambda scaler: run(jaxamp.DynamicScalerState(scaler=scaler), X)[0])(6.0)
    assert (made.scaler, made.count) == (6, 1)


def test_the_state_is_carried_by_a_loop():
    state = jaxamp.DynamicScalerState(patience=1, scaler=1024.0)
    xs = jnp.stack([X, X, X.at[0, 0].set(jnp.inf), X])
    state, scalers = jax.lax.scan(
        lambda state, x: (run(state, x)[0], state.scaler), jax.tree.map(jnp.asarray, state), xs
    )
    assert scalers.tolist() == [1024, 1024, 2048, 1024]
    assert state == (1, 2, 1024, 1, 1)


def test_the_structure_of_the_state():
    state = jaxamp.DynamicScalerState()
    assert (state.patience, state.adjust_factor, state.scaler, state.count) == (2000, 2, 2**15, 0)
    assert (state.scaler.dtype, state.count.dtype) == (jnp.float32, jnp.int32)
    state = jaxamp.DynamicScalerState(
        jnp.array(10), jnp.array(4.0), jnp.array(1000.0), jnp.array(3)
    )
    assert tuple(state) == (10, 4, 1000, 3, 0)
    copy = pickle.loads(pickle.dumps(state))
    assert isinstance(copy, jaxamp.DynamicScalerState)
    assert copy == state


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"patience": -1}, "`patience` must be an integer, 0 or more; got -1"),
        ({"patience": 1.5}, "`patience` must be an integer, 0 or more; got 1.5"),
        ({"adjust_factor": 1.0}, "`adjust_factor` must be above 1; got 1.0"),
        ({"scaler": 0.0}, "`scaler` must be a finite number above 0; got 0.0"),
        ({"scaler": np.float32(np.inf)}, "`scaler` must be a finite number above 0; got inf"),
    ],
)
def test_mistakes_in_a_state(wrong: Any, message: str):
    with pytest.raises(ValueError, match=message):
        run(jaxamp.DynamicScalerState(**wrong), X)


@pytest.mark.parametrize(
    "transform", [jaxamp.dynamic_scale_grad, jaxamp.dynamic_scale_value_and_grad]
)
def test_mistakes_in_redo_on_nan(transform: Any):
    with pytest.raises(ValueError, match="`redo_on_nan` is an integer, 0 or more; got -1"):
        transform(jnp.sum, redo_on_nan=-1)
    with pytest.raises(ValueError, match="`redo_on_nan` is an integer, 0 or more; got -1"):
        jaxamp.dynamic_scale_tx(jax.grad, redo_on_nan=-1)


def mean(w: Any, x: Any) -> Any:
    return jnp.mean(w * x)


def run(state: Any, x: Any, **options: Any) -> tuple[Any, Any]:
    return jaxamp.dynamic_scale_grad(mean, **options)(W, x, dynamic_scaler_state=state)


def test_the_scaler_grows_after_more_good_steps_than_its_patience():
    state = jaxamp.DynamicScalerState(patience=3)
    scalers, counts = [], []
    for _ in range(9):
        state, _ = run(state, X)
        scalers.append(int(state.scaler) // 2**15)
        counts.append(int(state.count))
    assert scalers == [1, 1, 1, 2, 2, 2, 2, 4, 4]
    assert counts == [1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_resets_are_counted():
    state = jaxamp.DynamicScalerState()
    for x in (X, X.at[0, 0].set(jnp.nan), X, X.at[0, 0].set(jnp.inf)):
        state, _ = run(state, x)
    assert (state.total_resets, state.count, state.scaler) == (2, 0, 2**13)


@pytest.mark.parametrize("factor", [1.5, 3])
def test_any_scaler_and_any_factor(factor: float):
    """Only powers of two are exact; the others round as in jaxamp."""
    state = jaxamp.DynamicScalerState(patience=0, adjust_factor=factor, scaler=1000)
    state, grads = run(state, X)
    assert state.scaler == 1000 * factor
    np.testing.assert_allclose(grads, X / 16, rtol=2 * np.finfo(np.float32).eps)
    state, _ = run(state, X.at[0, 0].set(jnp.nan))
    assert state.scaler == 1000


def test_the_scaler_has_limits_and_returns_from_them():
    bad = X.at[0, 0].set(jnp.nan)
    state = jaxamp.DynamicScalerState(patience=0, scaler=4.0)
    for _ in range(5):
        state, _ = run(state, bad)
    assert state.scaler == 1
    state, grads = run(state, X)
    assert state.scaler == 2
    assert (grads == X / 16).all()
    state = jaxamp.DynamicScalerState(patience=0, scaler=2.0**125)
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


@pytest.mark.rows(3)
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


@pytest.mark.slow
def test_redo_under_vmap():
    def one(scaler: Any, x: Any) -> Any:
        state = jaxamp.DynamicScalerState(scaler=scaler)
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


def test_the_scale_goes_on_as_halfsteps():
    """As the migration guide has it: a named tuple is not a loss scaling of halfstep."""
    state = jaxamp.DynamicScalerState(scaler=1024.0)
    with pytest.raises(TypeError, match="got DynamicScalerState"):
        # Unwrapped: in tests beartype would object first.
        inspect.unwrap(halfstep.filter_value_and_grad)(mean, state, policy="f16")  # pyright: ignore[reportArgumentType]
    scaling = halfstep.DynamicLossScaling(float(state.scaler), period=int(state.patience))
    scaling, finite, _ = halfstep.filter_grad(mean, scaling, policy="f16")(W, X)
    assert finite
    assert (scaling.loss_scaling, scaling.counter) == (1024, 1)
    wrong: Any = {"dynamic_scaler_state": scaling}
    with pytest.raises(TypeError, match="`dynamic_scaler_state` must be a DynamicScalerState"):
        jaxamp.dynamic_scale_grad(mean)(W, X, **wrong)


# Other transformations.


def test_a_transformation_of_choice():
    def outputs(w: Any, x: Any) -> Any:
        return jnp.tanh(w * x)

    scaled = jaxamp.dynamic_scale_tx(jax.jacrev)(outputs, argnums=1)
    state, jacobian = scaled(W, X, dynamic_scaler_state=jaxamp.DynamicScalerState())
    np.testing.assert_array_equal(jacobian, jax.jacrev(outputs, argnums=1)(W, X))
    assert (state.count, state.scaler) == (1, 2**15)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("redo_on_nan", [0, 9])
def test_the_gradient_as_a_transformation_of_choice(redo_on_nan: int, jit: bool):
    """The same as `dynamic_scale_grad`."""
    func = jaxamp.dynamic_scale_tx(eqx.filter_grad, redo_on_nan=redo_on_nan)(overflowing)
    state = jaxamp.DynamicScalerState(scaler=1024.0)
    made = (jax.jit(func) if jit else func)(*OPERANDS, dynamic_scaler_state=state)
    expected = jaxamp.dynamic_scale_grad(overflowing, redo_on_nan=redo_on_nan)(
        *OPERANDS, dynamic_scaler_state=state
    )
    assert made[0] == expected[0]
    assert made[0].scaler == (32 if redo_on_nan else 512)
    np.testing.assert_array_equal(made[1], expected[1])


def test_a_value_and_an_auxiliary_output():
    """The first of two results is scaled. Without a function for it, everything is unscaled."""

    def loss(w: Any, x: Any) -> tuple[Any, Any]:
        return jnp.sum(w * x), {"eight": jnp.float32(8.0), "count": jnp.int32(3)}

    state = jaxamp.DynamicScalerState(scaler=4.0)
    tx = jaxamp.dynamic_scale_tx(jax.value_and_grad)
    state, ((value, aux), grads) = tx(loss, has_aux=True)(W, X, dynamic_scaler_state=state)
    assert value == jnp.sum(W * X)
    np.testing.assert_array_equal(grads, X)
    assert (aux["eight"], aux["count"]) == (2, 3)
    assert aux["count"].dtype == jnp.int32

    def unscale(results: Any, state: Any) -> Any:
        (value, aux), grads = results
        return (value / state.scaler, aux), grads / state.scaler

    tx = jaxamp.dynamic_scale_tx(jax.value_and_grad, 0, unscale)
    state, ((value, aux), grads) = tx(loss, has_aux=True)(W, X, dynamic_scaler_state=state)
    assert (value, aux["eight"]) == (jnp.sum(W * X), 8)
    np.testing.assert_array_equal(grads, X)


def test_functions_that_scale_and_unscale():
    def scale(result: Any, state: Any) -> Any:
        return {"loss": result["loss"] * state.scaler}

    def loss(w: Any) -> Any:
        return {"loss": jnp.sum(w * X)}

    def transform(fun: Any, power: int) -> Any:
        return jax.grad(lambda w: fun(w)["loss"] ** power)

    tx = jaxamp.dynamic_scale_tx(
        transform, unscale_fn=lambda g, state: g / state.scaler**2, scale_fn=scale
    )
    state, grads = tx(loss, 2)(W, dynamic_scaler_state=jaxamp.DynamicScalerState(scaler=8.0))
    np.testing.assert_allclose(grads, 2 * jnp.sum(W * X) * X, rtol=1e-6, atol=1e-6)
    assert state.count == 1
