"""Meshes with explicit axes, the default of `jax.make_mesh`: shardings are part of types."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import halfstep
from halfstep import autocast
from tests._rows import slow_unless

pytestmark = pytest.mark.core
# The others have a state, which their gradient functions take.
RECIPES = [name for name in halfstep.RECIPES if name not in ("f8-delayed", "nvfp4")]


def gradients(policy: str, kind: AxisType) -> Any:
    """Those of a model whose weights are divided over four devices and gathered for use."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    whole, parts = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.device_put(jax.random.normal(keys[0], (64, 128)) / 8, parts),
        "down": jax.device_put(jax.random.normal(keys[1], (128, 64)) / 8, parts),
    }
    x = jax.device_put(jax.random.normal(keys[2], (32, 64)), parts)

    def gathered(w: Any) -> Any:
        if kind is AxisType.Explicit:
            return jax.sharding.reshard(w, whole)
        return jax.lax.with_sharding_constraint(w, whole)

    def loss(params: Any, x: Any) -> Any:
        hidden = jax.nn.gelu(x @ gathered(params["up"]))
        return jnp.mean((hidden @ gathered(params["down"])) ** 2)

    with jax.sharding.set_mesh(mesh):
        return jax.jit(jax.grad(autocast(loss, policy)), out_shardings=parts)(params, x)


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    "policy",
    slow_unless(
        ["bf16", "f16", "bf16,residuals=e4m3", *RECIPES],
        lambda policy: policy in ("bf16,residuals=e4m3", "f8", "f8-row"),
    ),
)
def test_gradients_are_those_of_an_auto_mesh(policy: str):
    explicit, auto = gradients(policy, AxisType.Explicit), gradients(policy, AxisType.Auto)
    for name, found in explicit.items():
        assert found.sharding.spec == P("data")
        # Devices add up in another order, in 16 bits at the worst.
        made, expected = np.asarray(found), np.asarray(auto[name])
        error = np.linalg.norm(made - expected) / np.linalg.norm(expected)
        assert error < halfstep.FORMATS["f16" if policy == "f16" else "bf16"].eps
