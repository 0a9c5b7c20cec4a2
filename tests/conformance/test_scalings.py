"""One suite for the loss-scaling interface; a row for each member."""

import inspect
import io
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import halfstep
from halfstep import (
    RECIPES,
    AbstractLossScaling,
    DynamicLossScaling,
    F8Scaling,
    NoLossScaling,
    StaticLossScaling,
)

pytestmark = [pytest.mark.core, pytest.mark.types]

ROWS: dict[str, Callable[[], AbstractLossScaling]] = {
    "dynamic": lambda: DynamicLossScaling(2.0**10, 2.0**2, 2.0**20, period=3, factor=4),
    "dynamic defaults": DynamicLossScaling,
    "static": lambda: StaticLossScaling(2.0**7),
    "none": NoLossScaling,
    "of a recipe": lambda: F8Scaling(
        loss=DynamicLossScaling(2.0**10, 2.0**2, 2.0**20, period=3, factor=4),
        sites={},
        key=None,
        step=jnp.zeros((), jnp.int32),
        recipe=RECIPES["f8-delayed"],
    ),
}
rows = pytest.mark.parametrize("name", ROWS)


def equal(a, b) -> bool:
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and bool((x == y).all()), a, b)
    return jtu.tree_structure(a) == jtu.tree_structure(b) and all(jax.tree.leaves(same))


def test_every_member_has_a_row():
    members = {
        thing
        for _, thing in inspect.getmembers(halfstep, inspect.isclass)
        if issubclass(thing, AbstractLossScaling) and not inspect.isabstract(thing)
    }
    assert members == {type(make()) for make in ROWS.values()}


@rows
def test_scale_then_unscale_is_exact(name: str):
    """For every float16: scaled in float32, unscaled, the same number."""
    scaling = ROWS[name]()
    patterns = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = patterns[np.isfinite(patterns)]
    back = scaling.unscale(scaling.scale(values))
    assert np.array_equal(np.asarray(back), values.astype(np.float32))


@pytest.mark.parametrize("name", [name for name in ROWS if name != "none"])
def test_arithmetic_is_in_float32_or_wider(name: str):
    scaling = ROWS[name]()
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        assert scaling.scale(jnp.ones(2, dtype)).dtype == jnp.float32
        assert scaling.unscale(jnp.ones(2, dtype)).dtype == jnp.float32
    # 60000 times the scale is far outside float16 and is not infinite.
    assert jnp.isfinite(scaling.scale(jnp.asarray(60000.0, jnp.float16)))
    with jax.enable_x64(True):
        assert scaling.scale(jnp.ones(2, jnp.float64)).dtype == jnp.float64


@rows
@pytest.mark.parametrize("finite", [True, False])
def test_adjust_keeps_structure_and_dtypes(name: str, finite: bool):
    scaling = ROWS[name]()
    after = scaling.adjust(jnp.asarray(finite))
    assert type(after) is type(scaling)
    assert jtu.tree_structure(after) == jtu.tree_structure(scaling)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(scaling), strict=True):
        assert (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type)


@rows
def test_jit_scan_vmap_agree_with_eager(name: str):
    finites = jnp.asarray([True, True, True, False, True, True, True, True, False, False] * 3)
    eager = ROWS[name]()
    for finite in finites:
        eager = eager.adjust(finite)
    turn = lambda s, f: (s.adjust(f), None)  # noqa: E731
    scanned, _ = jax.jit(lambda s: jax.lax.scan(turn, s, finites))(ROWS[name]())
    assert equal(scanned, eager)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), ROWS[name]())
    flags = jnp.stack([finites, ~finites])
    batched = jax.vmap(lambda s, f: jax.lax.scan(turn, s, f)[0])(many, flags)
    assert equal(jax.tree.map(lambda x: x[0], batched), eager)


@rows
def test_donation(name: str):
    step = jax.jit(lambda s: s.adjust(True), donate_argnums=0)
    first, second = ROWS[name](), ROWS[name]()
    first = step(step(first))
    # Two scalings never share a buffer: the second outlives the donation of the first.
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(second))
    assert equal(step(step(second)), first)


@rows
def test_every_field_survives_flattening_and_serialization(name: str):
    scaling = ROWS[name]().adjust(True).adjust(False).adjust(True)
    leaves, structure = jtu.tree_flatten(scaling)
    assert equal(jtu.tree_unflatten(structure, leaves), scaling)
    assert vars(jtu.tree_unflatten(structure, leaves)).keys() == vars(scaling).keys()
    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, scaling)
    buffer.seek(0)
    assert equal(eqx.tree_deserialise_leaves(buffer, ROWS[name]()), scaling)


