"""Sizes that do not fit here: thousands of devices and of leaves, by tracing and lowering alone."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import halfstep
from tests._jaxprs import equations

OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def step(model, state, scaling, ledger, x):
    def loss(model, x):
        return jnp.mean((jnp.tanh(x @ model["up"]) @ model["down"]).astype(jnp.float32) ** 2)

    scaling, finite, grads = halfstep.filter_grad(
        loss, scaling, policy="f16", microbatches=2, batch=("x",)
    )(model, x)

    def commit(old):
        return halfstep.apply_gradients(old[0], OPTIMIZER, old[1], grads)

    (model, state), ledger = halfstep.transaction(finite, commit, (model, state), ledger)
    return model, state, scaling, ledger


def test_fully_sharded_over_8192_devices():
    """The whole step, with microbatches, gate and ledger, lowers for a mesh of 256 x 32 chips."""
    mesh = AbstractMesh((256, 32), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def spec(shape, partition, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, partition))

    parts = {(1024, 4096): P("fsdp"), (4096, 1024): P(None, "fsdp"), (): P()}
    model = {"up": spec((1024, 4096), P("fsdp")), "down": spec((4096, 1024), P(None, "fsdp"))}
    rest = jax.eval_shape(
        lambda m: (OPTIMIZER.init(m), halfstep.DynamicLossScaling(), halfstep.Ledger()), model
    )
    rest = jax.tree.map(lambda s: spec(s.shape, parts[s.shape], s.dtype), rest)
    traced = jax.jit(step, donate_argnums=(0, 1, 2, 3)).trace(
        model, *rest, spec((16384, 1024), P(("data", "fsdp")))
    )
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "num_partitions = 8192" in text


def test_ten_thousand_parameters_cost_a_fixed_number_of_operations_each():
    """What the wrapper adds to a trace is linear in the leaves, and small."""

    def count(leaves: int) -> int:
        model = {f"w{i}": jax.ShapeDtypeStruct((2,), jnp.float32) for i in range(leaves)}

        def step(model, scaling):
            def loss(model):
                return jnp.sum(jnp.stack(list(model.values())))

            scaling, finite, grads = halfstep.filter_grad(loss, scaling, policy="f16")(model)
            return halfstep.transaction(
                finite,
                lambda m: jax.tree.map(lambda w, g: w - g, m, grads),
                model,
                halfstep.Ledger(),
            )

        traced = jax.make_jaxpr(step)(model, halfstep.DynamicLossScaling())
        return sum(1 for _ in equations(traced))

    small, large = count(500), count(2500)
    per_leaf = (large - small) / 2000
    # Cast, gradient's cast back, unscale, four for the check, stack, update; the loss's own two.
    assert per_leaf <= 14
    assert abs((count(1500) - small) / 1000 - per_leaf) < 0.1
