"""Optimizers of `optax.contrib` by `optimizer_update`, beside the same training in float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import halfstep
from tests.ecosystem._programs import Numbers, cross_entropy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]
STEPS = 20
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "acprop": lambda: contrib.acprop(1e-2),
    "ademamix": lambda: contrib.ademamix(1e-2),
    "cocob": contrib.cocob,
    "dadapt_adamw": contrib.dadapt_adamw,
    "dog": lambda: contrib.dog(1.0),
    "dowg": lambda: contrib.dowg(0.1),
    "momo": lambda: contrib.momo(1.0),
    "momo_adam": contrib.momo_adam,
    "muon": lambda: contrib.muon(1e-2),
    "prodigy": contrib.prodigy,
    "reduce_on_plateau": lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau()),
    "sam": lambda: contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05))),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(1e-2),
}
READS_THE_LOSS = ("momo", "momo_adam", "reduce_on_plateau")


def loss(params: Any, x: Any, labels: Any) -> jax.Array:
    hidden = jax.nn.relu(x @ params["in"] + params["bias"])
    return cross_entropy(hidden @ params["out"], labels)


@pytest.mark.parametrize("policy", ["bf16", "f16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_in_float32(name: str, policy: str) -> None:
    numbers, optimizer = Numbers(), OPTIMIZERS[name]()
    start = {
        "in": jnp.asarray(numbers.normal(16, 32, scale=0.25)),
        "bias": jnp.asarray(numbers.normal(32, scale=0.01)),
        "out": jnp.asarray(numbers.normal(32, 5, scale=0.2)),
    }
    data = numbers.normal(64, 16), numbers.integers(5, 64)

    def trained(policy: str) -> float:
        # A scale that is small enough from the first step on: no step is skipped.
        scaling: Any = halfstep.NoLossScaling()
        if policy == "f16":
            scaling = halfstep.DynamicLossScaling(2.0**10)

        @jax.jit
        def step(params: Any, state: Any, scaling: Any) -> Any:
            value, scaling, verdict, gradient = halfstep.filter_value_and_grad(
                loss, scaling, policy=policy, check_finite=True
            )(params, *data)
            more = {"value": value} if name in READS_THE_LOSS else {}
            params, state = halfstep.optimizer_update(
                params, optimizer, state, gradient, verdict, **more
            )
            return params, state, scaling, verdict

        params, state = start, optimizer.init(start)
        for _ in range(STEPS):
            params, state, scaling, verdict = step(params, state, scaling)
            assert bool(verdict)
        return float(loss(params, *data))

    # A gradient differs by about a percent, and the loss falls by nearly as much.
    exact = trained("f32")
    fallen = float(loss(start, *data)) - exact
    assert fallen > 0
    assert trained(policy) == pytest.approx(exact, abs=2.0**-6 * fallen)
