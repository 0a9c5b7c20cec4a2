"""The calls that the README of flashoptim-jax shows, and what its names mean."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from halfstep.compat import flashoptim_jax as compat

MAKERS: Any = {
    "adamw": (
        compat.flash_adamw,
        compat.flash_adamw_state_dict,
        compat.load_flash_adamw_state_dict,
    ),
    "adam": (compat.flash_adam, compat.flash_adamw_state_dict, compat.load_flash_adamw_state_dict),
    "lion": (compat.flash_lion, compat.flash_lion_state_dict, compat.load_flash_lion_state_dict),
    "sgd": (compat.flash_sgd, compat.flash_sgd_state_dict, compat.load_flash_sgd_state_dict),
    "sgdw": (compat.flash_sgdw, compat.flash_sgd_state_dict, compat.load_flash_sgd_state_dict),
}


def start() -> Any:
    return {
        "w": jnp.ones((8, 8), dtype=jnp.bfloat16),
        "big": jax.random.normal(jax.random.key(0), (128, 64), jnp.bfloat16),
        "b": jnp.zeros((8,), dtype=jnp.float32),
    }


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", MAKERS)
def test_init_step_and_checkpoint(name: str):
    make, to_dict, from_dict = MAKERS[name]
    params = start()
    grads = jax.tree.map(jnp.ones_like, params)
    tx = make(learning_rate=1e-2, weight_decay=1e-2)
    state = tx.init(params)
    step = jax.jit(tx.step)
    params, state = step(params, state, grads)
    restored = from_dict(to_dict(state))
    assert type(restored) is type(state)
    first, _ = step(params, state, grads)
    second, _ = step(params, restored, grads)
    for ours, theirs in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (np.asarray(first["big"] < start()["big"])).mean() > 0.9


@pytest.mark.rows(1)
@pytest.mark.parametrize("bits", [24, 32])
def test_float32_masters_round_trip(bits: int):
    params = start()
    tx = compat.flash_adamw(learning_rate=1e-3, weight_decay=1e-2, master_weight_bits=bits)
    params, state = tx.step(params, tx.init(params), jax.tree.map(jnp.ones_like, params))
    full = compat.reconstruct_weights(params, state.ecc)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(full))
    again, ecc = compat.set_fp32_params(full, param_template=params, master_weight_bits=bits)
    state = state._replace(ecc=ecc)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    tx.step(again, state, params)


@pytest.mark.parametrize(
    ("make", "theirs"),
    [
        (compat.flash_sgd, optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))),
        (compat.flash_sgdw, optax.chain(optax.sgd(0.1), optax.add_decayed_weights(-0.05))),
        (
            compat.flash_adam,
            optax.chain(optax.add_decayed_weights(0.5), optax.adam(0.1, eps_root=0.0)),
        ),
    ],
)
@pytest.mark.usefixtures("standard_promotion")
def test_weight_decay_is_coupled_or_not(make: Any, theirs: Any):
    params = {"w": jnp.full((3,), 2.0)}
    grads = {"w": jnp.array([1.0, -3.0, 0.5])}
    tx = make(0.1, weight_decay=0.5)
    ours, _ = tx.step(params, tx.init(params), grads)
    updates, _ = theirs.update(grads, theirs.init(params), params)
    wanted: Any = optax.apply_updates(params, updates)
    np.testing.assert_allclose(ours["w"], wanted["w"], rtol=1e-5)


@pytest.mark.usefixtures("standard_promotion")
def test_is_also_a_transformation():
    params = start()
    tx: Any = optax.chain(optax.clip_by_global_norm(1.0), compat.flash_adamw(1e-3))
    updates, _ = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_unquantized():
    params = start()
    state: Any = compat.flash_adamw(quantize=False).init(params)
    assert state.mu["big"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 64}, "group_size must be 32"),
        ({"param_groups": []}, "use optax.multi_transform"),
        ({"master_weight_bits": 16}, "master_bits must be 24, 32"),
    ],
)
def test_what_is_not_supported(options: Any, message: str):
    with pytest.raises(ValueError, match=message):
        compat.flash_adamw(**options)


def test_dampening_is_not_supported():
    with pytest.raises(ValueError, match="dampening must be 0"):
        compat.flash_sgd(dampening=0.1)


def test_leaves():
    low, rest = compat.split_leaf(jnp.float32(1) / 3, master_weight_bits=32)
    assert compat.reconstruct_leaf(low, rest) == jnp.float32(1) / 3
    assert compat.cast_tree_bf16({"a": jnp.ones(2), "i": jnp.arange(2)})["a"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="narrow_dtype=float16"):
        compat.split_leaf(jnp.ones(2), jnp.float16)


@pytest.mark.rows(1)
@pytest.mark.parametrize("group_size", [16, 32])
def test_moments_come_back(group_size: int):
    value = jax.random.normal(jax.random.key(0), (8, 64))
    mean, square = (
        compat.quantize_momentum(value, group_size),
        compat.quantize_variance(value**2, group_size),
    )
    assert isinstance(mean, compat.QuantizedArray)
    assert (mean.codes.dtype, square.codes.dtype) == (jnp.int8, jnp.uint8)
    assert mean.scale.shape == (8, 64 // group_size)
    top = jnp.max(jnp.abs(value))
    # Near the largest value, where its curve is coarsest, the code has steps of 1/64.
    assert jnp.max(jnp.abs(compat.dequantize_momentum(mean, group_size) - value)) <= top / 64
    roots = jnp.sqrt(compat.dequantize_variance(square, group_size))
    # 255 steps, and scales that are rounded up to bfloat16.
    assert jnp.max(jnp.abs(roots - jnp.abs(value))) <= top / 255 * (1 + 2**-7)


@pytest.mark.parametrize("inplace", [True, False])
def test_inplace_changes_no_bits(inplace: bool):
    params = start()
    grads = jax.tree.map(jnp.ones_like, params)
    made, usual = compat.flash_adamw(inplace=inplace), compat.flash_adamw()
    new, _ = made.step(params, made.init(params), grads)
    same, _ = usual.step(params, usual.init(params), grads)
    jax.tree.map(np.testing.assert_array_equal, new, same)
