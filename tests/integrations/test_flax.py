"""Checkpoints by `flax.serialization`."""

import dataclasses
import subprocess
import sys
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import halfstep
import halfstep.integrations.flax
from halfstep import DynamicLossScaling, Ledger, NoLossScaling, StaticLossScaling, Verdict

pytestmark = [pytest.mark.core, pytest.mark.types]


def verdict() -> Verdict:
    return Verdict(jnp.asarray(False), jnp.asarray(True), jnp.asarray(3, jnp.int32))


# What is saved, and a target whose every field differs from it where it can.
CASES = {
    "dynamic": (
        DynamicLossScaling(2.0**12, 2.0, 2.0**20, period=7, factor=4).adjust(True),
        DynamicLossScaling(),
    ),
    "static": (StaticLossScaling(2.0**7), StaticLossScaling(1.0)),
    "none": (NoLossScaling(), NoLossScaling()),
    "ledger": (Ledger(limit=9).record(True).record(verdict()), Ledger()),
    "ledger-of-fallbacks": (Ledger(fallbacks=(("up", 7), ("down", 9))).record(True), Ledger()),
    "ledger-without-limit": (Ledger().record(False), Ledger(limit=2)),
    "verdict": (verdict(), Verdict(jnp.asarray(True), jnp.asarray(False), jnp.int32(-1))),
    "unchecked": (Verdict(None, None, None), Verdict(None, None, None)),
    "vmapped": (
        jax.vmap(lambda ok: DynamicLossScaling().adjust(ok))(jnp.array([True, False])),
        jax.vmap(lambda ok: DynamicLossScaling().adjust(ok))(jnp.array([True, True])),
    ),
}


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert jtu.tree_structure(ours) == jtu.tree_structure(theirs)
    for field in dataclasses.fields(theirs):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        assert type(mine) is type(other), field.name
        if isinstance(other, jax.Array):
            assert mine.dtype == other.dtype
            assert np.asarray(mine).tobytes() == np.asarray(other).tobytes(), field.name
        else:
            assert mine == other, field.name


@pytest.mark.parametrize("case", CASES)
def test_every_field_survives(case: str):
    saved, target = CASES[case]
    data = flax.serialization.to_bytes({"it": saved, "step": 3})
    restored = flax.serialization.from_bytes({"it": target, "step": 0}, data)
    assert restored["step"] == 3
    assert_same(restored["it"], saved)


@pytest.mark.parametrize("case", CASES)
def test_an_abstract_target_is_enough(case: str):
    saved, target = CASES[case]
    shapes = jax.eval_shape(lambda: target)
    assert_same(flax.serialization.from_bytes(shapes, flax.serialization.to_bytes(saved)), saved)


def test_a_restored_scaling_works_on_without_a_retrace():
    traces = []

    @jax.jit
    def adjust(scaling: DynamicLossScaling) -> DynamicLossScaling:
        traces.append(1)
        return scaling.adjust(jnp.asarray(True))

    scaling = adjust(DynamicLossScaling(2.0**4, period=2))
    data = flax.serialization.to_bytes(scaling)
    restored = adjust(flax.serialization.from_bytes(DynamicLossScaling(), data))
    assert restored.loss_scaling == 2**5
    assert len(traces) == 1


@pytest.mark.usefixtures("standard_promotion")
def test_a_train_state_with_a_scaling():
    class MixedState(TrainState):
        scaling: Any
        ledger: Any

    def make(scale: float) -> MixedState:
        return MixedState.create(
            apply_fn=lambda params, x: params["w"] * x,
            params={"w": jnp.full(3, scale)},
            tx=optax.adam(1e-3),
            scaling=DynamicLossScaling(scale),
            ledger=Ledger(limit=5),
        )

    state = make(8.0).apply_gradients(grads={"w": jnp.ones(3)})
    state = state.replace(ledger=state.ledger.record(False))
    restored: Any = flax.serialization.from_bytes(make(1.0), flax.serialization.to_bytes(state))
    assert_same(restored.scaling, state.scaling)
    assert_same(restored.ledger, state.ledger)
    for ours, theirs in zip(jtu.tree_leaves(restored), jtu.tree_leaves(state), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("counter"), r"DynamicLossScaling at `\./s` needs exactly.*saved are"),
        (lambda d: d.update(extra=1), "needs exactly the fields.*'extra'"),
        (lambda d: d.update(period="7"), "`period` of DynamicLossScaling.*must be int.*'7'"),
        (lambda d: d.update(period=None), "`period` of DynamicLossScaling.*must be int.*None"),
        (
            lambda d: d.update(factor=True),
            "`factor` of.*must be float; .* is True. Restore a state that",
        ),
        (
            lambda d: d.update(loss_scaling=np.ones((), np.float16)),
            r"`loss_scaling` of.*must be float32\[\].*is float16\[\]",
        ),
        (
            lambda d: d.update(counter=np.zeros(2, np.int32)),
            r"`counter` of.*must be int32\[\].*is int32\[2\]",
        ),
        (lambda d: d.update(counter=None), r"`counter` of.*must be int32\[\].*is None"),
    ],
)
def test_wrong_fields_are_named(change: Any, message: str):
    state = flax.serialization.to_state_dict({"s": DynamicLossScaling()})
    change(state["s"])
    with pytest.raises(ValueError, match=message):
        flax.serialization.from_state_dict({"s": DynamicLossScaling()}, state)


