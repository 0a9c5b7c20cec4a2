"""The update for XLA:CPU beside the plain form, and the memory that it needs when compiled."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep.kernels.flash_update import Leaf, Scalars, Spec, _block, _cpu
from halfstep.quant import Groups, join

ALGORITHMS = ("adam", "lion", "sgd")
DTYPES = {
    "24 bits": (jnp.bfloat16, jnp.int8, jnp.bfloat16),
    "32 bits": (jnp.bfloat16, jnp.int16, jnp.bfloat16),
    "no master": (jnp.bfloat16, None, jnp.bfloat16),
    "float32": (jnp.float32, None, jnp.float32),
}
update = functools.partial(_cpu.update, min_size=0)


def made(
    shape: tuple[int, ...], algorithm: str, dtypes: Any = DTYPES["24 bits"], axis: int = -2
) -> tuple[Leaf, Spec]:
    """A leaf before its first step."""
    param, low, scale = dtypes
    groups = Groups(axis)
    zeros = functools.partial(jnp.zeros, groups.scale_shape(shape), scale)
    has_second = algorithm == "adam"
    leaf = Leaf(
        jax.random.normal(jax.random.key(0), shape, param),
        None if low is None else jnp.zeros(shape, low),
        jnp.zeros(shape, jnp.int8),
        zeros(),
        jnp.zeros(shape, jnp.uint8) if has_second else None,
        zeros() if has_second else None,
    )
    return leaf, Spec(algorithm, groups)  # type: ignore[arg-type]


def scalars(step: int = 1, **changed: Any) -> Scalars:
    """Hyperparameters, traced as they are in a step."""
    values = {"rate": 1e-2, "b1": 0.9, "b2": 0.99, "eps": 1e-8, "decay": 1e-2, "keep": 1.0}
    biases = {"first_bias": 1 / (1 - 0.9**step), "second_bias": (1 - 0.99**step) ** -0.5}
    made = {name: jnp.float32(x) for name, x in (values | biases | changed).items()}
    return Scalars(**made, seed=jnp.int32(step))


def stepped(update: Any, leaf: Leaf, spec: Spec, *, steps: int = 3, grad: Any = jnp.bfloat16):
    run = jax.jit(functools.partial(update, spec=spec))
    for step in range(1, steps + 1):
        drawn = jax.random.normal(jax.random.key(step), leaf.param.shape, grad)
        leaf = run(leaf, drawn, scalars(step))
    return leaf


def master(leaf: Leaf) -> np.ndarray:
    value = leaf.param.astype(jnp.float32) if leaf.low is None else join(leaf.param, leaf.low)
    return np.asarray(value)


def assert_near(found: Leaf, wanted: Leaf, *, rate: float = 1e-2, steps: int = 3) -> None:
    """As near as two orders of rounding of the same step are.

    Codes move by one where a value lies between two of them. A moment that does moves its step by
    a half of the last code's width at most, 1/127 of the group's largest, and so its value by
    that part of the learning rate; what values are written in rounds them once more a step.
    """
    for one, other in zip(found[2::2], wanted[2::2], strict=True):
        if one is not None:
            apart = np.abs(np.asarray(one).astype(int) - np.asarray(other).astype(int))
            assert apart.max() <= 1
            assert (apart > 0).mean() < 0.01
    for one, other in zip(found[3::2], wanted[3::2], strict=True):
        if one is not None:
            assert one.dtype == other.dtype
            pair = [np.asarray(x.astype(jnp.float32)) for x in (one, other)]
            # Five operations make a moment, each of which may be fused with the next.
            order = 5 * steps * float(jnp.finfo(jnp.float32).eps)
            np.testing.assert_allclose(*pair, rtol=max(order, float(jnp.finfo(one.dtype).eps)))
    assert found.param.dtype == wanted.param.dtype
    last = float(jnp.finfo(wanted.param.dtype).eps) if wanted.low is None else 2.0**-15
    value = master(wanted)
    apart = np.abs(master(found) - value)
    assert (apart <= steps * (last * np.abs(value) + rate / 64)).all()
    assert (apart > 0).mean() < 0.05


@pytest.mark.rows(3)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_as_the_plain_form(algorithm, dtypes):
    leaf, spec = made((96, 200), algorithm, DTYPES[dtypes])
    assert_near(stepped(update, leaf, spec), stepped(_block.update, leaf, spec))


@pytest.mark.rows(1)
@pytest.mark.parametrize("shape", [(32, 7), (2, 64, 40), (2, 3, 32, 16)], ids=str)
def test_shapes(shape):
    leaf, spec = made(shape, "adam")
    assert_near(stepped(update, leaf, spec), stepped(_block.update, leaf, spec))


def test_gradients_of_float32():
    leaf, spec = made((64, 64), "adam")
    pair = [stepped(u, leaf, spec, grad=jnp.float32) for u in (update, _block.update)]
    assert_near(*pair)


def test_random_rounding_draws_the_same_numbers():
    leaf, spec = made((64, 64), "adam")
    spec = Spec("adam", spec.groups, stochastic=True)
    assert_near(stepped(update, leaf, spec), stepped(_block.update, leaf, spec))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_that_is_not_kept_changes_nothing(algorithm):
    leaf, spec = made((64, 64), algorithm)
    leaf = stepped(update, leaf, spec)
    grad = jnp.full((64, 64), jnp.nan, jnp.bfloat16)
    same = jax.jit(functools.partial(update, spec=spec))(leaf, grad, scalars(4, keep=0.0))
    for one, other in zip(same, leaf, strict=True):
        assert (one is None) == (other is None)
        assert one is None or np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_an_element_that_is_not_finite_stays_alone():
    leaf, spec = made((64, 64), "adam")
    grad = jnp.ones((64, 64), jnp.bfloat16).at[3, 5].set(jnp.inf)
    run = jax.jit(functools.partial(update, spec=spec))
    new = run(leaf, grad, scalars())
    assert master(new)[3, 5] == master(leaf)[3, 5]
    moved = master(new) != master(leaf)
    assert moved.sum() == moved.size - 1
    assert jnp.isfinite(new.first_scale).all()
    assert jnp.isfinite(new.second_scale).all()


@pytest.mark.parametrize(("shape", "axis"), [((64, 64), -1), ((40, 64), -2)], ids=str)
def test_other_groups_take_the_plain_form(shape, axis, monkeypatch):
    leaf, spec = made(shape, "adam", axis=axis)
    calls = []
    monkeypatch.setattr(_block, "update", lambda *args: calls.append(args) or leaf)
    update(leaf, jnp.ones(shape, jnp.bfloat16), scalars(), spec)
    assert len(calls) == 1


def test_small_leaves_take_the_plain_form(monkeypatch):
    leaf, spec = made((64, 64), "adam")
    calls = []
    monkeypatch.setattr(_block, "update", lambda *args: calls.append(args) or leaf)
    _cpu.update(leaf, jnp.ones((64, 64), jnp.bfloat16), scalars(), spec)
    assert len(calls) == 1


def temporaries(update: Any, algorithm: str, shape: tuple[int, ...] = (1024, 1024)) -> float:
    leaf, spec = made(shape, algorithm)
    run = jax.jit(functools.partial(update, spec=spec), donate_argnums=0)
    memory = run.lower(leaf, leaf.param, scalars()).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes / leaf.param.size


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_temporaries(algorithm):
    """One byte an element, the low bits, and scalars; the plain form needs several arrays."""
    scalars_only = 4096 / 1024**2
    assert temporaries(update, algorithm) <= 1 + scalars_only


def test_the_bound_on_temporaries_can_fail():
    assert temporaries(_block.update, "adam") > 4
