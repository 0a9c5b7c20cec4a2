"""What several suites of autocast's begin with."""

import jax.numpy as jnp
import numpy as np
import pytest

import halfstep

every_format = pytest.mark.parametrize("policy", ["bf16", "f16"])
with_and_without_islands = pytest.mark.parametrize("islands", [True, False])
W = jnp.eye(4)
X = jnp.linspace(-1, 1, 16).reshape(4, 4)


def compute(policy: str) -> np.dtype:
    return halfstep.FORMATS[policy].dtype


def half_eps(policy: str) -> float:
    return halfstep.FORMATS[policy].eps / 2
