"""Gradients and updates of NNX modules in place."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import halfstep
from halfstep._base import without_key_type
from halfstep.integrations import nnx as mixed

pytestmark = [pytest.mark.core, pytest.mark.types, pytest.mark.usefixtures("standard_promotion")]

RATE = 1e-2


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.dropout(jnp.tanh(self.norm(self.dense(x)))))


def loss(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


def make() -> Any:
    return Net(nnx.Rngs(0))


def batch(*, poison: bool = False) -> jax.Array:
    x = jax.random.normal(jax.random.key(1), (8, 4))
    return x.at[0, 0].set(jnp.nan) if poison else x


def bits(node: Any, *filters: Any) -> list[bytes]:
    leaves = jtu.tree_leaves(nnx.state(node, *filters))
    return [np.asarray(without_key_type(x)).tobytes() for x in leaves]


def test_in_float32_it_is_nnx_value_and_grad():
    ours, theirs = make(), make()
    expected, expected_grads = nnx.value_and_grad(loss)(theirs, batch())
    value, scaling, finite, grads = mixed.value_and_grad(loss, policy="f32")(ours, batch())
    assert value == expected
    assert type(grads) is type(expected_grads)
    assert jtu.tree_structure(grads) == jtu.tree_structure(expected_grads)
    assert bits(grads) == bits(expected_grads)
    assert bits(ours) == bits(theirs)
    assert isinstance(scaling, halfstep.NoLossScaling)
    assert not finite.checked


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_parameters_and_inputs_are_cast_and_state_is_not(policy: str):
    seen = {}

    def look(model: Any, x: jax.Array, *, weight: jax.Array) -> jax.Array:
        seen.update(kernel=model.dense.kernel.dtype, mean=model.norm.mean.dtype)
        seen.update(x=x.dtype, weight=weight.dtype, key=model.dropout.rngs.key.dtype)
        return loss(model, x) * weight

    model = make()
    key_dtype = model.dropout.rngs.key.dtype
    gradient = mixed.value_and_grad(
        look, halfstep.StaticLossScaling(8.0), policy=f"{policy}:inputs"
    )
    value, _, _, grads = gradient(model, batch(), weight=jnp.float32(1))
    low = halfstep.Policy.parse(policy).compute
    assert seen == {"kernel": low, "mean": jnp.float32, "x": low, "weight": low, "key": key_dtype}
    assert value.dtype == jnp.float32
    assert {x.dtype for x in jtu.tree_leaves(grads)} == {np.dtype(np.float32)}
    assert model.norm.mean.dtype == jnp.float32
    assert model.dense.kernel.dtype == jnp.float32


def test_a_bad_step_keeps_statistics_and_advances_random_state():
    model = make()
    params, statistics = bits(model, nnx.Param), bits(model, nnx.BatchStat)
    gradient = mixed.value_and_grad(loss, policy="bf16", check_finite=True)
    _, _, finite, grads = gradient(model, batch(poison=True))
    assert not finite
    assert finite.where(grads) is not None
    assert bits(model, nnx.Param) == params
    assert bits(model, nnx.BatchStat) == statistics
    assert model.dropout.rngs.count[...] == 1
    _, _, finite, _ = gradient(model, batch())
    assert finite
    assert bits(model, nnx.BatchStat) != statistics
    assert model.dropout.rngs.count[...] == 2


def test_an_unchecked_step_commits_statistics():
    model = make()
    mixed.value_and_grad(loss, policy="bf16")(model, batch(poison=True))
    assert np.isnan(model.norm.mean[...]).any()


def train(wrap: Callable) -> tuple[Any, Any, list[int]]:
    """Three steps, the second one bad, by a step function that `wrap` compiles."""
    traces: list[int] = []

    def step(model: Any, optimizer: Any, scaling: Any, x: jax.Array) -> Any:
        traces.append(1)
        gradient = mixed.value_and_grad(loss, scaling, policy="f16")
        value, scaling, finite, grads = gradient(model, x)
        mixed.optimizer_update(optimizer, model, grads, finite)
        return value, scaling, finite.finite

    model = make()
    optimizer = nnx.Optimizer(model, optax.sgd(RATE, momentum=0.9), wrt=nnx.Param)
    scaling: Any = halfstep.DynamicLossScaling(2.0**10)
    compiled, verdicts = wrap(step), []
    for poison in (False, True, False):
        _, scaling, finite = compiled(model, optimizer, scaling, batch(poison=poison))
        verdicts.append(bool(finite))
    assert verdicts == [True, False, True]
    assert scaling.loss_scaling == 2**9
    assert optimizer.step[...] == 2
    return model, optimizer, traces


def jax_jit(step: Callable) -> Callable:
    """`jax.jit` on pure state, as the NNX documentation does it."""

    @jax.jit
    def pure(graph: Any, state: Any, scaling: Any, x: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        result = step(model, optimizer, scaling, x)
        return result, nnx.state((model, optimizer))

    def call(model: Any, optimizer: Any, scaling: Any, x: jax.Array) -> Any:
        graph, state = nnx.split((model, optimizer))
        result, state = pure(graph, state, scaling, x)
        nnx.update((model, optimizer), state)
        return result

    return call


def test_steps_agree_under_every_jit():
    # A compiler may order float16 arithmetic otherwise: up to 56 roundings of eps / 2 each on the
    # way to a gradient (counted in the suite of the frameworks), whose entries are below 2, in
    # each of two steps.
    atol = 2 * RATE * 56 * halfstep.FORMATS["f16"].eps / 2 * 2
    eager, eager_optimizer, _ = train(lambda step: step)
    for wrap in (nnx.jit, jax_jit):
        model, optimizer, traces = train(wrap)
        assert len(traces) == 1
        for ours, theirs in ((model, eager), (optimizer, eager_optimizer)):
            for x, y in zip(
                jtu.tree_leaves(nnx.state(ours, nnx.Not(nnx.RngKey))),
                jtu.tree_leaves(nnx.state(theirs, nnx.Not(nnx.RngKey))),
                strict=True,
            ):
                np.testing.assert_allclose(x, y, rtol=0, atol=atol)


def test_microbatches_hand_state_on():
    model, looped = make(), make()
    x = batch()
    gradient = mixed.value_and_grad(loss, policy="f32", microbatches=2, batch=("x",))
    value, _, _, grads = gradient(model, x)
    own = nnx.value_and_grad(loss)
    values, all_grads = zip(*(own(looped, x[i::2]) for i in range(2)), strict=True)
    # Sums of two float32 numbers in another order than a fused mean: one rounding each.
    eps = halfstep.FORMATS["f32"].eps
    np.testing.assert_allclose(value, sum(values) / 2, rtol=4 * eps)
    for ours, first, second in zip(*map(jtu.tree_leaves, (grads, *all_grads)), strict=True):
        np.testing.assert_allclose(ours, (first + second) / 2, rtol=0, atol=16 * eps)
    assert model.dropout.rngs.count[...] == 2
    for kind in ("mean", "var"):
        ours, theirs = (getattr(m.norm, kind)[...] for m in (model, looped))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=16 * eps)


def test_other_objects_are_changed_in_place_too():
    class Noisy(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dense = nnx.Linear(4, 2, rngs=rngs)

    def noisy(model: Noisy, rngs: nnx.Rngs, x: Any, *, extra: nnx.Rngs) -> Any:
        noise = rngs.normal((8, 4)) + extra.normal((8, 4))
        return jnp.mean(model.dense(x + noise.astype(x.dtype)) ** 2)

    model, rngs, extra = Noisy(nnx.Rngs(0)), nnx.Rngs(1), nnx.Rngs(2)
    gradient = mixed.value_and_grad(noisy, policy="bf16", keep=("x",), check_finite=True)
    first, *_ = gradient(model, rngs, batch(), extra=extra)
    second, _, finite, _ = gradient(model, rngs, batch(poison=True), extra=extra)
    third, *_ = gradient(model, rngs, batch(), extra=extra)
    assert not finite
    assert first != third
    assert np.isnan(second)
    assert rngs.default.count[...] == extra.default.count[...] == 3


def test_shared_objects_stay_shared():
    rngs = nnx.Rngs(0)

    class Holder(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(4))
            self.again = self.weight
            self.rngs = rngs

    def both(model: Holder, rngs: nnx.Rngs, x: Any) -> Any:
        assert model.rngs is rngs
        rngs.normal(())
        model.rngs.normal(())
        return jnp.sum(model.weight * x) + jnp.sum(model.again * x)

    model = Holder()
    _, _, _, grads = mixed.value_and_grad(both, policy="f32")(model, rngs, jnp.arange(4.0))
    (only,) = jtu.tree_leaves(grads)
    assert (only == 2 * jnp.arange(4.0)).all()
    assert rngs.default.count[...] == 2
    assert model.rngs is rngs


def test_frozen_parameters_are_cast_and_left_alone():
    model = make()
    model.dense.kernel[...] += 2.0**-12  # Not a bfloat16: a write of what came back would show.
    before = bits(model, nnx.Param)
    seen = []

    def look(model: Any, x: jax.Array) -> jax.Array:
        seen.append(model.dense.kernel.dtype)
        return loss(model, x)

    wrt = nnx.All(nnx.Param, nnx.PathContains("head"))
    gradient = mixed.value_and_grad(look, policy="bf16:inputs", wrt=wrt)
    _, _, _, grads = gradient(model, batch())
    assert list(grads) == ["head"]
    assert seen[0] == jnp.bfloat16
    assert bits(model, nnx.Param) == before
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=wrt)
    kernel = bits(model.dense)
    mixed.optimizer_update(optimizer, model, grads, jnp.asarray(True))
    assert bits(model.dense) == kernel
    assert bits(model, nnx.Param) != before


def test_keep_addresses_parameters_by_the_functions_names():
    seen = {}

    def look(network: Any, x: jax.Array) -> jax.Array:
        seen.update(scale=network.norm.scale.dtype, kernel=network.dense.kernel.dtype, x=x.dtype)
        return loss(network, x)

    rules = ("network/norm", "x")
    gradient = mixed.value_and_grad(look, policy="bf16:inputs", keep=rules)
    gradient(make(), batch())
    assert seen == {"scale": jnp.float32, "kernel": jnp.bfloat16, "x": jnp.float32}
    with pytest.raises(ValueError, match="'network/nrom' in `keep` selects nothing"):
        mixed.value_and_grad(look, policy="bf16", keep=("network/nrom",))(make(), batch())


class Peak(nnx.Module):
    """Keeps its largest activation as it comes, in the activation's own dtype."""

    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(4, 2, rngs=rngs)
        self.peak = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        x = self.dense(x)
        self.peak.set_value(jnp.max(x))
        return x