@rows
def test_adjust_refuses_what_is_no_verdict(name: str):
    with pytest.raises(TypeError, match=r"required a boolean scalar or the verdict.*shape \(2,\)"):
        ROWS[name]().adjust(jnp.array([True, False]))
    with pytest.raises(TypeError, match="required a boolean scalar or the verdict"):
        ROWS[name]().adjust(1.0)


class TestDynamic:
    def test_grows_after_exactly_period_good_steps(self):
        scaling = DynamicLossScaling(2.0**10, period=2000)
        turn = lambda s, _: (s.adjust(True), s.loss_scaling)  # noqa: E731
        _, scales = jax.lax.scan(turn, scaling, length=6001)
        assert np.array_equal(np.flatnonzero(np.diff(scales)) + 1, [2000, 4000, 6000])

    def test_a_bad_step_restarts_the_count(self):
        scaling = DynamicLossScaling(2.0**10, period=3)
        seen = []
        for finite in (True, True, False, True, True, True, True):
            scaling = scaling.adjust(finite)
            seen.append(float(scaling.loss_scaling))
        assert seen == [1024, 1024, 512, 512, 512, 1024, 1024]

    @pytest.mark.parametrize("floor", [2.0**-14, 1.0, 2.0**5])
    def test_floor_holds_and_recovers(self, floor: float):
        scaling = DynamicLossScaling(2.0**15, floor, period=1)
        for _ in range(200):
            scaling = scaling.adjust(False)
        assert scaling.loss_scaling == floor
        for _ in range(200):
            scaling = scaling.adjust(True)
        assert scaling.loss_scaling == 2.0**24

    def test_ceiling_then_bad_steps_is_still_a_power_of_two(self):
        scaling = DynamicLossScaling(2.0**15, max_loss_scaling=2.0**16, period=1, factor=4)
        scaling = scaling.adjust(True).adjust(True)
        assert scaling.loss_scaling == 2.0**16
        for exponent in (14, 12, 10, 8, 6, 4, 2, 0, 0):
            scaling = scaling.adjust(False)
            assert scaling.loss_scaling == 2.0**exponent

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"loss_scaling": 65504}, r"`loss_scaling` must be a power of two.*got 65504.*32768"),
            ({"loss_scaling": 0}, "must be a power of two"),
            ({"loss_scaling": -2}, "must be a power of two"),
            ({"loss_scaling": float("inf")}, "must be a power of two"),
            ({"loss_scaling": float("nan")}, "must be a power of two"),
            ({"min_loss_scaling": 3}, "`min_loss_scaling` must be a power of two"),
            ({"max_loss_scaling": 2.0**127}, r"must lie between 2\*\*-126 and 2\*\*126"),
            ({"factor": 3}, "`factor` must be a power of two"),
            ({"factor": 1}, "`factor` must be 2 or a larger power of two; got 1"),
            ({"period": 0}, "`period` must be an integer number of steps, 1 or more; got 0"),
            (
                {"loss_scaling": 1, "min_loss_scaling": 2},
                "between `min_loss_scaling`, 2, and",
            ),
            ({"loss_scaling": 2.0**25}, "`max_loss_scaling`, 1.67772e.07; got 3.35544e.07"),
        ],
    )
    def test_errors(self, arguments: dict, message: str):
        with pytest.raises(ValueError, match=message):
            DynamicLossScaling(**arguments)

    def test_arrays_are_accepted(self):
        scaling = DynamicLossScaling(jnp.asarray(2.0**15), np.float32(1), period=10)
        assert scaling.loss_scaling == 2.0**15

    def test_needs_a_checked_verdict(self):
        verdict = halfstep.Verdict(None, None, None)
        with pytest.raises(ValueError, match=r"needs to know.*check_finite=True"):
            DynamicLossScaling().adjust(verdict)


def test_what_was_not_seen_is_named():
    w, x = jnp.ones((32, 64)), jnp.ones((16, 32))
    scaling = RECIPES["f8"].init(lambda w, x: jnp.sum(x @ w), w, x)
    missing = r"`seen` must have the gradients of all `probes`; missing are dot_general\.0"
    with pytest.raises(ValueError, match=missing):
        scaling.observe({}, True)


def test_none_compiles_nothing():
    scaling = NoLossScaling()
    jaxpr = jax.make_jaxpr(lambda x: scaling.unscale(scaling.scale(x)))(jnp.ones(3))
    assert jaxpr.eqns == []
    assert scaling.loss_scaling == 1
