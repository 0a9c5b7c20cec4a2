"""The state of a recipe: named slots, one transaction with the step, and nothing lost."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import halfstep
from halfstep import RECIPES, DynamicLossScaling, F8Scaling

DELAYED = RECIPES["f8-delayed"]
LAYERS = 5


def loss(params: Any, x: Any) -> Any:
    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        with jax.named_scope("block"):
            return x + jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x @ params["in"], params["layers"])
    return jnp.mean((x @ params["out"]) ** 2)


def made(layers: int = LAYERS) -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "in": jax.random.normal(keys[0], (32, 64)) / 6,
        "layers": jax.random.normal(keys[1], (layers, 64, 64)) / (8 * layers**0.5),
        "out": jax.random.normal(keys[2], (64, 16)) / 8,
    }


PARAMS = made()
X = jax.random.normal(jax.random.key(9), (48, 32))


@jax.jit
def step(scaling: Any, params: Any, x: Any) -> Any:
    return halfstep.filter_value_and_grad(loss, scaling, policy="f8-delayed")(params, x)


@pytest.fixture(scope="module")
def scaling() -> F8Scaling:
    return DELAYED.init(loss, PARAMS, X, loss_scaling=DynamicLossScaling(2.0**4))


def same(first: Any, second: Any) -> None:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    for a, b in pairs:
        np.testing.assert_array_equal(a, b)


def test_one_slot_for_each_product(scaling: F8Scaling):
    assert list(scaling.sites) == ["dot_general.0", "block/dot_general.0", "dot_general.1"]
    shapes = {name: site.history.shape for name, site in scaling.sites.items()}
    assert shapes == {
        "dot_general.0": (16, 3),
        "block/dot_general.0": (LAYERS, 16, 3),
        "dot_general.1": (16, 3),
    }


def test_it_begins_with_what_one_step_sees(scaling: F8Scaling):
    history = scaling.sites["dot_general.0"].history
    x, w = X.astype(jnp.bfloat16), PARAMS["in"]
    np.testing.assert_array_equal(history[:, 0], jnp.full(16, jnp.max(jnp.abs(x))))
    np.testing.assert_array_equal(history[:, 1], jnp.full(16, jnp.max(jnp.abs(w))))
    assert (scaling.sites["block/dot_general.0"].history > 0).all()
    empty = DELAYED.init(loss, PARAMS, X, calibrate=False)
    assert not any(site.history.any() for site in empty.sites.values())
    shapes = jax.eval_shape(lambda: (PARAMS, X))
    same(DELAYED.init(loss, *shapes, calibrate=False), empty)
    with pytest.raises(TypeError, match=r"which needs arrays; got jax\.ShapeDtypeStruct"):
        DELAYED.init(loss, *shapes)


def test_a_step_records_what_it_sees(scaling: F8Scaling):
    larger = jax.tree.map(lambda w: 2 * w, PARAMS)
    _, after, finite, _ = step(scaling, larger, X)
    assert finite
    for name, site in after.sites.items():
        before = scaling.sites[name].history
        np.testing.assert_array_equal(site.history[..., 1:, :], before[..., :-1, :])
        # Twice the weights are twice as large.
        np.testing.assert_array_equal(site.history[..., 0, 1], 2 * before[..., 0, 1])
        np.testing.assert_array_equal(site.seen[..., 0], site.history[..., 0, :])
    assert after.step == 1


def test_scales_leave_no_room_and_saturate(scaling: F8Scaling):
    """Weights that have grown by 64 do not fit any more; what is beyond is cut and counted."""
    larger = {**PARAMS, "in": 64 * PARAMS["in"]}
    _, after, finite, _ = step(scaling, larger, X)
    assert finite
    saturated = after.sites["dot_general.0"].seen[:, 1]
    assert saturated[1] > 0.5
    assert saturated[0] == 0
    roomy = dataclasses.replace(DELAYED, name="roomy", margin=7)
    state = roomy.init(loss, PARAMS, X)
    policy = halfstep.Policy(recipe=roomy)
    gradient = halfstep.filter_grad(loss, state, policy=policy)
    assert jax.jit(gradient)(larger, X)[0].sites["dot_general.0"].seen[1, 1] == 0


def test_a_bad_step_changes_nothing(scaling: F8Scaling):
    _, after, finite, _ = step(scaling, PARAMS, X.at[0, 0].set(jnp.inf))
    assert not finite
    same(after.sites, scaling.sites)
    # The loss scale has moved: that is how the next step is another one.
    assert after.loss_scaling == scaling.loss_scaling / 2


def test_the_loss_scale_does_not_matter(scaling: F8Scaling):
    """Magnitudes of gradients are kept without it, so that a new scale fits at once."""
    other = dataclasses.replace(scaling, loss=DynamicLossScaling(2.0**12))
    (first, one, _, grads), (second, two, _, others) = (
        step(s, PARAMS, X) for s in (scaling, other)
    )
    np.testing.assert_array_equal(first, second)
    same(grads, others)
    same(one.sites, two.sites)


@pytest.mark.slow
def test_microbatches_see_what_the_batch_does():
    def plain(params: Any, x: Any) -> Any:
        return jnp.sum(x @ params["in"] * jnp.arange(64.0)[None])

    state = DELAYED.init(plain, PARAMS, X)

    def seen(**options: Any) -> Any:
        gradient = halfstep.filter_grad(plain, state, policy="f8-delayed", **options)
        return jax.jit(gradient)(PARAMS, X)[0].sites

    together = {"batch": ("x",), "microbatch_reduction": "sum"}
    same(seen(), seen(microbatches=4, **together))
    assert seen()["dot_general.0"].seen[2, 0] == 63


def test_a_branch_that_is_not_taken_keeps_its_history():
    def branched(params: Any, x: Any, which: Any) -> Any:
        first = lambda x: x @ params["in"]  # noqa: E731
        second = lambda x: x @ (3 * params["in"])  # noqa: E731
        return jnp.sum(jax.lax.cond(which, first, second, x))

    state = DELAYED.init(branched, PARAMS, X, jnp.asarray(True))
    assert [bool(site.history.any()) for site in state.sites.values()] in (
        [True, False],
        [False, True],
    )
    gradient = jax.jit(
        lambda s, p, x, which: halfstep.filter_grad(branched, s, policy="f8-delayed")(p, x, which)
    )
    _, after = state, gradient(state, PARAMS, X, jnp.asarray(False))[0]
    assert all(site.history.any() for site in after.sites.values())
    taken = next(name for name, site in state.sites.items() if site.history.any())
    same(after.sites[taken].history, state.sites[taken].history)


@pytest.mark.slow
def test_a_hundred_layers():
    params = made(100)
    state = DELAYED.init(loss, params, X)
    assert state.sites["block/dot_general.0"].history.shape == (100, 16, 3)
    _, _, finite, grads = step(state, params, X)
    assert finite
    exact = jax.jit(jax.grad(loss))(params, X)
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (exact, grads))
    assert a @ b / np.sqrt((a @ a) * (b @ b)) > 0.99


# Checkpoints.


def run(scaling: Any, params: Any, steps: int) -> Any:
    for number in range(steps):
        _, scaling, _, grads = step(scaling, params, X * (1 + number % 3))
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
    return scaling, params


def test_resumed_bit_for_bit(scaling: F8Scaling, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    half = run(scaling, PARAMS, 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", half)
        checkpointer.wait_until_finished()
        fresh = (DELAYED.init(loss, PARAMS, X, loss_scaling=DynamicLossScaling()), PARAMS)
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
        restored = checkpointer.restore(tmp_path / "state", like)
    same(restored, half)
    scalings, trees = zip(restored, half, strict=True)
    same(run(scalings[0], trees[0], 3), run(scalings[1], trees[1], 3))


def test_other_products_are_an_error(scaling: F8Scaling):
    def other(params: Any, x: Any) -> Any:
        with jax.named_scope("head"):
            return jnp.mean((x @ params["in"]) ** 2)

    message = (
        r"no state for 'head/dot_general.0' and state for 'block/dot_general.0', "
        r"'dot_general.0', 'dot_general.1'. Make it anew"
    )
    with pytest.raises(ValueError, match=message):
        halfstep.filter_grad(other, scaling, policy="f8-delayed")(PARAMS, X)
    fewer = dict(scaling.sites)
    fewer.pop("dot_general.1")
    fewer = dataclasses.replace(scaling, sites=fewer)
    with pytest.raises(ValueError, match=r"no state for 'dot_general.1'\. Make"):
        halfstep.filter_grad(loss, fewer, policy="f8-delayed")(PARAMS, X)


# Randomness.


@pytest.mark.slow
def test_no_key_is_ignored():
    recipe = RECIPES["nvfp4"]
    states = [recipe.init(loss, PARAMS, X, key=jax.random.key(seed)) for seed in (0, 0, 1)]
    gradient = jax.jit(
        lambda s, p, x: halfstep.filter_grad(loss, s, policy="nvfp4", check_finite=True)(p, x)
    )
    first, again, other = (gradient(state, PARAMS, X) for state in states)
    same(first[2], again[2])
    for a, b in zip(jax.tree.leaves(first[2]), jax.tree.leaves(other[2]), strict=True):
        assert (a != b).any()
    # The next step draws anew, and so does every layer.
    following = gradient(first[0], PARAMS, X)
    assert (following[2]["layers"] != first[2]["layers"]).any()
    keys = states[0].slots(states[0].probes())["block/dot_general.0"].key
    assert np.unique(np.asarray(keys), axis=0).shape == keys.shape


# Fallback.


def test_a_product_that_loses_too_much_is_taken_out():
    strict = dataclasses.replace(DELAYED, name="strict", patience=2)
    policy = halfstep.Policy(recipe=strict)
    state = strict.init(loss, PARAMS, X)
    gradient = eqx.filter_jit(lambda s, p, x: halfstep.filter_grad(loss, s, policy=policy)(p, x))
    params = PARAMS
    for _ in range(2):
        # Weights grow faster than scales follow.
        params = {**params, "in": 64 * params["in"]}
        assert state.review() is state
        state, _, _ = gradient(state, params, X)
    ledger = halfstep.Ledger(limit=3).record(True).record(True)
    same(state.review(), ledger.review(state)[0])
    state, ledger = ledger.review(state)
    # What comes after it grows as well.
    assert sorted(state.off) == sorted(state.sites)
    assert sorted(ledger.fallbacks) == [(name, 2) for name in sorted(state.sites)]
    assert (ledger.applied, ledger.limit) == (2, 3)
    assert ledger.review(state) == (state, ledger)
    assert ledger.record(False).fallbacks == ledger.fallbacks
    after, finite, _ = gradient(state, params, X)
    assert finite
    same(after.sites, state.sites)
    assert after.review().off == state.off
    # The product is that of the compute dtype.
    low = halfstep.autocast(loss, policy, scaling=state)
    jaxpr = str(jax.make_jaxpr(low)(params, X))
    assert "bf16[48,64] = dot_general" in jaxpr
    assert jtu.tree_structure(after) == jtu.tree_structure(state)
    never = dataclasses.replace(state, recipe=dataclasses.replace(strict, patience=0))
    assert never.review() is never


@pytest.mark.slow
def test_state_without_delay_only_watches():
    state = RECIPES["f8"].init(loss, PARAMS, X)
    both = [
        jax.jit(lambda p, x, s=s: halfstep.filter_grad(loss, s, policy="f8")(p, x))(PARAMS, X)
        for s in (None, state)
    ]
    same(both[0][2], both[1][2])
    seen = both[1][0].sites["dot_general.0"].seen
    np.testing.assert_array_equal(seen[1, 0], jnp.max(jnp.abs(PARAMS["in"])))
    assert (seen[:, 1] == 0).all()