def test_another_type_is_no_target():
    data = flax.serialization.to_bytes(DynamicLossScaling())
    with pytest.raises(ValueError, match=r"StaticLossScaling at .* needs exactly.*'counter'"):
        flax.serialization.from_bytes(StaticLossScaling(1.0), data)
    with pytest.raises(ValueError, match=r"NoLossScaling at .* needs exactly the fields \[\]"):
        flax.serialization.from_bytes(NoLossScaling(), data)
    data = flax.serialization.to_bytes(Verdict(None, None, None))
    with pytest.raises(ValueError, match=r"`finite` of Verdict.*must be bool\[\].*is None"):
        flax.serialization.from_bytes(verdict(), data)


def test_every_pytree_of_the_core_is_registered():
    public = (getattr(halfstep, name) for name in dir(halfstep))
    kinds = [x for x in public if isinstance(x, type) and dataclasses.is_dataclass(x)]
    stateful = [
        kind for kind in kinds if issubclass(kind, halfstep.AbstractLossScaling | Ledger | Verdict)
    ]
    concrete = set(stateful) - {halfstep.AbstractLossScaling}
    assert len(concrete) == 6
    assert all(map(flax.serialization.is_serializable, concrete))


def test_a_recipe_and_its_products():
    def loss(w, x):
        return jnp.sum(x @ w)

    w, x = jnp.ones((32, 16)), jnp.ones((16, 32))
    delayed = halfstep.RECIPES["f8-delayed"]
    saved = delayed.init(loss, w, x, loss_scaling=halfstep.DynamicLossScaling(2.0**9))
    saved = dataclasses.replace(saved, off=("dot_general.0",))
    data = flax.serialization.to_bytes(saved)
    fresh = delayed.init(loss, 2 * w, x, loss_scaling=saved.loss)
    restored: Any = flax.serialization.from_bytes(fresh, data)
    assert restored.off == saved.off
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert all(
        (a == b).all() for a, b in zip(*map(jax.tree.leaves, (restored, saved)), strict=True)
    )
    with pytest.raises(ValueError, match=r"`recipe` of F8Scaling.*must be 'f8', as in the target"):
        flax.serialization.from_bytes(halfstep.RECIPES["f8"].init(loss, w, x), data)
    other = delayed.init(lambda w, x: loss(w, x) + loss(2 * w, x), w, x, loss_scaling=saved.loss)
    with pytest.raises(ValueError, match=r"no state for 'dot_general.1'"):
        flax.serialization.from_bytes(other, data)


WITHOUT = """
import flax.serialization, halfstep, jax.numpy as jnp
try:
    flax.serialization.to_bytes({"s": halfstep.DynamicLossScaling()})
except TypeError as error:
    print("save:", error)
saved = {"loss_scaling": jnp.float32(2), "counter": jnp.int32(0)}
restored = flax.serialization.from_state_dict(halfstep.DynamicLossScaling(), saved)
print("load:", type(restored).__name__)
try:
    halfstep.filter_grad(lambda x: x, restored)
except TypeError as error:
    print("use:", error)
"""


def test_without_the_import_it_fails_when_it_saves():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    save, load, use = result.stdout.splitlines()
    assert "can not serialize 'DynamicLossScaling' object" in save
    # Flax hands back what it read for a type it does not know; halfstep refuses it by name.
    assert load == "load: dict"
    assert "`scaling` is a DynamicLossScaling" in use
    assert "got dict" in use