def test_state_assigned_in_16_bits_keeps_its_dtype():
    model = Peak(nnx.Rngs(0))
    mixed.value_and_grad(loss, policy="bf16")(model, batch())
    assert model.peak.dtype == jnp.float32
    assert model.peak[...] > 0


def test_new_variables_appear():
    def sow(model: Any, x: Any) -> Any:
        out = model(x)
        model.seen = nnx.Intermediate(out)
        return jnp.mean(out**2)

    model = make()
    gradient = mixed.value_and_grad(sow, policy="bf16", check_finite=True)
    gradient(model, batch())
    first = np.asarray(model.seen[...], np.float32)
    gradient(model, batch(poison=True))
    assert first.shape == (8, 2)
    assert np.isfinite(first).all()
    assert np.isnan(np.asarray(model.seen[...], np.float32)).any()


def test_assignments_to_parameters_are_lost_with_a_warning():
    def assign(model: Any, x: Any) -> Any:
        model.dense.kernel[...] = model.dense.kernel[...] * 2
        return loss(model, x)

    model = make()
    before = bits(model, nnx.Param)
    with pytest.warns(UserWarning, match="assigns to `model/dense/kernel`"):
        mixed.value_and_grad(assign, policy="bf16")(model, batch())
    assert bits(model, nnx.Param) == before


