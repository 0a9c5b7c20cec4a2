"""Inside `shard_map`: one verdict over any mesh axes, gradients summed where it is safe."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import halfstep
from halfstep import DynamicLossScaling
from halfstep._training.collective import varying_axes

pytestmark = [pytest.mark.core, pytest.mark.types]

tracked = pytest.mark.parametrize("check_vma", [True, False])


@pytest.fixture
def grid() -> jax.sharding.Mesh:
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=auto)


def shard(mesh, func, in_specs, out_specs, check_vma):
    return jax.jit(
        jax.shard_map(func, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    )


def loss(w, x):
    return jnp.sum(w[None] * x)


@tracked
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_float16_shards_add_up_in_float32(mesh, check_vma: bool, reduction):
    """Four finite shards of 20000: in float16 their sum would be infinite."""

    def step(w, x):
        value, scaling, finite, grads = halfstep.filter_value_and_grad(
            loss,
            DynamicLossScaling(1.0, period=1),
            policy="f16",
            axis_names="data",
            axis_reduction=reduction,
        )(w, x)
        return value, scaling, finite.finite, grads

    run = shard(mesh, step, (P(), P("data")), P(), check_vma)
    value, scaling, finite, grads = run(jnp.ones(1), jnp.full((4, 1), 20000.0))
    divisor = 4 if reduction == "mean" else 1
    assert finite
    assert value == 80000 / divisor
    assert grads[0] == 80000 / divisor
    assert scaling.loss_scaling == 2


@tracked
@pytest.mark.parametrize("bad", range(4))
def test_one_bad_shard_is_everybodys_verdict(mesh, check_vma: bool, bad: int):
    """Each shard reports its own scale and verdict: they are all the same."""

    def step(w, x):
        scaling, finite, _ = halfstep.filter_grad(
            loss, DynamicLossScaling(2.0**4), policy="f16:inputs", axis_names=("data",)
        )(w, x)
        stack = jnp.stack([scaling.loss_scaling, finite.finite.astype(jnp.float32)])
        return jax.lax.pcast(stack, "data", to="varying")[None] if check_vma else stack[None]

    x = jnp.ones((4, 1)).at[bad].set(60000.0)
    out = shard(mesh, step, (P(), P("data")), P("data"), check_vma)(jnp.ones(1), x)
    assert np.array_equal(out, [[8.0, 0.0]] * 4)


@tracked
def test_any_mesh_axes(grid, check_vma: bool):
    def step(w, x):
        _, finite, grads = halfstep.filter_grad(
            loss, DynamicLossScaling(1.0), policy="f16", axis_names=("data", "model")
        )(w, x)
        return finite.finite, finite.first_leaf, grads

    run = shard(grid, step, (P(), P(("data", "model"))), P(), check_vma)
    finite, first, grads = run(jnp.ones(1), jnp.arange(4.0)[:, None])
    assert finite
    assert first == -1
    assert grads[0] == 6
    finite, first, _ = run(jnp.ones(1), jnp.array([[1.0], [jnp.inf], [1.0], [1.0]]))
    assert not finite
    assert first == 0


def test_sharded_parameters_keep_their_own_gradients(mesh):
    """Over an axis on which a parameter is sharded, its gradient is not summed."""

    def step(w, b, x):
        def loss(model, x):
            return jnp.sum(model["w"] * x) + jnp.sum(model["b"] * x)

        _, _, grads = halfstep.filter_grad(
            loss, DynamicLossScaling(1.0), policy="f16", axis_names="data"
        )({"w": w, "b": b}, x)
        return grads["w"], grads["b"]

    run = shard(mesh, step, (P("data"), P(), P("data")), (P("data"), P()), True)
    w, b = run(jnp.ones(4), jnp.ones(1), jnp.arange(4.0))
    assert np.array_equal(w, [0, 1, 2, 3])
    assert np.array_equal(b, [6])


@tracked
@pytest.mark.parametrize("bad", range(4))
def test_a_bad_gradient_of_one_shards_own_parameter(mesh, check_vma: bool, bad: int):
    """Nothing sums these gradients, so nothing but the agreement spreads the news."""

    def step(w, x):
        def local(w, x):
            # Its own shard's loss; finite, because the bad factor meets only the cotangent.
            return jnp.sum(w * x - jax.lax.stop_gradient(w * x))

        verdict = halfstep.filter_value_and_grad(
            local, DynamicLossScaling(2.0**4), policy="f16:inputs", axis_names="data"
        )(w, x)[2]
        flags = jnp.stack([verdict.finite, verdict.loss_finite])
        return jax.lax.pcast(flags, "data", to="varying")[None] if check_vma else flags[None]

    run = shard(mesh, step, (P("data"), P("data")), P("data"), check_vma)
    out = run(jnp.ones(4), jnp.ones(4).at[bad].set(30000.0))
    assert np.array_equal(out, [[False, True]] * 4)


@tracked
@pytest.mark.parametrize(("dtype", "expected"), [("f32", "f32"), ("bf16", "bf16"), (None, "f32")])
def test_reduce_dtype_is_what_crosses(mesh, check_vma: bool, dtype, expected: str):
    def step(w, x):
        return halfstep.filter_grad(
            loss, DynamicLossScaling(1.0), policy="f16", axis_names="data", reduce_dtype=dtype
        )(w, x)[2]

    run = shard(mesh, step, (P(), P("data")), P(), check_vma)
    text = str(jax.make_jaxpr(run)(jnp.ones(3), jnp.ones((4, 3))))
    # JAX names the primitive psum, or psum_invariant where shard_map tracks what varies.
    sums = [line for line in text.splitlines() if "psum" in line and "[3]" in line]
    assert len(sums) == 1
    assert f":{expected}[3]" in sums[0]
    assert run(jnp.ones(3), jnp.ones((4, 3))).dtype == jnp.float32


@tracked
def test_microbatches_inside(mesh, check_vma: bool):
    def step(w, x):
        _, finite, grads = halfstep.filter_grad(
            loss,
            DynamicLossScaling(1.0),
            policy="f16",
            axis_names="data",
            microbatches=2,
            batch=("x",),
            microbatch_reduction="sum",
        )(w, x)
        return grads, finite.finite

    run = shard(mesh, step, (P(), P("data")), P(), check_vma)
    grads, finite = run(jnp.ones(1), jnp.arange(8.0)[:, None])
    assert finite
    assert grads[0] == 28


@tracked
def test_update_inside(mesh, check_vma: bool):
    """The gate's loop accepts what shard_map tracks, and parameters stay the same everywhere."""

    def step(w, x, ledger):
        _, finite, grads = halfstep.filter_grad(
            loss, DynamicLossScaling(1.0), policy="f16", axis_names="data"
        )(w, x)
        return halfstep.transaction(finite, lambda w: w - grads, w, ledger)

    run = shard(mesh, step, (P(), P("data"), P()), P(), check_vma)
    w, ledger = run(jnp.ones(1), jnp.arange(4.0)[:, None], halfstep.Ledger())
    assert w[0] == -5
    assert ledger.applied == 1
    w, ledger = run(w, jnp.array([[1.0], [jnp.nan], [1.0], [1.0]]), ledger)
    assert w[0] == -5
    assert ledger.skipped == 1


