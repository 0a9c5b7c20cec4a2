"""The update: bit-identical to bare Optax, or nothing at all."""

import functools
import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep
from halfstep import DynamicLossScaling, Ledger

pytestmark = [pytest.mark.core, pytest.mark.types, pytest.mark.usefixtures("standard_promotion")]


def chain() -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule))


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "sgd with momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lbfgs": lambda: optax.lbfgs(memory_size=3),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "clip and schedule": chain,
    "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True, "b": False, "n": False}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
}


# XLA:CPU compiles the body of a loop over few bytes as one function. With JAX 0.12, LLVM makes
# another multiply-add of `a * b + c * d` there than in the bare step: the last bit differs. Without
# that pass both steps are compiled alike; a larger model is compiled alike anyway, see below.
SAME_FUSIONS = {"xla_disable_hlo_passes": "small-while-loop-hoisting"}


def model_of(key, width: int = 8) -> dict[str, Any]:
    return {"w": jax.random.normal(key, (width, width)), "b": jnp.ones(width), "n": jnp.zeros(())}


def loss(model, x):
    return jnp.mean((x @ model["w"] + model["b"] + model["n"]) ** 2)


def extras(name: str, value, grads, x) -> dict[str, Any]:
    if name != "lbfgs":
        return {}
    return {"value": value, "grad": grads, "value_fn": lambda params: loss(params, x)}


@pytest.mark.rows(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_finite_steps_are_the_bare_optax_step(name: str, getkey):
    """Five steps of each, compiled apart; every bit of the model and of the state."""
    assert_bare_step(name, getkey, 8, SAME_FUSIONS)


@pytest.mark.bits
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_finite_steps_of_a_larger_model_are_the_bare_optax_step(name: str, getkey):
    """The same as users compile it."""
    # A conditional hides from XLA how many bytes the loop reads: it counts as small at any width.
    hidden = name == "MultiSteps"
    assert_bare_step(name, getkey, 256, SAME_FUSIONS if hidden else {})


def assert_bare_step(name: str, getkey, width: int, compiler_options: dict[str, Any]) -> None:
    optimizer = OPTIMIZERS[name]()
    model, x = model_of(getkey(), width), jax.random.normal(getkey(), (4, width))
    jit = functools.partial(jax.jit, compiler_options=compiler_options)

    @jax.jit
    def gradients(model, x):
        return jax.value_and_grad(loss)(model, x)

    @jit
    def bare(model, state, value, grads, x):
        updates, state = optimizer.update(grads, state, model, **extras(name, value, grads, x))
        return optax.apply_updates(model, updates), state

    @jit
    def ours(model, state, value, grads, finite, x):
        return halfstep.optimizer_update(
            model, optimizer, state, grads, finite, **extras(name, value, grads, x)
        )

    state = optimizer.init(model)
    theirs = mine = (model, state)
    for _ in range(5):
        value, grads = gradients(theirs[0], x)
        theirs = bare(*theirs, value, grads, x)
        mine = ours(*mine, value, grads, jnp.asarray(True), x)
        assert jax.tree.structure(mine) == jax.tree.structure(theirs)
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(mine), jax.tree.leaves(theirs), strict=True
        ):
            where = jax.tree_util.keystr(path)
            assert a.dtype == b.dtype, where
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), where


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_a_bad_step_changes_nothing(name: str, poison: float, getkey):
    optimizer = OPTIMIZERS[name]()
    model, x = model_of(getkey()), jax.random.normal(getkey(), (4, 8))
    state = optimizer.init(model)

    @jax.jit
    def step(model, state, grads):
        finite = halfstep.all_finite(grads)
        value = jnp.asarray(1.0)
        return halfstep.optimizer_update(
            model, optimizer, state, grads, finite, **extras(name, value, grads, x)
        )

    good = jax.grad(loss)(model, x)
    before = step(model, state, good)
    bad = {**good, "w": good["w"].at[3, 3].set(poison)}
    after = step(*before, bad)
    assert eqx.tree_equal(before, after)
    assert not eqx.tree_equal(step(*after, good)[0], after[0])


def test_equinox_model_with_static_parts(getkey):
    model = eqx.nn.MLP(4, 2, 8, 1, key=getkey())
    optimizer = optax.adamw(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x = jax.random.normal(getkey(), (8, 4))

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    @eqx.filter_jit(donate="all")
    def step(model, state, scaling, ledger, x):
        scaling, finite, grads = halfstep.filter_grad(loss, scaling, policy="f16")(model, x)
        model, state = halfstep.optimizer_update(model, optimizer, state, grads, finite)
        return model, state, scaling, ledger.record(finite)

    scaling, ledger = DynamicLossScaling(), Ledger()
    first = float(loss(model, x))
    for _ in range(20):
        model, state, scaling, ledger = step(model, state, scaling, ledger, jnp.copy(x))
    assert float(loss(model, x)) < first
    assert model.activation is jax.nn.relu
    assert int(ledger.applied) == 20


def test_an_unchecked_verdict_compiles_the_bare_step():
    optimizer = optax.sgd(0.1)
    verdict = halfstep.Verdict(None, None, None)
    ours = jax.make_jaxpr(
        lambda m, g: halfstep.optimizer_update(m, optimizer, optimizer.init(m), g, verdict)
    )(jnp.ones(3), jnp.ones(3))
    bare = jax.make_jaxpr(
        lambda m, g: halfstep.apply_gradients(m, optimizer, optimizer.init(m), g)
    )(jnp.ones(3), jnp.ones(3))
    assert str(ours) == str(bare)


def test_state_made_for_16_bit_parameters_is_explained():
    """Optax widens such a state on its first step; a skip could not return to it."""
    params = jnp.ones(3, jnp.bfloat16)
    optimizer = optax.adam(1e-3)
    state = optimizer.init(params)
    with pytest.raises(TypeError, match=r"bfloat16\[3\] became float32\[3\].*cast_to_float32"):
        jax.jit(lambda f: halfstep.optimizer_update(params, optimizer, state, jnp.ones(3), f))(True)


def test_extra_arguments_that_the_optimizer_does_not_take():
    def update(updates, state, params=None):
        del params
        return updates, state

    plain = optax.GradientTransformation(lambda params: (), update)
    with pytest.raises(TypeError, match="unexpected keyword argument 'value'"):
        halfstep.optimizer_update(jnp.ones(2), plain, (), jnp.ones(2), True, value=1.0)


def test_something_else_than_an_optimizer():
    model, optimizer = {"w": jnp.ones(3)}, optax.sgd(1.0)
    state = optimizer.init(model)
    message = "`optimizer` must be an Optax optimizer, such as .*; got dict. Write optimizer_update"
    with pytest.raises(TypeError, match=message):
        inspect.unwrap(halfstep.optimizer_update)(optimizer, model, model, True, state)