def test_removing_a_variable_is_an_error():
    def remove(model: Any, x: Any) -> Any:
        value = loss(model, x)
        del model.norm.mean
        return value

    with pytest.raises(ValueError, match="the function removed `model/norm/mean`"):
        mixed.value_and_grad(remove, policy="bf16")(make(), batch())


def test_auxiliary_output_and_grad():
    def with_aux(model: Any, x: Any) -> tuple[Any, Any]:
        out = model(x)
        return jnp.mean(out**2), {"out": out, "n": 3}

    (value, aux), _, _, grads = mixed.value_and_grad(with_aux, policy="bf16", has_aux=True)(
        make(), batch()
    )
    assert value.shape == ()
    assert aux["n"] == 3
    assert aux["out"].dtype == jnp.float32
    _, _, same, again = mixed.grad(with_aux, policy="bf16", has_aux=True)(make(), batch())
    assert bits(same) == bits(grads)
    assert (again["out"] == aux["out"]).all()
    assert len(mixed.grad(loss, policy="bf16")(make(), batch())) == 3


def test_shards_agree(mesh: jax.sharding.Mesh):
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)

    def shard(state: Any, x: jax.Array) -> Any:
        gradient = mixed.value_and_grad(
            loss, policy="f32", axis_names="data", axis_reduction="mean", check_finite=True
        )
        value, _, finite, grads = gradient(nnx.merge(graph, state), x)
        return value, finite, grads

    everywhere, split = PartitionSpec(), PartitionSpec("data")
    sharded = jax.jit(
        jax.shard_map(shard, mesh=mesh, in_specs=(everywhere, split), out_specs=everywhere)
    )
    value, finite, grads = sharded(state, batch())
    expected, expected_grads = nnx.value_and_grad(loss)(model, batch())
    eps = halfstep.FORMATS["f32"].eps
    # Eight products and their sum, in another order.
    np.testing.assert_allclose(value, expected, rtol=8 * eps)
    for ours, theirs in zip(jtu.tree_leaves(grads), jtu.tree_leaves(expected_grads), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=8 * eps)
    assert finite
    assert not sharded(state, batch(poison=True))[1]


