"""Every framework, every policy: what comes out is what the framework does, in mixed precision."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import halfstep
from tests._jaxprs import equations
from tests._rows import slow_unless
from tests.conformance._frameworks import (
    BATCH,
    BY_NAME,
    FEATURES,
    HIDDEN,
    OUTPUTS,
    POLICIES,
    RATE,
    Data,
    Equinox,
    EquinoxNet,
    Report,
    Row,
    Train,
)

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]


def jit(func: Callable, **options: Any) -> Any:
    # LLVM's optimizations are half of the compile time and change nothing here.
    fast = {"xla_backend_optimization_level": 0}
    filter_jit: Any = eqx.filter_jit  # Its annotations do not know jit's own options.
    return filter_jit(func, compiler_options=fast, **options)


# Roundings along the longest path through the network, each wrong by at most u = eps / 2 of its
# result. Forward: casts of x, y and the six parameters on the path (8); dense, its bias (2); mean,
# difference, square, variance, square root, quotient, scale, offset (8); tanh (1); head, its bias
# (2); difference, square, mean (3). Dropout at rate 1/2 multiplies by 2 exactly. Backward: a
# product with the local derivative, itself rounded, for each of those 16 operations (32). The
# normalized activations have the size of their statistics, so nothing amplifies an error, and to
# first order relative errors add up.
ROUNDINGS = 56

every_row = pytest.mark.parametrize("name", BY_NAME)
every_policy = pytest.mark.parametrize("policy", POLICIES)


def tolerance(policy: str) -> float:
    return ROUNDINGS * halfstep.FORMATS[policy].eps / 2


def compute_dtype(policy: str) -> np.dtype:
    return halfstep.Policy.parse(policy).compute


class Compiled(NamedTuple):
    """A jitted step and how often it was traced."""

    step: Callable[..., tuple[Train, Any, halfstep.Ledger, Report]]
    traces: list[str]


@functools.cache
def compiled(name: str, policy: str) -> Compiled:
    """The step of a row, which donates all but the data."""
    traces: list[str] = []

    def step(data: Data, train: Train, scaling: Any, ledger: halfstep.Ledger) -> Any:
        traces.append(name)
        return BY_NAME[name].step(data, train, scaling, ledger, policy=policy, check_finite=True)

    return Compiled(jit(step, donate="all-except-first"), traces)


@functools.cache
def own_step(name: str) -> Callable[..., tuple[Train, Any]]:
    return jit(BY_NAME[name].own_step)


@functools.cache
def _initialized(name: str) -> Train:
    return jit(BY_NAME[name].init)(jax.random.key(0))


def on_arrays(change: Callable[[Any], Any], tree: Any) -> Any:
    return jtu.tree_map(lambda x: change(x) if eqx.is_array(x) else x, tree)


def start(name: str, policy: str) -> tuple[Train, Any, halfstep.Ledger]:
    """A network to be donated, and what goes with it."""
    return on_arrays(jnp.copy, _initialized(name)), POLICIES[policy](), halfstep.Ledger()


def data(seed: int = 1, *, scale: float = 1.0, poison: bool = False) -> Data:
    x_key, y_key, key = jax.random.split(jax.random.key(seed), 3)
    x = scale * jax.random.normal(x_key, (BATCH, FEATURES))
    # One number in the first example: on four devices it lies on the first.
    x = x.at[0, 0].set(jnp.nan) if poison else x
    return Data(x, jax.random.normal(y_key, (BATCH, OUTPUTS)), key)


def arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jtu.tree_leaves(eqx.filter(tree, eqx.is_array))]


def floats(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jtu.tree_leaves(eqx.filter(tree, eqx.is_inexact_array))]


def persistent(train: Train) -> list[np.ndarray]:
    """All that a skipped step must leave alone. Random state is not: it may advance."""
    return [*arrays(train.params), *floats(train.state), *arrays(train.optimizer_state)]


def same_bits(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return [x.tobytes() for x in ours] == [x.tobytes() for x in theirs]


def distance(grads: Any, reference: Any) -> float:
    """The relative distance of two gradients, all leaves as one vector."""
    ours, theirs = (np.concatenate([g.ravel() for g in floats(t)]) for t in (grads, reference))
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@functools.cache
def contraction_dtypes(name: str, policy: str) -> list[tuple[np.dtype, ...]]:
    step = functools.partial(BY_NAME[name].step, policy=policy, check_finite=True)
    jaxpr, _, _ = eqx.filter_make_jaxpr(step)(data(), *start(name, policy))
    return [
        tuple(operand.aval.dtype for operand in equation.invars)
        for equation in equations(jaxpr)
        if equation.primitive.name == "dot_general"
    ]


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("name", "policy"),
    slow_unless(
        [(name, policy) for name in BY_NAME for policy in POLICIES],
        lambda name, policy: policy == "f16" or name == "equinox",
    ),
)
def test_dtypes_are_stable_and_nothing_is_traced_again(name: str, policy: str):
    step, traces = compiled(name, policy)
    train, scaling, ledger = start(name, policy)
    dtypes = [x.dtype for x in persistent(train)]
    assert {x.dtype for x in floats(train)} == {np.dtype(np.float32)}
    counts = []
    for seed in range(3):
        train, scaling, ledger, report = step(data(seed), train, scaling, ledger)
        counts.append(len(traces))
        assert [x.dtype for x in persistent(train)] == dtypes
        assert {x.dtype for x in floats(report.grads)} == {np.dtype(np.float32)}
        assert report.loss.dtype == np.float32
    assert counts[0] == counts[-1]
    assert ledger.applied == 3


@pytest.mark.rows(2)
@every_policy
@every_row
def test_statistics_are_never_narrowed(name: str, policy: str):
    # Of 1 and 1 + 2**-13 float16 and bfloat16 make the same number; a running average, which
    # forgets at most half of itself in a step, must still tell them apart.
    shift = 2.0**-13
    after = []
    for value in (1.0, 1.0 + shift):
        train, scaling, ledger = start(name, policy)
        state = jtu.tree_map(
            lambda x, value=value: jnp.full_like(x, value) if eqx.is_inexact_array(x) else x,
            train.state,
        )
        batch = (data(), train._replace(state=state), scaling, ledger)
        after.append(floats(compiled(name, policy).step(*batch)[0].state))
    for low, high in zip(*after, strict=True):
        assert (high - low >= shift / 2).all()


@pytest.mark.rows(7)
@every_policy
@every_row
def test_contractions_run_in_the_compute_dtype(name: str, policy: str):
    low = (compute_dtype(policy),) * 2
    assert contraction_dtypes(name, policy).count(low) > 0


@pytest.mark.rows(7)
@pytest.mark.parametrize("policy", ["bf16", "f16"])
@every_row
def test_every_contraction_runs_in_the_compute_dtype(name: str, policy: str):
    found = contraction_dtypes(name, policy)
    # Two forward, one back for the first layer's weights, two back for the head.
    assert len(found) == 5
    assert set(found) == {(compute_dtype(policy),) * 2}


@pytest.mark.rows(5)
@every_policy
@every_row
def test_gradients_agree_with_the_framework(name: str, policy: str):
    _, reference = own_step(name)(data(), start(name, policy)[0])
    *_, report = compiled(name, policy).step(data(), *start(name, policy))
    assert report.finite
    assert distance(report.grads, reference) <= tolerance(policy)


@pytest.mark.rows(5)
@every_row
def test_a_float32_step_is_the_frameworks_own(name: str):
    ours, scaling, ledger = start(name, "f32")
    expected, _, _ = start(name, "f32")
    for seed in range(2):
        expected, _ = own_step(name)(data(seed), expected)
        ours, scaling, ledger, _ = compiled(name, "f32").step(data(seed), ours, scaling, ledger)
    assert same_bits(persistent(ours), persistent(expected))
    assert not same_bits(persistent(ours), persistent(start(name, "f32")[0]))


@pytest.mark.rows(4)
@every_row
def test_an_unchecked_float32_step_is_the_frameworks_own(name: str):
    def step(data: Data, train: Train) -> Train:
        options = {"policy": "f32", "check_finite": False}
        row = BY_NAME[name]
        return row.step(data, train, halfstep.NoLossScaling(), halfstep.Ledger(), **options)[0]

    train = start(name, "f32")[0]
    expected, _ = own_step(name)(data(), train)
    ours = jit(step)(data(), train)
    assert same_bits(persistent(ours), persistent(expected))


@pytest.mark.rows(7)
@every_policy
@every_row
def test_a_bad_batch_changes_nothing(name: str, policy: str):
    step = compiled(name, policy).step
    train, scaling, ledger, _ = step(data(0), *start(name, policy))
    before, scale = persistent(train), float(scaling.loss_scaling)
    train, scaling, ledger, report = step(data(1, poison=True), train, scaling, ledger)
    assert not report.finite
    assert same_bits(persistent(train), before)
    assert (ledger.applied, ledger.skipped, ledger.consecutive, ledger.bad_losses) == (1, 1, 1, 1)
    assert scaling.loss_scaling == (scale / 2 if policy == "f16" else scale)
    train, scaling, ledger, report = step(data(2), train, scaling, ledger)
    assert report.finite
    assert (ledger.applied, ledger.skipped, ledger.consecutive) == (2, 1, 0)
    assert not same_bits(persistent(train), before)
    assert all(np.isfinite(x).all() for x in floats(train))


@pytest.mark.rows(7)
@every_policy
@every_row
def test_dropout_drops_and_changes(name: str, policy: str):
    step = compiled(name, policy).step
    *rest, first = step(data(0), *start(name, policy))
    # The same batch with another key; networks that count for themselves ignore the key.
    *rest, second = step(data(0)._replace(key=jax.random.key(7)), *rest)
    masks = np.stack([first.dropped, second.dropped])
    assert masks.shape == (2, BATCH, HIDDEN)
    # Six standard deviations of the binomial distribution.
    assert abs(masks.mean() - RATE) <= 6 * (RATE * (1 - RATE) / masks.size) ** 0.5
    assert (masks[0] ^ masks[1]).mean() > 0.1


@pytest.mark.rows(4)
@every_row
def test_donated_buffers_are_gone(name: str):
    given = start(name, "bf16")
    *kept, _ = compiled(name, "bf16").step(data(), *given)
    assert all(x.is_deleted() for x in jtu.tree_leaves(eqx.filter(given, eqx.is_array)))
    assert all(np.isfinite(x).all() for x in floats(kept))


def on_devices(mesh: jax.sharding.Mesh, batch: Data, rest: Any) -> tuple[Data, Any]:
    """The batch split over the devices, all else on each of them."""
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x, y = (jax.device_put(v, split) for v in (batch.x, batch.y))
    return Data(x, y, jax.device_put(batch.key, replicated)), on_arrays(
        lambda v: jax.device_put(v, replicated), rest
    )


def each_device(x: jax.Array) -> list[Any]:
    return [np.asarray(shard.data) for shard in x.addressable_shards]


# The program for devices is compiled anew: on every change in the format that can overflow.
@pytest.mark.rows(2)
@pytest.mark.parametrize("policy", slow_unless(POLICIES, lambda policy: policy == "f16"))
@every_row
def test_four_devices(name: str, policy: str, mesh: jax.sharding.Mesh):
    step = compiled(name, policy).step
    *_, alone = step(data(), *start(name, policy))
    batch, rest = on_devices(mesh, data(), start(name, policy))
    train, scaling, ledger, together = step(batch, *rest)
    # Only the order of the sums over the batch is another.
    assert distance(together.grads, alone.grads) <= tolerance(policy)
    assert each_device(together.finite.finite) == [True] * 4

    before = persistent(train)
    batch, rest = on_devices(mesh, data(1, poison=True), (train, scaling, ledger))
    assert [bool(np.isnan(x).any()) for x in each_device(batch.x)] == [True, False, False, False]
    train, _, ledger, report = step(batch, *rest)
    assert each_device(report.finite.finite) == [False] * 4
    assert each_device(ledger.skipped) == [1] * 4
    assert same_bits(persistent(train), before)


@every_row
def test_batch_statistics_beyond_float16(name: str):
    row: Row = BY_NAME[name]
    # Hidden activations of a standard deviation of 400 and more: their variance is above 65504.
    batch = data(scale=800.0)
    expected, _ = own_step(name)(batch, start(name, "f16")[0])
    train, *_ = compiled(name, "f16").step(batch, *start(name, "f16"))
    ours, theirs = row.variances(train), row.variances(expected)
    assert max(float(v.max()) for v in theirs) > 1000
    assert distance(ours, theirs) <= tolerance("f16")


def test_equinox_batch_norm_in_ema_mode():
    model, state = eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0), mode="ema")
    gradient = halfstep.filter_grad(Equinox().loss, policy="bf16", has_aux=True)
    gradient(model, state, *data())
