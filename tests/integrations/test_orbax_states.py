"""Checkpoints: states of every kind come back, bit by bit."""

import pathlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep
from halfstep import optim, quant
from tests.integrations._bits import assert_same, recipes_state, through

pytestmark = pytest.mark.core

orbax = pytest.importorskip("halfstep.integrations.orbax")
Checkpoints, CheckpointError = orbax.Checkpoints, orbax.CheckpointError
DamagedCheckpointError = orbax.DamagedCheckpointError


PARAMS = {"w": (64, 128), "b": (3,)}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "flash_adamw": optim.flash_adamw(1e-3, rounding="stochastic"),
    "flash_adamw, 32 bits": optim.flash_adamw(1e-3, master_bits=32),
    "flash_lion": optim.flash_lion(1e-4),
    "flash_sgd": optim.flash_sgd(1e-2, 0.9),
    "master of compressed": optim.master(optim.compress(optax.adamw(1e-3)), "split8"),
}


def random_like(tree: Any) -> Any:
    """A tree of the same dtypes whose every bit is random: NaNs and all."""
    random = np.random.default_rng(0)

    def of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            size = leaf.size * leaf.dtype.itemsize
            raw = np.frombuffer(random.bytes(size), leaf.dtype).reshape(leaf.shape)
            return jnp.asarray(raw if leaf.dtype != bool else raw.view(np.uint8) % 2 == 1)
        return leaf

    return jax.tree.map(of, tree)


@pytest.mark.usefixtures("standard_promotion")
def test_every_optimizer(tmp_path: pathlib.Path):
    params = {name: jnp.ones(shape) for name, shape in PARAMS.items()}
    fresh = {
        name: tx.prepare(params)
        if isinstance(tx, optim.Transformation)
        else (params, tx.init(params))
        for name, tx in OPTIMIZERS.items()
    }
    state = random_like(fresh)
    assert_same(through(tmp_path, state, fresh), state)


def some_state() -> dict[str, Any]:
    key = jax.random.key(3)
    return {
        "model": eqx.nn.MLP(2, 3, 4, 1, key=key),
        "scaling": (halfstep.DynamicLossScaling(2**9), halfstep.NoLossScaling()),
        "static": halfstep.StaticLossScaling(8),
        "ledger": halfstep.Ledger(limit=7).record(False).record(True),
        "quantized": quant.quantize(jnp.arange(128.0).reshape(2, 64), "int8"),
        "keys": jax.random.split(key, 3),
        "rbg": jax.random.key(1, impl="rbg"),
        "legacy": jax.random.PRNGKey(2),
        "python": {"epoch": 3, "rate": 1e-3, "name": "run", "done": True, "z": 1 - 2j},
        "numpy": {"wide": np.arange(3), "scalar": np.float64(0.1), "c": np.ones(2, np.complex128)},
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "bool": jnp.asarray([True, False]),
        "int4": jnp.arange(-4, 4).astype(jnp.int4),
        "f4": jnp.asarray([0.5, -0.0, 6.0], jnp.float4_e2m1fn),
        "f8": jnp.asarray([0.5, -0.0, jnp.nan], jnp.float8_e4m3fn),
        "c64": jnp.asarray([1 + 2j], jnp.complex64),
        "odd/name": {"a.b": jnp.ones(()), "none": None},
    }


def blank(leaf: Any) -> Any:
    is_number = eqx.is_array_like(leaf) and hasattr(leaf, "dtype")
    is_key = is_number and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if not is_number or is_key else leaf * np.zeros((), leaf.dtype)


def test_every_kind_of_leaf(tmp_path: pathlib.Path):
    state = some_state()
    python = {"epoch": 0, "rate": 0.0, "name": "", "done": False, "z": 0j}
    fresh = {**jax.tree.map(blank, state), "python": python}
    got = through(tmp_path, state, fresh)
    assert_same(got, state)
    assert not eqx.tree_equal(got, fresh)
    assert got["model"].activation is state["model"].activation
    assert jax.random.key_impl(got["rbg"]) == jax.random.key_impl(state["rbg"])


def test_every_recipe(tmp_path: pathlib.Path):
    fresh = recipes_state()
    state = random_like(fresh)
    assert_same(through(tmp_path, state, fresh), state)


def test_what_is_part_of_the_program_is_kept(tmp_path: pathlib.Path):
    fresh = {"f8": recipes_state()["f8-delayed"], "ledger": halfstep.Ledger(limit=3)}
    off = eqx.tree_at(lambda s: s.step, fresh["f8"], jnp.asarray(5))
    name = next(iter(off.sites))
    off = halfstep.F8Scaling(
        loss=halfstep.DynamicLossScaling(2**4, period=9),
        sites=off.sites,
        key=off.key,
        step=off.step,
        recipe=off.recipe,
        off=(name,),
    )
    fresh["f8"] = halfstep.F8Scaling(
        loss=halfstep.DynamicLossScaling(2**5),
        sites=off.sites,
        key=off.key,
        step=off.step,
        recipe=off.recipe,
    )
    state = {"f8": off, "ledger": halfstep.Ledger(limit=8, fallbacks=((name, 4),))}
    got = through(tmp_path, state, fresh)
    assert_same(got, state)
    assert got["f8"].off == (name,)
    assert got["f8"].loss.period == 9
    assert got["ledger"].fallbacks == ((name, 4),)
