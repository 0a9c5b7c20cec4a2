"""`explain` differentiates equal layers once, and reports what it would without that."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import halfstep
from halfstep._explain.written import run_as_written

pytestmark = pytest.mark.core

LAYERS = 4
_WEIGHTS = jnp.ones((LAYERS, 8, 8))
_X = jnp.ones((4, 8))


def _loss(weights: Any, x: Any) -> Any:
    for number in range(LAYERS):
        with jax.named_scope(f"layer_{number}"):
            x = x + jax.nn.softmax(jax.nn.gelu(x @ weights[number]))
    return jnp.mean(x**2)


def test_layers_store_the_same_alone_and_together(monkeypatch: pytest.MonkeyPatch):
    shared = halfstep.explain(_loss, "bf16")(_WEIGHTS, _X)
    # Without occurrences enough, nothing is shared.
    monkeypatch.setattr("halfstep._autocast.again.repeats._FEWEST_OCCURRENCES", 100)
    alone = halfstep.explain(_loss, "bf16")(_WEIGHTS, _X)
    assert shared.to_dict() == alone.to_dict()
    scopes = {found.scope for found in shared.residuals}
    assert {f"layer_{number}" for number in range(LAYERS)} <= scopes


def test_layers_become_one_function(monkeypatch: pytest.MonkeyPatch):
    made = []

    def run(*args: Any) -> Any:
        made.append(jax.make_jaxpr(lambda *values: run_as_written(*args[:2], *values))(*args[2:]))
        return run_as_written(*args)

    monkeypatch.setattr("halfstep._explain.explained.run_as_written", run)
    halfstep.explain(_loss, "bf16")(_WEIGHTS, _X)
    calls = [eqn.params["jaxpr"] for eqn in made[0].jaxpr.eqns if eqn.primitive.name == "jit"]
    assert len(calls) > len({id(call) for call in calls}) > 0
