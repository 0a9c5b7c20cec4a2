"""Moments of 4 bits: bytes, the step, layouts over devices, and states of another width."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from halfstep import optim, quant

SHAPE = (64, 256)
OPTIMIZERS: dict[str, Any] = {
    "flash_adamw": (optim.flash_adamw(1e-3, moment_bits=4), 4.125),
    "flash_adam": (optim.flash_adam(1e-3, moment_bits=4), 4.125),
    "flash_lion": (optim.flash_lion(1e-4, moment_bits=4), 3.5625),
    "flash_sgd": (optim.flash_sgd(1e-2, 0.9, moment_bits=4), 3.5625),
}


def of_bits(bits: Any, **options: Any) -> Any:
    return optim.flash_adamw(1e-3, moment_bits=bits, **options)


def start(shape: tuple[int, ...] = SHAPE) -> Any:
    return {"w": jax.random.normal(jax.random.key(0), shape) / 16, "b": jnp.zeros(64)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes(name: str):
    tx, most = OPTIMIZERS[name]
    shape = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    made = jax.eval_shape(tx.prepare, shape)
    # The count is four bytes.
    assert optim.stored_bytes(made) <= most * math.prod((4096, 4096)) + 4


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_small_problem_is_learned(name: str):
    """Least squares, with the rates of each optimizer."""
    tx, _ = OPTIMIZERS[name]
    x = jax.random.normal(jax.random.key(1), (256, 64))
    y = x @ jax.random.normal(jax.random.key(2), SHAPE) / 8

    def loss(params: Any) -> Any:
        return jnp.mean((x @ params["w"].astype(jnp.float32) - y) ** 2)

    def body(carry: Any, _: None) -> Any:
        value, grads = jax.value_and_grad(loss)(carry[0])
        return tx.step(*carry, grads), value

    _, losses = jax.jit(lambda made: jax.lax.scan(body, made, None, 200))(tx.prepare(start()))
    assert jnp.isfinite(losses).all()
    assert losses[-1] < losses[0]


def test_random_rounding_is_right_on_average():
    """The first moment of many seeds has the mean that it has in float32."""
    params = {"w": jnp.zeros(SHAPE)}
    grads = [{"w": jax.random.normal(jax.random.key(i), SHAPE)} for i in range(3)]
    exact = sum(0.1 * 0.9 ** (2 - i) * grad["w"] for i, grad in enumerate(grads))

    def moment(seed: int) -> Any:
        tx = of_bits(4, seed=seed)
        made = params, tx.init(params)
        for grad in grads:
            made = tx.step(*made, grad)
        return quant.dequantize(made[1].first["w"], "int4", shape=SHAPE)

    drawn = jnp.stack([moment(seed) for seed in range(16)])
    error = jnp.mean(drawn, axis=0) - exact
    # A code is a seventh of the largest of a group, of which a mean of 16 is a quarter away.
    assert jnp.sqrt(jnp.mean(error**2)) < jnp.max(jnp.abs(exact)) / 7 / 4
    # Of all elements the mean is far nearer.
    assert jnp.abs(jnp.mean(error)) < 1e-3


@pytest.mark.rows(1)
@pytest.mark.parametrize("spec", [P("d"), P(None, "d")])
def test_devices_need_nothing_of_one_another(spec: P):
    tx = of_bits(4)
    where = NamedSharding(jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,)), spec)
    params, state = tx.prepare({"w": jax.device_put(jnp.ones((128, 256)), where)})
    grads = {"w": jax.device_put(jnp.full((128, 256), 0.1, jnp.bfloat16), where)}
    for array in (*state.first["w"], *state.second["w"]):
        assert array.sharding.is_equivalent_to(where, 2)
    compiled = jax.jit(tx.step).lower(params, state, grads).compile()
    text = compiled.as_text()
    assert text is not None
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in text
    alone = jax.tree.map(jnp.asarray, jax.device_get((params, state, grads)))
    for a, b in zip(
        jax.tree.leaves(compiled(params, state, grads)),
        jax.tree.leaves(jax.jit(tx.step)(*alone)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_shardings_of_its_state():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    shapes = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(mesh, P("d")))}
    _, state = jax.eval_shape(optim.sharded(of_bits(4).prepare, shapes), shapes)
    assert state.first["w"].codes.shape == (64, 128)
    found = optim.state_shardings(state, shapes).first["w"]
    assert found.codes.spec == found.scale.spec == P("d")


def test_a_state_of_another_width_says_what_to_type():
    for made, used in ((8, 4), (4, 8)):
        params, state = of_bits(made).prepare(start())
        with pytest.raises(
            optim.StateError, match=rf"w must be in {used} bits.*Pass moment_bits={made}"
        ):
            of_bits(used).step(params, state, params)


def test_optax_may_inject_hyperparameters():
    """It makes arrays of all numbers, of defaults too."""
    statics = ("moment_bits",)
    injected = optax.inject_hyperparams(optim.flash_adamw, static_args=statics)
    state: Any = injected(learning_rate=1e-3, moment_bits=4).init(start())
    assert state.inner_state.first["w"].codes.dtype == jnp.uint8
    state = optax.inject_hyperparams(optim.flash_adamw)(learning_rate=1e-3).init(start())
    assert state.inner_state.first["w"].codes.dtype == jnp.int8


@pytest.mark.parametrize("bad", [2, "int4", None])
def test_other_widths_are_an_error(bad: Any):
    with pytest.raises((ValueError, TypeError), match="moment_bits"):
        of_bits(bad)
