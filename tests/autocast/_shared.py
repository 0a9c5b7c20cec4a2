"""What several suites of autocast's begin with."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from tests._jaxprs import equations

every_format = pytest.mark.parametrize("policy", ["bf16", "f16"])
with_and_without_islands = pytest.mark.parametrize("islands", [True, False])
W = jnp.eye(4)
X = jnp.linspace(-1, 1, 16).reshape(4, 4)


def compute(policy: str) -> np.dtype:
    return halfstep.FORMATS[policy].dtype


def half_eps(policy: str) -> float:
    return halfstep.FORMATS[policy].eps / 2


def traced(func: Callable, *args: Any) -> list[Any]:
    return list(equations(jax.make_jaxpr(func)(*args)))


def dots(func: Callable, *args: Any) -> list[tuple[str, str]]:
    """The dtypes of every dot's operands."""
    return [
        (str(equation.invars[0].aval.dtype), str(equation.invars[1].aval.dtype))
        for equation in traced(func, *args)
        if equation.primitive.name == "dot_general"
    ]


def named(func: Callable, name: str, *args: Any) -> list[Any]:
    return [equation for equation in traced(func, *args) if equation.primitive.name == name]


def rounded(x: Any, policy: str) -> Any:
    return x.astype(compute(policy)).astype(jnp.float32)


def stored_as(policy: str, islands: bool) -> str:
    """A policy; without islands, one that stores what JAX stores by itself."""
    return policy if islands else f"{policy},store:op:*=keep"
