"""Thousands of random runs against an oracle that knows nothing of JAX.

The model is `loss = w0 * x0 + w1 * x1` in float16 with momentum SGD, small enough for every
rounding to be written down by hand (`tests/_oracle.py` rounds by integers; the rest is float64).
Overflow is not injected: it happens when a scaled gradient leaves float16, and the oracle has to
foresee it.
"""

import functools
import io
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import halfstep
from tests._oracle import FORMATS, round_bits

LEARNING_RATE, MOMENTUM = 2.0**-6, 0.5  # Powers of two: products with them are exact.


class Config(NamedTuple):
    initial: float
    floor: float
    ceiling: float
    period: int
    factor: float


CONFIGS = [
    Config(2.0**15, 1.0, 2.0**24, 2, 2),
    Config(2.0**10, 2.0**4, 2.0**15, 1, 4),
    Config(2.0**16, 2.0**-14, 2.0**17, 3, 2),
    Config(1.0, 1.0, 1.0, 1, 2),
    Config(2.0**20, 1.0, 2.0**24, 5, 16),
]
# Data by kind. Good ones are exact in float16; each large one overflows from some scale on.
DATA = np.asarray(
    [
        (1.0, -0.5),
        (0.25, 3.0),
        (-1.5, 2.0**-10),
        (2.0**-20, 2.0**-24),  # vanishes without a scale
        (0.0, 0.0),
        (40.0, 1.0),
        (-3000.0, 0.125),
        (60000.0, -1.0),
        (np.inf, 1.0),  # the loss itself is bad
        (1.0, np.nan),
    ],
    np.float32,
)


class Oracle:
    """The training step in float64 and integers, for `n` independent runs side by side."""

    def __init__(self, config: Config, n: int):
        self.config = config
        self.w, self.trace = np.tile([1.0, -2.0], (n, 1)), np.zeros((n, 2))
        self.scale, self.counter = np.full(n, config.initial), np.zeros(n)
        self.applied, self.skipped, self.consecutive, self.bad_losses = np.zeros((4, n))
        self.last_skipped, self.last_leaf = np.full((2, n), -1.0)

    def step(self, x: np.ndarray) -> dict[str, Any]:
        with np.errstate(all="ignore"):
            x = f16(x)
            products = f16(f16(self.w) * x)
            loss = f16(f32(products[:, 0] + products[:, 1]))
            grads = f16(f16(self.scale)[:, None] * x) / self.scale[:, None]
        bad = ~np.isfinite(grads)
        loss_finite = np.isfinite(loss)
        finite = ~bad.any(1) & loss_finite
        first = np.where(bad.any(1), bad.argmax(1), -1)

        trace = np.where(finite[:, None], f32(np.where(bad, 0, grads) + MOMENTUM * self.trace), 0)
        self.trace = np.where(finite[:, None], trace, self.trace)
        self.w = np.where(finite[:, None], f32(self.w - LEARNING_RATE * trace), self.w)
        self.last_skipped = np.where(finite, self.last_skipped, self.applied + self.skipped)
        self.last_leaf = np.where(finite, self.last_leaf, first)
        self.applied = self.applied + finite
        self.skipped = self.skipped + ~finite
        self.consecutive = np.where(finite, 0, self.consecutive + 1)
        self.bad_losses = self.bad_losses + ~loss_finite
        self.counter = np.where(finite, self.counter + 1, 0)
        grow = self.counter == self.config.period
        self.counter = np.where(grow, 0, self.counter)
        up = np.minimum(self.scale * self.config.factor, self.config.ceiling)
        down = np.maximum(self.scale / self.config.factor, self.config.floor)
        self.scale = np.where(finite, np.where(grow, up, self.scale), down)
        judged = {"loss": loss, "finite": finite, "loss_finite": loss_finite}
        return {**judged, "first": first, "grads": grads, **self.state()}

    def state(self) -> dict[str, Any]:
        counts = (self.applied, self.skipped, self.consecutive)
        counts += (self.last_skipped, self.bad_losses, self.last_leaf)
        return {
            "w": self.w,
            "trace": self.trace,
            "scale": self.scale,
            "counter": self.counter,
            "ledger": np.stack(counts, 1),
        }