def test_a_loss_that_is_already_global_is_not_counted_again(mesh):
    def step(w, x):
        value, _, _, grads = halfstep.filter_value_and_grad(
            lambda w, x: jax.lax.psum(jnp.sum(w[None] * x), "data"),
            DynamicLossScaling(1.0),
            policy="f16",
            axis_names="data",
        )(w, x)
        return value, grads

    value, grads = shard(mesh, step, (P(), P("data")), P(), True)(
        jnp.ones(1), jnp.arange(4.0)[:, None]
    )
    assert value == 6
    assert grads[0] == 6


def test_what_jax_calls_varying(mesh):
    seen = []
    run = shard(mesh, lambda x: seen.append(varying_axes(x)) or x, P("data"), P("data"), True)
    run(jnp.ones(4))
    assert seen == [frozenset({"data"})]
    assert varying_axes(jnp.ones(4)) == frozenset()


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_jit_over_a_mesh(kind: str):
    """The same step under plain jit, for both kinds of mesh axes; the verdict is global."""
    axis_type = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    place = partial(jax.device_put, device=jax.sharding.NamedSharding(mesh, P("data")))
    whole = partial(jax.device_put, device=jax.sharding.NamedSharding(mesh, P()))

    @jax.jit
    def step(w, x, scaling, ledger):
        scaling, finite, grads = halfstep.filter_grad(
            lambda w, x: jnp.sum(w[None] * x, dtype=jnp.float32), scaling, policy="f16"
        )(w, x)
        w, ledger = halfstep.transaction(finite, lambda w: w - grads, w, ledger)
        return w, scaling, ledger

    with jax.set_mesh(mesh):
        state = jax.tree.map(whole, (jnp.zeros(2), DynamicLossScaling(2.0**2), halfstep.Ledger()))
        w, scaling, ledger = step(state[0], place(jnp.arange(8.0).reshape(4, 2)), *state[1:])
        assert np.array_equal(w, [-12, -16])
        bad = place(jnp.arange(8.0).reshape(4, 2).at[2, 1].set(jnp.nan))
        w, scaling, ledger = step(w, bad, scaling, ledger)
    assert np.array_equal(w, [-12, -16])
    assert scaling.loss_scaling == 2
    assert (int(ledger.applied), int(ledger.skipped)) == (1, 1)
