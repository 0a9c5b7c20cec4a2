"""Situations in which mixed-precision libraries for JAX have been seen to fail; a row each.

Functions are written in plain float32. Where a row is about overflow itself, it casts arguments
(`"f16:inputs"`): autocast would not overflow there.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec as P

import halfstep
from halfstep import DynamicLossScaling, Ledger
from tests._jaxprs import contractions

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]

W, X = jnp.eye(4) * 0.5, jnp.ones((2, 4))


@jax.custom_vjp
def custom_vjp_dot(w, x):
    return x @ w


custom_vjp_dot.defvjp(lambda w, x: (x @ w, (w, x)), lambda res, g: (res[1].T @ g, g @ res[0].T))


@jax.custom_jvp
def custom_jvp_dot(w, x):
    return x @ w


@custom_jvp_dot.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return x @ w, x @ dw + dx @ w


def scan_over_layers(w, x):
    layers = jnp.stack([w, w, w])
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)[0]


def scan_rnn_zeros_carry(w, x):
    # The user's zeros are float32: the carry stays so, and with it half of the dots.
    def cell(h, x):
        h = jnp.tanh(x @ w + h @ w)
        return h, h

    return jax.lax.scan(cell, jnp.zeros(4), x)[0]


def scan_zeros_carry_low_output(w, x):
    return jax.lax.scan(lambda h, x: (x @ w, None), jnp.zeros(4), x)[0]


def cond_with_zeros_branch(w, x):
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.zeros((2, 4)))


def bounded_loop(w, x):
    def turn(_, h):
        return h @ w + jnp.zeros(h.shape)

    return jax.lax.fori_loop(0, 3, turn, jnp.zeros((2, 4)) + x @ w)


def pallas_float32_output(w, x):
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    product = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((2, 4), jnp.float32), interpret=True
    )(jax.lax.stop_gradient(x), jax.lax.stop_gradient(w))
    return product @ w


NESTED = {
    "nested jit": lambda w, x: jax.jit(lambda w, x: jax.jit(jnp.matmul)(x, w))(w, x),
    "remat": jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w),
    "custom_vjp": custom_vjp_dot,
    "custom_jvp": custom_jvp_dot,
    "scan over layers": scan_over_layers,
    "scan RNN, float32 zeros carry": scan_rnn_zeros_carry,
    "scan, zeros carry, low body output": scan_zeros_carry_low_output,
    "cond with a zeros branch": cond_with_zeros_branch,
    "fori_loop": bounded_loop,
}


@pytest.mark.rows(4)
@pytest.mark.parametrize("policy", ["bf16", "f16"])
@pytest.mark.parametrize("func", NESTED.values(), ids=NESTED)
def test_every_contraction_is_low(func, policy: str):
    """Forward and backward: all dots in the compute dtype, and the right gradient."""

    def loss(w, x):
        return jnp.sum(func(w, x).astype(jnp.float32))

    scaling = DynamicLossScaling(2.0**4)
    low = lambda w, x: halfstep.filter_grad(loss, scaling, policy=policy)(w, x)[2]  # noqa: E731
    dtype = {"bf16": "bfloat16", "f16": "float16"}[policy]
    found = contractions(low, W, X)
    assert found
    assert set(found) == {dtype}
    # Powers of two, but for tanh: a handful of roundings.
    exact, got = jax.grad(loss)(W, X), low(W, X)
    assert jnp.abs(got - exact).max() <= 8 * halfstep.FORMATS[policy].eps * jnp.abs(exact).max()


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_a_kernel_with_a_float32_output(policy: str):
    """The kernel is what it is; the product after it, and its derivative, are low."""

    def loss(w, x):
        return jnp.sum(pallas_float32_output(w, x))

    gradient = halfstep.filter_grad(loss, DynamicLossScaling(2.0**4), policy=policy)
    found = contractions(lambda w, x: gradient(w, x)[2], W, X)
    dtype = {"bf16": "bfloat16", "f16": "float16"}[policy]
    assert found.count("float32") == 1
    assert set(found) - {"float32"} == {dtype}
    exact = jax.grad(loss)(W, X)
    difference = jnp.abs(gradient(W, X)[2] - exact).max()
    assert difference <= 8 * halfstep.FORMATS[policy].eps * jnp.abs(exact).max()


def test_sharded_jit_sums_in_float32(mesh: jax.sharding.Mesh):
    """Four finite shards of 20000: XLA sums them as they leave the contraction."""
    x = jax.device_put(jnp.full((4, 1), 20000.0), NamedSharding(mesh, P("data")))

    def loss(w, x):
        return jnp.sum((x @ w).astype(jnp.float32))

    _, finite, grads = jax.jit(
        lambda w, x: halfstep.filter_grad(loss, DynamicLossScaling(1.0), policy="f16")(w, x)
    )(jnp.ones((1, 1)), x)
    assert finite
    assert grads[0, 0] == 80000


def test_shards_do_not_diverge(mesh: jax.sharding.Mesh):
    """A shard_map step in which one shard overflows: all shards keep the same scale."""

    def step(w, x, scaling):
        scaling, finite, grads = halfstep.filter_grad(
            lambda w, x: jnp.sum(w * x), scaling, policy="f16:inputs", axis_names="data"
        )(w, x)
        return halfstep.select_tree(finite, w - grads, w), scaling

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P()))
    w, scaling = jnp.ones(1), DynamicLossScaling(2.0**15)
    for x in (jnp.ones(4), jnp.ones(4).at[2].set(4.0), jnp.ones(4)):
        w, scaling = run(w, x, scaling)
    shards = [float(shard.data) for shard in scaling.loss_scaling.addressable_shards]
    assert shards == [2.0**14] * 4
    assert w[0] == 1 - 8


class TestBatchNormState:
    """Equinox here; every framework in `test_frameworks.py`."""

    def run(self, policy: str, steps: int, x, *, mode: Any = "batch", wrap=lambda norm: norm):
        norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", momentum=0.9, mode=mode)
        index: Any = norm.batch_state_index if mode == "batch" else norm.ema_state_index
        traces = []

        def loss(norm, state, x):
            traces.append(1)
            norm = wrap(norm)
            out, state = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
                x, state
            )
            return jnp.mean(out.astype(jnp.float32) ** 2), state

        @eqx.filter_jit
        def step(norm, state, scaling, x):
            transform = halfstep.filter_value_and_grad(loss, scaling, policy=policy, has_aux=True)
            (_, state), scaling, _, _ = transform(norm, state, x)
            return state, scaling

        scaling = DynamicLossScaling(2.0**4)
        for _ in range(steps):
            state, scaling = step(norm, state, scaling, x)
        return state.get(index), len(traces)

    @pytest.mark.parametrize("policy", ["bf16", "f16"])
    def test_keeps_its_dtype_and_does_not_retrace(self, policy: str):
        (mean, var), first = self.run(policy, 1, jnp.ones((4, 2)))
        assert mean.dtype == var.dtype == jnp.float32
        assert self.run(policy, 5, jnp.ones((4, 2)))[1] == first

    def test_the_average_does_not_stall(self):
        """A float16 average stops at 49.6 of 49.96: the next change is below half a unit."""
        (mean, _), _ = self.run("f16", 200, jnp.full((4, 2), 49.96))
        # The batch and a tenth of its mean are float16: two roundings of half an epsilon.
        assert np.abs(np.asarray(mean) - 49.96).max() <= halfstep.FORMATS["f16"].eps * 49.96

    def test_variance_at_std_400(self):
        (_, var), _ = self.run("f16", 1, jnp.asarray([[-400.0, 400.0], [400.0, -400.0]]))
        assert jnp.isfinite(var).all()

    def test_mode_ema(self):
        """Equinox selects between the batch's statistics and the state's: of one dtype here."""
        self.run("f16", 1, jnp.ones((4, 2)), mode="ema")

    @pytest.mark.parametrize("mode", ["batch", "ema"])
    def test_in_full_precision(self, mode: str):
        """Where arguments are cast: the norm alone in float32, exact and without overflow."""
        x = jnp.asarray([[-400.0, 400.0], [400.0, -400.0]])
        options = {"mode": mode, "wrap": halfstep.force_full_precision}
        (mean, var), _ = self.run("f16", 200, x, **options)
        assert mean.dtype == var.dtype == jnp.float32
        # 0.9 ** 200 of the first value is left; 200 additions round in float32.
        assert np.abs(np.asarray(var) / 160000 - 1).max() <= 200 * halfstep.FORMATS["f32"].eps


class TestLossScaleHistory:
    def test_growth_step(self):
        """Neither the value nor the gradient changes in the step that grows the scale."""
        scaling = DynamicLossScaling(2.0**4, period=2)
        seen = []
        for _ in range(6):
            value, scaling, _, grads = halfstep.filter_value_and_grad(
                lambda w: jnp.sum(w * w), scaling, policy="f16"
            )(jnp.asarray([0.5, 0.25]))
            seen.append((float(value), *map(float, grads)))
        assert set(seen) == {(0.3125, 1.0, 0.5)}

    def test_growth_limit_then_bad_steps(self):
        scaling = DynamicLossScaling(2.0**15, max_loss_scaling=2.0**16, period=1)
        for _ in range(50):
            scaling = scaling.adjust(True)
        for _ in range(5):
            scaling = scaling.adjust(False)
        assert scaling.loss_scaling == 2.0**11

    def test_repeated_nan_then_good_data(self):
        """The floor leaves a scale that still carries gradients, and it grows back."""
        scaling, ledger, w = DynamicLossScaling(period=2), Ledger(), jnp.asarray(1.0)
        for step in range(300):
            x = jnp.asarray(jnp.nan if step < 200 else 0.5)
            scaling, finite, grads = halfstep.filter_grad(
                lambda w, x: w * x, scaling, policy="f16:inputs"
            )(w, x)
            w, ledger = halfstep.transaction(finite, lambda w, g=grads: w - g / 64, w, ledger)
        # From 1 the scale doubles every other step up to 2**15, and then meets the range's end
        # (2**16 is infinite in float16) every third step.
        assert int(ledger.steps) == 300
        assert 200 < int(ledger.skipped) <= 200 + 70 // 3 + 1
        assert w == 1 - int(ledger.applied) * 0.5 / 64
        assert scaling.loss_scaling in (2.0**15, 2.0**16)

    def test_skips_do_not_move_the_accumulation_boundary(self):
        """A bad microbatch costs its own step; with MultiSteps, no phase shift either."""
        optimizer = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
        w = jnp.asarray(0.0)
        state = optimizer.init(w)
        for grad, finite in ((1.0, True), (jnp.nan, False), (3.0, True)):
            w, state = halfstep.optimizer_update(
                w, optimizer, state, jnp.asarray(grad), jnp.asarray(finite)
            )
        assert w == -2.0


class TestDonation:
    def test_donation_filter_jit_and_lower(self):
        optimizer = optax.adamw(1e-3)

        def step(model, state, scaling, ledger, x):
            scaling, finite, grads = halfstep.filter_grad(
                lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2), scaling, policy="f16"
            )(model, x)
            model, state = halfstep.optimizer_update(model, optimizer, state, grads, finite)
            return model, state, scaling, ledger.record(finite)

        def fresh():
            model = eqx.nn.Linear(4, 2, key=jax.random.key(0))
            state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
            return model, state, DynamicLossScaling(), Ledger()

        donated = eqx.filter_jit(step, donate="all")
        mine, other = fresh(), fresh()
        for _ in range(3):
            mine = donated(*mine, jnp.ones((2, 4)))
        # The second run's buffers were never part of the first's.
        other = donated(*other, jnp.ones((2, 4)))
        assert int(mine[3].applied) == 3
        assert int(other[3].applied) == 1
        plain: Any = eqx.filter_jit(step)
        assert plain.lower(*fresh(), jnp.ones((2, 4))).compile() is not None