def f16(values: np.ndarray) -> np.ndarray:
    """Round to float16; what comes in is exact in float32."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return round_bits(bits, **FORMATS["f16"]).view(np.float32).astype(np.float64)


def f32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(np.float64)


OPTIMIZER = optax.sgd(LEARNING_RATE, momentum=MOMENTUM)


def begin(config: Config) -> Any:
    model = {"a": jnp.asarray(1.0), "b": jnp.asarray(-2.0)}
    scaling = halfstep.DynamicLossScaling(
        config.initial, config.floor, config.ceiling, period=config.period, factor=config.factor
    )
    return model, OPTIMIZER.init(model), scaling, halfstep.Ledger(limit=3)


def loss_fn(model: Any, x: Any) -> Any:
    return jnp.sum(jnp.stack([model["a"], model["b"]]) * x)


def step(state: Any, x: Any) -> tuple[Any, dict[str, Any]]:
    model, optimizer_state, scaling, ledger = state
    gradient = halfstep.filter_value_and_grad(loss_fn, scaling, policy="f16:inputs")
    loss, scaling, finite, grads = gradient(model, x)

    def commit(state):
        return halfstep.apply_gradients(state[0], OPTIMIZER, state[1], grads)

    (model, optimizer_state), ledger = halfstep.transaction(
        finite, commit, (model, optimizer_state), ledger
    )
    state = (model, optimizer_state, scaling, ledger)
    seen = {
        "loss": loss,
        "finite": finite.finite,
        "loss_finite": finite.loss_finite,
        "first": finite.first_leaf,
        "grads": jnp.stack([grads["a"], grads["b"]]),
        **observe(state),
    }
    return state, seen


def observe(state: Any) -> dict[str, Any]:
    model, optimizer_state, scaling, ledger = state
    trace = optimizer_state[0].trace
    counts = (ledger.applied, ledger.skipped, ledger.consecutive)
    counts += (ledger.last_skipped, ledger.bad_losses, ledger.last_leaf)
    return {
        "w": jnp.stack([model["a"], model["b"]]),
        "trace": jnp.stack([trace["a"], trace["b"]]),
        "scale": scaling.loss_scaling,
        "counter": scaling.counter,
        "ledger": jnp.stack(counts),
    }


def check(seen: dict[str, Any], expected: dict[str, Any], where: Any) -> None:
    """Bit for bit, over all runs; NaN equals NaN."""
    for name, value in seen.items():
        got, want = np.asarray(value, np.float64), np.asarray(expected[name], np.float64)
        wrong = np.argwhere(~((got == want) | (np.isnan(got) & np.isnan(want))))
        assert wrong.size == 0, (
            f"{name} at {where}, run {wrong[0][0]}: {got[wrong[0][0]]} is not {want[wrong[0][0]]}"
        )


@functools.cache
def many(config: Config):
    """All sequences at once: jit of vmap of scan."""
    run = lambda xs: jax.lax.scan(step, begin(config), xs)[1]  # noqa: E731
    return jax.jit(jax.vmap(run))


# Compiling counts as the first example's time.
UNHURRIED = (HealthCheck.too_slow, HealthCheck.data_too_large)
SEQUENCES, LENGTH, EXAMPLES = 256, 32, 45


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=UNHURRIED)
@given(st.sampled_from(CONFIGS), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 0.9]))
def test_sequences_under_jit_vmap_scan(config: Config, seed: int, calm: float):
    """At least 10,000 sequences: 256 for each of 45 examples. `calm` is the share of mild data."""
    rng = np.random.default_rng(seed)
    shape = (SEQUENCES, LENGTH)
    mild, wild = rng.integers(5, size=shape), rng.integers(len(DATA), size=shape)
    data = DATA[np.where(rng.random(shape) < calm, mild, wild)]
    seen = jax.tree.map(np.asarray, many(config)(data))
    oracle = Oracle(config, SEQUENCES)
    for turn in range(LENGTH):
        expected = oracle.step(data[:, turn].astype(np.float64))
        check({name: value[:, turn] for name, value in seen.items()}, expected, f"step {turn}")


def test_that_was_ten_thousand():
    assert SEQUENCES * EXAMPLES >= 10_000


class OneByOne(RuleBasedStateMachine):
    """Steps one at a time, jitted and donated, with a checkpoint round trip at any point."""

    def __init__(self):
        super().__init__()
        self.config = CONFIGS[0]
        self.oracle, self.state = Oracle(self.config, 1), begin(self.config)

    @rule(kind=st.integers(0, len(DATA) - 1))
    def train(self, kind: int):
        self.state, seen = donated()(self.state, jnp.asarray(DATA[kind]))
        check(alone(seen), self.oracle.step(DATA[kind : kind + 1].astype(np.float64)), DATA[kind])

    @rule(kinds=st.lists(st.integers(0, len(DATA) - 1), min_size=3, max_size=3))
    def train_in_a_scan(self, kinds: list[int]):
        self.state, seen = scanned()(self.state, jnp.asarray(DATA[np.asarray(kinds)]))
        for turn, kind in enumerate(kinds):
            expected = self.oracle.step(DATA[kind : kind + 1].astype(np.float64))
            check({name: value[turn : turn + 1] for name, value in seen.items()}, expected, turn)

    @rule()
    def checkpoint(self):
        buffer = io.BytesIO()
        eqx.tree_serialise_leaves(buffer, self.state)
        buffer.seek(0)
        self.state = eqx.tree_deserialise_leaves(buffer, begin(self.config))

    @precondition(lambda self: self.oracle.consecutive[0] >= 3)
    @rule()
    def limit_raises(self):
        with pytest.raises(halfstep.SkipLimitError, match="steps in a row were skipped"):
            self.state[3].check(self.state[0], scaling=self.state[2])

    @invariant()
    def agrees(self):
        check(alone(observe(self.state)), self.oracle.state(), "rest")


def alone(seen: dict[str, Any]) -> dict[str, Any]:
    """One run as a batch of one."""
    return {name: np.asarray(value)[None] for name, value in seen.items()}


@functools.cache
def donated():
    return jax.jit(step, donate_argnums=0)


@functools.cache
def scanned():
    return jax.jit(lambda state, xs: jax.lax.scan(step, state, xs))


OneByOne.TestCase.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=UNHURRIED
)
TestOneByOne = OneByOne.TestCase
