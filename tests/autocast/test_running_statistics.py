"""Networks with running statistics, trained for 300 steps in each framework's own state.

Losses and statistics are compared with those of float32, and may be as wrong as those of casts by
hand, times four. The casts by hand are made where JAX binds contractions, so that they are the same
in all frameworks, forward and backward.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import primitives

import halfstep
from tests.autocast._frameworks import FRAMEWORKS, SHAPES
from tests.fuzz._compose_oracle import Judge

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]
STEPS = 300
RATE = 0.02
SCALES = {"bf16": 1.0, "f16": 256.0}
CONTRACTIONS = (primitives.dot_general_p, primitives.conv_general_dilated_p)


@contextlib.contextmanager
def by_hand(half: Any) -> Iterator[None]:
    """Contractions of operands that are rounded to the half dtype, with rounded results."""

    def rounded(value: Any) -> Any:
        return value.astype(half).astype(value.dtype)

    with pytest.MonkeyPatch.context() as patch:
        for primitive in CONTRACTIONS:
            bind = primitive.bind

            def cast(*operands: Any, bind: Any = bind, **params: Any) -> Any:
                return rounded(bind(*map(rounded, operands), **params))

            patch.setattr(primitive, "bind", cast)
        yield


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS, *SHAPES["cnn"])).astype(np.float32)
    # Statistics that are not those of a normal distribution, and drift.
    x = 2.0 * x + 1.0 + np.linspace(0, 1, STEPS, dtype=np.float32).reshape(-1, 1, 1, 1, 1)
    return x, x.mean((2, 3)).repeat(2, axis=-1) + x.std((2, 3)).repeat(2, axis=-1)


def trained(framework: str, precision: str, policy: str) -> Any:
    """The losses of all steps and the state after the last, and the parameters.

    Args:
        framework: Whose network it is.
        precision: `"float32"`, `"by hand"` or `"halfstep"`.
        policy: The half format.
    """
    model = FRAMEWORKS[framework]("cnn", jax.random.key(0))
    key, scale = jax.random.key(1), SCALES[policy]

    def loss(params: Any, state: Any, x: Any, y: Any) -> Any:
        out, state = model.apply(params, state, x, key)
        return jnp.mean((out - y) ** 2), state

    def gradient(params: Any, state: Any, x: Any, y: Any) -> Any:
        if precision == "halfstep":
            scaling = halfstep.StaticLossScaling(scale)
            transformed = halfstep.filter_value_and_grad(loss, scaling, policy=policy, has_aux=True)
            (value, state), _, _, made = transformed(params, state, x, y)
            return value, state, made

        def scaled(params: Any) -> Any:
            value, after = loss(params, state, x, y)
            return value * scale, (value, after)

        made, (value, after) = eqx.filter_grad(scaled, has_aux=True)(params)
        return value, after, jax.tree.map(lambda leaf: leaf / scale, made)

    @eqx.filter_jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, state, made = gradient(params, state, x, y)
        return value, state, eqx.apply_updates(params, jax.tree.map(lambda g: -RATE * g, made))

    params, state, losses = model.params, model.state, []
    half = halfstep.FORMATS[policy].dtype
    with by_hand(half) if precision == "by hand" else contextlib.nullcontext():
        for x, y in zip(*data(), strict=True):
            value, state, params = step(params, state, x, y)
            losses.append(value)
    floats = [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(state, eqx.is_inexact_array))]
    weights = eqx.filter(params, eqx.is_inexact_array)
    return {"losses": np.asarray(losses), "state": floats}, jax.tree.map(np.asarray, weights)


@functools.cache
def in_float32(framework: str) -> Any:
    return trained(framework, "float32", "bf16")


@pytest.mark.rows(1)
@pytest.mark.parametrize("policy", ["bf16", "f16"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_losses_and_statistics_of_300_steps(framework: str, policy: str) -> None:
    exact = in_float32(framework)
    hand = trained(framework, "by hand", policy)
    judge = Judge(exact, hand, halfstep.FORMATS[policy].dtype)
    assert not judge.is_ill
    # It learns, the casts by hand are casts, and there are statistics.
    losses = exact[0]["losses"]
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:20])
    assert judge.of_hand[0]["['losses']"] > 0
    assert len(exact[0]["state"]) >= 2
    assert judge.disagreements(trained(framework, "halfstep", policy)) == []
