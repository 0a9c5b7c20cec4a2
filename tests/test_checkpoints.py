"""State through checkpoints, without pickle: Equinox, msgpack, Orbax."""

import io
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep import DynamicLossScaling, Ledger, NoLossScaling, StaticLossScaling, Verdict

pytestmark = [pytest.mark.core, pytest.mark.types]


def used() -> dict[str, Any]:
    """State in the middle of a run: no field at its initial value."""
    scaling = DynamicLossScaling(2.0**13, 2.0**3, 2.0**20, period=7, factor=4)
    ledger = Ledger(limit=9)
    for finite in (True, True, False, True, False, False, True, True, True):
        verdict = Verdict(jnp.asarray(finite), jnp.asarray(True), jnp.asarray(-1 if finite else 5))
        scaling, ledger = scaling.adjust(verdict), ledger.record(verdict)
    return {
        "dynamic": scaling,
        "static": StaticLossScaling(2.0**5),
        "none": NoLossScaling(),
        "ledger": ledger,
        "w": jnp.arange(3, dtype=jnp.bfloat16),
    }


def fresh() -> dict[str, Any]:
    return {
        "dynamic": DynamicLossScaling(2.0**13, 2.0**3, 2.0**20, period=7, factor=4),
        "static": StaticLossScaling(2.0**0),
        "none": NoLossScaling(),
        "ledger": Ledger(limit=9),
        "w": jnp.zeros(3, jnp.bfloat16),
    }


def through_equinox(tree, like, path):
    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, tree)
    buffer.seek(0)
    return eqx.tree_deserialise_leaves(buffer, like)


def through_msgpack(tree, like, path):
    flax = pytest.importorskip("flax.serialization")
    import halfstep.integrations.flax  # noqa: F401

    return flax.from_bytes(like, flax.to_bytes(tree))


def through_orbax(tree, like, path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", tree)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return checkpointer.restore(path / "state", abstract)


WAYS = {"equinox": through_equinox, "msgpack": through_msgpack, "orbax": through_orbax}


@pytest.mark.parametrize("way", WAYS)
def test_round_trip(way: str, tmp_path):
    before = used()
    after = WAYS[way](before, fresh(), tmp_path)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    # And it goes on from there as if nothing had happened.
    assert eqx.tree_equal(
        jax.tree.map(jnp.asarray, after["dynamic"]).adjust(True), before["dynamic"].adjust(True)
    )
    assert eqx.tree_equal(
        jax.tree.map(jnp.asarray, after["ledger"]).record(False), before["ledger"].record(False)
    )


@pytest.mark.parametrize("way", WAYS)
def test_the_comparison_can_fail(way: str, tmp_path):
    before = used()
    after = WAYS[way](before, fresh(), tmp_path)
    assert not eqx.tree_equal(after["dynamic"], fresh()["dynamic"])
    assert not eqx.tree_equal(after["ledger"], fresh()["ledger"])
