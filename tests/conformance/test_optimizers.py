"""What every compressed optimizer does, whoever computes it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec as P

import halfstep
from halfstep import optim, quant
from tests._rows import slow_unless
from tests.conformance._optimizers import NAMES, row
from tests.optim._values import by_updates, values

pytestmark = pytest.mark.core

SHAPE = (64, 128)
IMPLEMENTATIONS = ("xla", pytest.param("interpret", marks=pytest.mark.slow))
STEPS = 4


def drawn(number: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Random numbers by NumPy: those of JAX are compiled for every shape."""
    draw, dtype = np.random.default_rng(number), np.dtype(dtype)
    made = draw.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        made = made + 1j * draw.normal(size=shape)
    return jnp.asarray(made.astype(dtype))


def normal(number: int, like: Any) -> Any:
    """Gradients: random, of the dtype and shape of parameters."""

    def of(path: Any, leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return np.zeros(leaf.shape, jax.dtypes.float0)
        return drawn(1000 * number + len(str(path)), leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(of, like)


def trained(tx: Any, params: Any, *, prepare: bool = True, steps: int = STEPS) -> tuple[Any, Any]:
    params, state = jax.jit(tx.prepare)(params) if prepare else (params, tx.init(params))
    step = jax.jit(tx.step)
    for number in range(steps):
        params, state = step(params, state, normal(number, params))
    return params, state


def by_optax(tx: Any, params: Any, grads_like: Any, *, steps: int = STEPS) -> Any:
    """The same steps, in float32 by Optax, with the gradients as ours get them."""
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(steps):
        params, state = step(params, state, normal(number, grads_like))
    return params


def close(ours: Any, theirs: Any, before: Any, *, master_bits: int = 24) -> None:
    """Whether parameters went where Optax's went, by the way that they went."""
    way, off = np.asarray(theirs - before), np.asarray(ours - theirs)
    # A moment is off by half a code at the most (1/254 and 1/510 of its group's largest, which is
    # a few times the others), and a master of 24 bits by half a unit a step.
    unit = float(np.abs(before).max()) * 2.0 ** (-16 if master_bits == 24 else -24)
    assert np.linalg.norm(off) <= 0.05 * np.linalg.norm(way) + STEPS * unit * np.sqrt(off.size)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("standard_promotion")
class TestSteps:
    @pytest.mark.rows(6)
    @pytest.mark.parametrize("bits", [24, 32, None])
    def test_goes_where_optax_goes(self, name: str, implementation: Any, bits: Any):
        entry = row(name)
        before = {"w": drawn(99, SHAPE)}
        tx = entry.ours(entry.rate, master_bits=bits, implementation=implementation)
        params, state = trained(tx, before)
        theirs = by_optax(entry.theirs(entry.rate), before, params)
        close(values(params, state)["w"], theirs["w"], before["w"], master_bits=bits or 32)

    @pytest.mark.rows(8)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_gradients_of_any_dtype(self, name: str, implementation: Any, dtype: str):
        entry = row(name)
        tx = entry.ours(entry.rate, implementation=implementation)
        params, state = tx.prepare({"w": jnp.ones(SHAPE)})
        grads = normal(0, {"w": jnp.zeros(SHAPE, dtype)})
        exact = {"w": grads["w"].astype(jnp.float32)}
        ours = jax.tree.leaves(tx.step(params, state, grads))
        theirs = jax.tree.leaves(tx.step(params, state, exact))
        for got, wanted in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(got, wanted)

    def test_a_schedule(self, name: str, implementation: Any):
        entry = row(name)
        schedule = optax.linear_schedule(entry.rate, 0.0, STEPS)
        before = {"w": drawn(99, SHAPE)}
        params, state = trained(entry.ours(schedule, implementation=implementation), before)
        theirs = by_optax(entry.theirs(schedule), before, params)
        close(values(params, state)["w"], theirs["w"], before["w"])

    @pytest.mark.rows(2)
    def test_donation_and_a_traced_rate(self, name: str, implementation: Any):
        entry = row(name)

        def step(params: Any, state: Any, grads: Any, rate: Any) -> Any:
            return entry.ours(rate, implementation=implementation).step(params, state, grads)

        params, state = entry.ours(entry.rate).prepare({"w": jnp.ones(SHAPE), "b": jnp.ones(3)})
        wanted = entry.ours(entry.rate, implementation=implementation).step(
            params, state, normal(0, params)
        )
        args = (params, state, normal(0, params), jnp.float32(entry.rate))
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
        analysis: Any = compiled.memory_analysis()
        aliased = analysis.alias_size_in_bytes
        # All of it but what is too small to count.
        assert aliased >= optim.stored_bytes(params, state) - 64
        for got, want in zip(
            jax.tree.leaves(jax.jit(step)(*args)), jax.tree.leaves(wanted), strict=True
        ):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(
                np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2**-7, atol=1
            )

    @pytest.mark.rows(3)
    def test_a_skipped_step_changes_nothing(self, name: str, implementation: Any):
        entry = row(name)
        tx = entry.ours(entry.rate, implementation=implementation)
        params, state = trained(tx, {"w": jnp.ones(SHAPE), "b": jnp.ones(3)})
        new = jax.jit(tx.step)(params, state, normal(7, params), jnp.asarray(False))
        for got, was in zip(jax.tree.leaves(new), jax.tree.leaves((params, state)), strict=True):
            np.testing.assert_array_equal(got, was)

    @pytest.mark.rows(3)
    @pytest.mark.parametrize("spec", [P("d"), P(None, "d")], ids=str)
    def test_sharded_without_a_collective(self, name: str, implementation: Any, spec: Any):
        if implementation == "interpret":
            pytest.skip("an interpreted kernel is for one device")
        entry = row(name)
        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = NamedSharding(mesh, spec)
        whole = {"w": drawn(99, SHAPE)}
        tx = entry.ours(entry.rate, implementation=implementation)
        params, state = tx.prepare(jax.device_put(whole, sharding))
        for leaf in jax.tree.leaves(state):
            assert leaf.ndim == 0 or leaf.sharding.is_equivalent_to(sharding, 2), leaf.shape
        grads = jax.device_put(normal(0, params), sharding)
        compiled = jax.jit(tx.step).lower(params, state, grads).compile()
        text = str(compiled.as_text())
        for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
            assert collective not in text
        new, new_state = compiled(params, state, grads)
        assert new["w"].sharding.is_equivalent_to(sharding, 2)
        other, other_state = tx.prepare(whole)
        wanted, _ = tx.step(other, other_state, normal(0, other))
        # Groups are along another axis where a shard would cut them.
        close(np.asarray(new["w"], np.float32), np.asarray(wanted["w"], np.float32), whole["w"])
        del new_state


SHAPES = ((4096,), (5000,), (130, 64), (64, 130), (4, 64, 32), (3, 3, 3, 512), (2, 5000))


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("name", "shape"),
    # Shapes are divided in the same way for all; on every change all of them with one.
    slow_unless(
        [(name, shape) for name in NAMES for shape in SHAPES],
        lambda name, shape: name == "adamw" or shape == (64, 130),
    ),
    ids=str,
)
@pytest.mark.usefixtures("standard_promotion")
def test_odd_shapes(name: str, shape: tuple[int, ...]):
    entry = row(name)
    before = {"w": drawn(99, shape)}
    tx = entry.ours(entry.rate, implementation="xla")
    params, state = trained(tx, before)
    assert params["w"].dtype == jnp.bfloat16
    theirs = by_optax(entry.theirs(entry.rate), before, params)
    close(values(params, state)["w"], theirs["w"], before["w"])


@pytest.mark.rows(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_kernel_that_was_asked_for_refuses_odd_shapes(shape: tuple[int, ...]):
    entry = row("adamw")
    tx = entry.ours(entry.rate, implementation="interpret")
    params, state = tx.prepare({"w": drawn(99, shape)})
    with pytest.raises(ValueError, match="takes full groups of 32 rows"):
        tx.step(params, state, normal(0, params))


@pytest.mark.parametrize("name", NAMES)
class TestLeaves:
    def test_bytes_a_parameter(self, name: str):
        entry = row(name)
        params = jax.eval_shape(lambda: {"w": jnp.zeros((4096, 12288))})
        for bits, more in ((24, 0), (32, 1)):
            made = jax.eval_shape(entry.ours(1e-3, master_bits=bits).prepare, params)
            assert optim.stored_bytes(made) / (4096 * 12288) <= entry.bytes_24 + more + 1e-6

    @pytest.mark.usefixtures("standard_promotion")
    def test_small_and_kept_leaves_are_optax_s(self, name: str):
        """As exact as float32 is: sums in another order, and a square root that is kept."""
        entry = row(name)
        before = {"big": drawn(99, SHAPE), "small": drawn(99, (63, 65))}
        tx = entry.ours(entry.rate, keep=("big",))
        params, state = trained(tx, before)
        assert optim.coded(state) == []
        theirs = by_optax(entry.theirs(entry.rate), before, params)
        for leaf in before:
            np.testing.assert_allclose(params[leaf], theirs[leaf], rtol=1e-5, atol=1e-6)

    def test_leaves_that_are_no_parameters(self, name: str):
        entry = row(name)
        before = {
            "w": jnp.ones(SHAPE),
            "ids": jnp.arange(5000),
            "mask": jnp.ones((70, 70), bool),
            "none": None,
            "empty": jnp.zeros((0, 4)),
            "scalar": jnp.float32(2),
            "complex": jnp.ones(3, jnp.complex64),
        }
        params, _ = trained(entry.ours(entry.rate), before)
        np.testing.assert_array_equal(params["ids"], before["ids"])
        np.testing.assert_array_equal(params["mask"], before["mask"])
        assert params["ids"].dtype == before["ids"].dtype
        assert params["none"] is None
        assert params["empty"].shape == (0, 4)
        assert params["scalar"] != 2
        assert params["complex"].dtype == jnp.complex64
        assert jnp.abs(params["complex"].imag).min() > 0

    def test_compiles_init_in_constant_time(self, name: str):
        params = jax.eval_shape(lambda: {"w": jnp.zeros((64, 4096, 4096), jnp.bfloat16)})
        text = str(jax.jit(row(name).ours(1e-3).init).lower(params).compile().as_text())
        assert "constant({" not in text
        assert len(text) < 20_000


# Adam is AdamW without decay, and all of SGD's are one.
@pytest.mark.parametrize(
    "name", slow_unless(NAMES, lambda name: name in ("adamw", "lion", "momentum"))
)
@pytest.mark.usefixtures("standard_promotion")
class TestOptax:
    """As a part of whatever Optax, Flax and halfstep make of an optimizer."""

    def steps(self, tx: Any, params: Any) -> tuple[Any, Any]:
        return by_updates(tx, params, normal, 2)

    @pytest.fixture
    def params(self) -> Any:
        return {"w": drawn(99, SHAPE, jnp.bfloat16), "b": jnp.ones(3)}

    def bare(self, name: str, params: Any, count: int = 2) -> Any:
        entry = row(name)
        return trained(entry.ours(entry.rate), params, prepare=False, steps=count)[0]

    def same(self, got: Any, wanted: Any) -> None:
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)

    def test_is_a_transformation(self, name: str, params: Any):
        tx = row(name).ours(row(name).rate)
        assert isinstance(tx, optax.GradientTransformationExtraArgs)
        init, update = tx
        assert init is tx.init
        assert update is tx.update
        self.same(self.steps(tx, params)[0], self.bare(name, params))

    def test_chain(self, name: str, params: Any):
        tx = optax.chain(optax.clip_by_global_norm(1e9), row(name).ours(row(name).rate))
        self.same(self.steps(tx, params)[0], self.bare(name, params))

    def test_masked(self, name: str, params: Any):
        tx = optax.masked(row(name).ours(row(name).rate), {"w": True, "b": False})
        got = self.steps(tx, params)[0]
        self.same(got["w"], self.bare(name, params)["w"])

    def test_multi_transform(self, name: str, params: Any):
        transforms: Any = {"flash": row(name).ours(row(name).rate), "none": optax.set_to_zero()}
        tx = optax.multi_transform(transforms, {"w": "flash", "b": "none"})
        got = self.steps(tx, params)[0]
        self.same(got["w"], self.bare(name, params)["w"])
        self.same(got["b"], params["b"])

    def test_inject_hyperparams(self, name: str, params: Any):
        factory = {
            "adamw": optim.flash_adamw,
            "adam": optim.flash_adam,
            "lion": optim.flash_lion,
        }.get(name, optim.flash_sgd)
        tx: Any = optax.inject_hyperparams(factory)(learning_rate=row(name).rate)
        params, state = self.steps(tx, params)
        state.hyperparams["learning_rate"] = jnp.float32(0)
        updates, _ = tx.update(normal(5, params), state, params)
        assert not np.any(updates["w"])

    def test_multi_steps(self, name: str, params: Any):
        tx = optax.MultiSteps(row(name).ours(row(name).rate), every_k_schedule=2)
        got, _ = self.steps(tx, params)
        assert np.any(np.asarray(got["w"] != params["w"]))

    def test_train_state(self, name: str, params: Any):
        tx = row(name).ours(row(name).rate)
        state = train_state.TrainState.create(apply_fn=lambda x: x, params=params, tx=tx)
        for number in range(2):
            state = state.apply_gradients(grads=normal(number, params))
        self.same(state.params, self.bare(name, params))

    def test_nnx_optimizer(self, name: str, params: Any):
        model = nnx.Linear(128, 64, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
        optimizer = nnx.Optimizer(model, row(name).ours(row(name).rate), wrt=nnx.Param)
        before = np.asarray(model.kernel[...])
        grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        optimizer.update(model, grads)
        assert model.kernel[...].dtype == jnp.bfloat16
        assert np.any(np.asarray(model.kernel[...]) != before)
        del params

    @pytest.mark.parametrize("finite", [True, False])
    def test_optimizer_update(self, name: str, params: Any, finite: bool):
        tx = row(name).ours(row(name).rate)
        state = tx.init(params)
        got, _ = halfstep.optimizer_update(
            params, tx, state, normal(0, params), jnp.asarray(finite)
        )
        self.same(got, self.bare(name, params, 1) if finite else params)


def test_weights_decay_where_the_mask_says():
    params = {"w": jnp.ones(SHAPE), "b": jnp.ones(3)}
    tx = optim.flash_adamw(0.1, weight_decay=0.5, mask={"w": True, "b": False})
    zero = jax.tree.map(jnp.zeros_like, params)
    got, _ = tx.step(params, tx.init(params), zero)
    np.testing.assert_allclose(got["w"], 0.95, rtol=1e-6)
    np.testing.assert_array_equal(got["b"], 1)


def test_prepare_keeps_what_bfloat16_lacks():
    before = {"w": jax.random.normal(jax.random.key(0), SHAPE)}
    params, state = optim.flash_adamw(1e-3, master_bits=32).prepare(before)
    np.testing.assert_array_equal(quant.join(params["w"], state.low["w"]), before["w"])