def gradients(model: Any) -> Any:
    return nnx.grad(loss)(model, batch())


@pytest.mark.parametrize("finite", [True, False, "unchecked"])
@pytest.mark.parametrize("compiled", [True, False])
def test_optimizer_update_is_the_optimizers_own_or_nothing(finite: Any, compiled: bool):
    ours, theirs = make(), make()
    optimizers = [nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param) for m in (ours, theirs)]
    grads = gradients(theirs)
    gradients(ours)
    verdict = halfstep.Verdict(None, None, None) if finite == "unchecked" else jnp.asarray(finite)
    update = nnx.jit(mixed.optimizer_update) if compiled else mixed.optimizer_update
    own = nnx.jit(lambda o, m, g: o.update(m, g) and None) if compiled else nnx.Optimizer.update
    update(optimizers[0], ours, grads, verdict)
    if finite:
        own(optimizers[1], theirs, grads)
    assert bits(ours) == bits(theirs)
    assert bits(optimizers[0]) == bits(optimizers[1])
    assert optimizers[0].step[...] == (1 if finite else 0)


def test_optimizer_update_passes_keywords():
    model = make()
    plateau = optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau(patience=1))
    optimizer = nnx.Optimizer(model, plateau, wrt=nnx.Param)
    grads = gradients(model)
    with pytest.raises(TypeError, match="value"):
        mixed.optimizer_update(optimizer, model, grads, jnp.asarray(True))
    mixed.optimizer_update(optimizer, model, grads, jnp.asarray(True), value=jnp.float32(1))
    assert optimizer.step[...] == 1


