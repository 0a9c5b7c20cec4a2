"""State through Orbax, onto another mesh, and into an optimizer with other options."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from halfstep import optim

ocp = pytest.importorskip("orbax.checkpoint")
SHAPE = (256, 128)
FLASH = optim.flash_adamw(1e-3)
OPTIMIZERS = {
    "flash_adamw": FLASH,
    "flash_adamw, 32 bits": optim.flash_adamw(1e-3, master_bits=32),
    "flash_lion": optim.flash_lion(1e-4),
    "master of compressed adamw": optim.master(optim.compress(optax.adamw(1e-3)), "split8"),
}


def mesh(*shape: int) -> Any:
    names = ("a", "b")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def where(spec: Any, *shape: int) -> Any:
    kept = NamedSharding(mesh(*shape), P())
    return {"w": NamedSharding(mesh(*shape), spec), "b": kept}


def grads(number: int, params: Any) -> Any:
    key = jax.random.key(number)
    return {name: jax.random.normal(key, p.shape, p.dtype) for name, p in params.items()}


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("standard_promotion")
def test_restored_onto_another_mesh(name: str, tmp_path: Any):
    tx = OPTIMIZERS[name]
    whole = {"w": jax.random.normal(jax.random.key(0), SHAPE), "b": jnp.ones(3)}
    params, state = tx.prepare(jax.device_put(whole, where(P("a"), 4)))
    step = jax.jit(tx.step)
    params, state = step(params, state, grads(0, params))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", (params, state))
        checkpointer.wait_until_finished()
        new = where(P("b", "a"), 2, 2)
        shapes = jax.tree.map(
            lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), params, new
        )
        like = jax.eval_shape(tx.init, shapes)
        placed = jax.tree.map(
            lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
            like,
            optim.state_shardings(like, shapes),
        )
        got_params, got_state = checkpointer.restore(tmp_path / "step", (shapes, placed))
    for was, got in zip(
        jax.tree.leaves((params, state)), jax.tree.leaves((got_params, got_state)), strict=True
    ):
        assert got.dtype == was.dtype
        np.testing.assert_array_equal(got, was)
    coded = optim.coded(got_state)[0]
    assert coded.scale.sharding.is_equivalent_to(new["w"], 2)
    # And it goes on as it would have.
    after, _ = step(params, state, grads(1, params))
    other, _ = jax.jit(tx.step)(got_params, got_state, grads(1, got_params))
    np.testing.assert_array_equal(after["w"], other["w"])


CHANGED = {
    "other master": (optim.flash_adamw(1e-3, master_bits=32), r"master of w.*32 bits.*24 bits"),
    "no master": (optim.flash_adamw(1e-3, master_bits=None), r"must be of none.*24 bits"),
    "other optimizer": (optim.flash_lion(1e-3), r"stores no second moment; the state of w has one"),
    "no moments": (optim.flash_sgd(1e-3), r"stores no first moment"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_configuration_says_what_changed(name: str):
    params, state = FLASH.prepare({"w": jnp.ones(SHAPE)})
    tx, message = CHANGED[name]
    with pytest.raises(optim.StateError, match=message):
        tx.step(params, state, grads(0, params))


def test_other_parameters_are_an_error():
    params, state = FLASH.prepare({"w": jnp.ones(SHAPE)})
    other = {"w": jnp.ones((128, 256), jnp.bfloat16)}
    with pytest.raises(optim.StateError, match=r"first moment of w must be of shape \[128, 256\]"):
        FLASH.step(other, state, other)
    with pytest.raises(optim.StateError, match="made for parameters of another structure"):
        FLASH.step({"v": params["w"]}, state, {"v": params["w"]})
    with pytest.raises(
        optim.StateError,
        match=r"the master of w.*must be of none .*has 24 bits. Pass the master_bits",
    ):
        FLASH.step({"w": jnp.ones(SHAPE)}, state, params)
    with pytest.raises(optim.StateError, match="must be a FlashState"):
        FLASH.step(params, (1, 2), params)


@pytest.mark.usefixtures("standard_promotion")
def test_other_codes_are_an_error():
    params = {"w": jnp.ones(SHAPE)}
    state = optim.compress(optax.adamw(1e-3)).init(params)
    tx = optim.compress(optax.adamw(1e-3), codes={"**/mu": "f8"})
    with pytest.raises(optim.StateError, match=r"mu/w must be stored 'f8'.*codes of int8"):
        tx.step(params, state, params)


def test_parameters_without_shardings():
    shapes = jax.eval_shape(lambda: {"w": jnp.ones(SHAPE)})
    with pytest.raises(ValueError, match="shardings over one mesh; got no mesh"):
        optim.state_shardings(jax.eval_shape(FLASH.init, shapes), shapes)


def test_few_scales_are_not_divided():
    """One scale for a row of 32 elements, which four devices cannot share."""
    tx, shape = optim.flash_adamw(1e-3, min_size=64), (16, 32)
    whole = where(P(None, "a"), 4)["w"]
    shapes = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)}
    with pytest.warns(UserWarning, match=r"of w, each has 8 of 32 elements along axis 1"):
        shardings = optim.state_shardings(jax.eval_shape(tx.init, shapes), shapes)
    assert shardings.first["w"].codes == whole
    assert shardings.first["w"].scale.spec == P(None, None)
    made = jax.jit(tx.init, out_shardings=shardings)({"w": jnp.ones(shape, jnp.bfloat16)})
    assert made.first["w"].scale.shape == (16, 1)
