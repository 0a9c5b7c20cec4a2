"""float16 on unmodified functions: where casting the arguments is not enough.

Each row is a function in plain float32 whose 16-bit result should be that of float32 up to the
rounding of its inputs and its output. Autocast is right in every one, casting the arguments in
none; where that has a cure (`force_full_precision`, `keep`), it has a row too.
"""

import functools
from collections.abc import Sequence
from types import MappingProxyType

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep
from halfstep import DynamicLossScaling

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]

EPS = halfstep.FORMATS["f16"].eps
CLASSES = 128_256


def layer_norm(x):
    mean = jnp.mean(x, keepdims=True)
    return (x - mean) / jnp.sqrt(jnp.mean((x - mean) ** 2) + 1e-6)


def rms_norm(x):
    return x / jnp.sqrt(jnp.mean(x**2) + 1e-6)


def logits():
    return jnp.zeros(CLASSES)  # What an untrained language model begins with.


def wide(n=64, std=400.0):
    return std * jax.random.normal(jax.random.key(1), (n,))


def masked_softmax(x):
    return jax.nn.softmax(jnp.where(jnp.zeros_like(x, bool), x, x - 1e9))


ROWS = {
    "sum of 1e6": (jnp.sum, lambda: jnp.full(1000, 1000.0)),
    "mean squared error of 160000": (lambda x: jnp.mean(x**2), lambda: jnp.full(64, 400.0)),
    "sum of squares": (lambda x: jnp.sum(x * x), lambda: jnp.full(64, 100.0)),
    "logsumexp over 128,256": (jax.nn.logsumexp, logits),
    "softmax over 128,256": (lambda x: jnp.sum(jax.nn.softmax(x)), logits),
    "cross-entropy over 128,256": (
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, jnp.asarray(3)),
        logits,
    ),
    "handwritten LayerNorm at std 400": (layer_norm, wide),
    "handwritten RMSNorm at std 400": (rms_norm, wide),
    "fully masked row with -1e9": (masked_softmax, lambda: jnp.ones(8)),
    "an epsilon of 1e-8": (lambda x: x / (x + 1e-8), lambda: jnp.zeros(4) + 1e-8),
    "a dot whose output is 81920": (
        lambda x: (x[None] @ jnp.ones((80, 1), x.dtype) * 1024)[0, 0] / 1024,
        lambda: jnp.ones(80),
    ),
}


def right(func, x, run) -> bool:
    """Whether the result is float32's on the rounded input, up to the output's rounding."""
    exact = np.asarray(func(x.astype(jnp.float16).astype(jnp.float32)), np.float32)
    got = np.asarray(run(func, x), np.float32)
    return bool(np.all(np.isfinite(got)) and np.all(np.abs(got - exact) <= EPS * np.abs(exact)))


def cast_arguments(func, x):
    return halfstep.cast_function(func, "f16")(x)


def in_full_precision(func, x):
    full = halfstep.force_full_precision(func, return_dtype="f32")
    return halfstep.cast_function(full, "f16")(x)


# Beyond float16's range on the way: in bfloat16 all is well, in float16 it takes a rule.
RULED = MappingProxyType({("a dot whose output is 81920", "f16"): "op:dot_general=accumulate"})


@pytest.mark.rows(15)
@pytest.mark.parametrize("policy", ["bf16", "f16"])
@pytest.mark.parametrize("name", ROWS)
def test_unmodified(name: str, policy: str):
    func, make = ROWS[name]
    exact = np.asarray(func(make()), np.float32)

    def is_right(rules: Sequence[str]) -> bool:
        made = halfstep.autocast(func, halfstep.Policy(compute=policy, rules=rules))
        got = np.asarray(made(make()), np.float32)
        # One rounding of what is looked up or multiplied.
        close = np.abs(got - exact) <= halfstep.FORMATS[policy].eps * np.abs(exact)
        return bool(np.all(np.isfinite(got)) and np.all(close))

    rule = RULED.get((name, policy))
    assert is_right([]) is (rule is None)
    assert is_right([rule] if rule else [])


@pytest.mark.parametrize("name", ROWS)
def test_casting_the_arguments_is_not_enough(name: str):
    func, make = ROWS[name]
    assert not right(func, make(), cast_arguments)


@pytest.mark.parametrize("name", ROWS)
def test_forced(name: str):
    func, make = ROWS[name]
    assert right(func, make(), in_full_precision)


def test_equinox_layer_norm_at_std_400():
    """Equinox computes its norms in float32 by itself, and halfstep does not get in the way."""
    norm = eqx.nn.LayerNorm(64)
    out = halfstep.cast_function(lambda norm, x: norm(x), "f16")(norm, wide())
    exact = norm(wide().astype(jnp.float16).astype(jnp.float32))
    assert np.abs(np.asarray(out, np.float32) - exact).max() <= EPS * np.abs(exact).max()


def regression(w, batch):
    return jnp.mean((w * batch["x"] - batch["targets"]) / 1e5)


BATCH = {"x": jnp.ones(4), "targets": jnp.full(4, 1e5)}


def test_float_target_of_100000():
    _, finite, _ = halfstep.filter_grad(regression, DynamicLossScaling(1.0), policy="f16")(
        jnp.asarray(1.0), BATCH
    )
    assert finite


def test_float_target_of_100000_kept():
    value, _, finite, _ = halfstep.filter_value_and_grad(
        regression, DynamicLossScaling(1.0), policy="f16", keep=("batch/targets",)
    )(jnp.asarray(1.0), BATCH)
    assert finite
    # x - 1e5 rounds in float32, and so does the mean.
    assert abs(float(value) - (1 - 1e5) / 1e5) <= 4 * halfstep.FORMATS["f32"].eps


def positions(table, ids):
    return jnp.sum(table * (ids[-1] - ids[-2]))


IDS = jnp.arange(2040.0, 2052.0)


def test_position_ids_from_2049_as_floats():
    grads = halfstep.filter_grad(positions, DynamicLossScaling(1.0), policy="f16")(
        jnp.ones(1), IDS
    )[2]
    assert grads[0] == 1


def test_position_ids_from_2049_kept():
    grads = halfstep.filter_grad(positions, DynamicLossScaling(1.0), policy="f16", keep=("ids",))(
        jnp.ones(1), IDS
    )[2]
    assert grads[0] == 1


@pytest.mark.parametrize("policy", ["f16", "bf16"])
def test_gradient_of_a_weight_shared_by_4096_steps(policy: str):
    def loss(w, x):
        total, _ = jax.lax.scan(lambda c, x: (c + (w * x).astype(jnp.float32), None), 0.0, x)
        return total

    transform = functools.partial(halfstep.filter_grad, loss, DynamicLossScaling(1.0))
    grads = transform(policy=policy)(jnp.asarray(1.0), jnp.ones(4096))[2]
    assert grads == 4096