class Trained(nnx.Variable):
    """A variable that is no `nnx.Param`."""


@pytest.mark.parametrize("policy", ["f32", "bf16"])
def test_any_variable_can_be_trained(policy: str):
    """What `wrt` selects is differentiated and cast, whatever its type."""

    class Model(nnx.Module):
        def __init__(self):
            self.weight, self.other = Trained(jnp.ones(2)), nnx.Param(jnp.ones(2))

    def look(model, x):
        assert model.weight.dtype == x.dtype
        return jnp.sum(model.weight[...] * x * model.other[...])

    _, _, _, grads = mixed.value_and_grad(look, policy=policy, wrt=Trained)(
        Model(), jnp.arange(2.0)
    )
    assert set(grads) == {"weight"}
    assert isinstance(grads["weight"], Trained)
    assert np.array_equal(grads["weight"][...], [0, 1])


def test_errors_say_what_to_type():
    model = make()
    with pytest.raises(TypeError, match="NNX module with variables; got dict"):
        mixed.value_and_grad(loss)({"w": jnp.ones(3)}, batch())
    with pytest.raises(TypeError, match="NNX module with variables; got State"):
        mixed.value_and_grad(loss)(nnx.state(model), batch())
    with pytest.raises(TypeError, match="there is none"):
        mixed.value_and_grad(loss)(model=model, x=batch())
    with pytest.raises(ValueError, match=r"nothing to differentiate.*BatchStat, Param"):
        mixed.value_and_grad(loss, wrt=nnx.Cache)(model, batch())
    with pytest.raises(TypeError, match="`carry` is not an option"):
        mixed.value_and_grad(loss, carry="x", microbatches=2)
    with pytest.raises(TypeError, match=r"no option 'polcy'; got .*Did you mean `policy`"):
        mixed.value_and_grad(loss, polcy="bf16")
    with pytest.raises(ValueError, match="without loss scaling"):
        mixed.value_and_grad(loss, policy="f16")
    with pytest.raises(TypeError, match=r"returns \(loss, aux\); got"):
        mixed.value_and_grad(loss, has_aux=True)(model, batch())
    grads = gradients(model)
    with pytest.raises(TypeError, match=r"required an nnx\.Optimizer.*GradientTransformation"):
        mixed.optimizer_update(optax.sgd(1e-2), model, grads, True)
    both = nnx.ModelAndOptimizer(model, optax.sgd(1e-2))
    with pytest.raises(TypeError, match="separate from its model; got ModelAndOptimizer"):
        mixed.optimizer_update(both, model, grads, True)


def test_the_verdict_names_a_parameter_of_the_module():
    """And not one of its statistics, which are among its leaves and have no gradient."""
    net = Net(nnx.Rngs(0))

    def loss(net: Any, x: Any) -> Any:
        return 1e-3 * jnp.sum(net(x)) + jnp.sum(jnp.sqrt(0 * net.norm.scale[...]))

    scaling = halfstep.DynamicLossScaling()
    _, _, finite, grads = mixed.value_and_grad(loss, scaling, policy="f16")(net, jnp.ones((4, 4)))
    assert not finite
    assert finite.where(grads) == finite.where(net)
    assert "norm/scale" in finite.reason(net)
    assert "a derivative is infinite, as those of sqrt" in finite.reason(net)
    ledger = halfstep.Ledger(limit=1).record(finite)
    with pytest.raises(halfstep.SkipLimitError, match="not finite is `norm/scale"):
        ledger.check(net)


def test_gradients_of_another_model():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    message = "`grads` must have the structure of the variables of `model` that the"
    with pytest.raises(ValueError, match=message):
        mixed.optimizer_update(optimizer, model, {}, True)
    with pytest.raises(TypeError, match=r"`model` must be the module that .*; got float"):
        mixed.optimizer_update(optimizer, 0.5, {}, True)
