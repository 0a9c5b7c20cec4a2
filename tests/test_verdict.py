"""The verdict: one answer, the first leaf, and whose fault it was."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import DynamicLossScaling, NoLossScaling, StaticLossScaling, Verdict
from halfstep._training.verdict import finite_flags, judge, magnitudes

pytestmark = [pytest.mark.core, pytest.mark.types]


def loss(params, x):
    return jnp.sum(params["a"] * x["a"]) + jnp.sum(params["layers"][1]["w"] * x["w"])


PARAMS = {"a": jnp.ones(2), "layers": [None, {"w": jnp.ones(3), "name": "relu"}], "n": 3}


def data(a=1.0, w=1.0):
    return {"a": jnp.full(2, a), "w": jnp.full(3, w)}


@pytest.mark.parametrize("scaling", [DynamicLossScaling(), StaticLossScaling(2.0**15)])
def test_names_the_first_leaf_and_the_reason(scaling):
    gradient = eqx.filter_jit(halfstep.filter_grad(loss, scaling, policy="f16:inputs"))
    _, good, grads = gradient(PARAMS, data())
    assert good
    assert good.where(grads) is None
    assert good.reason() == "finite: the loss and every gradient."
    _, second, grads = gradient(PARAMS, data(w=4.0))  # 4 * 2**15 is above 65504
    assert not second
    assert second.where(grads) == second.where(PARAMS) == "layers/1/w"
    assert "but the gradients are not: scaled gradients overflowed" in second.reason(PARAMS)
    assert "layers/1/w" in second.reason(PARAMS)
    assert "leaf 1" in second.reason()
    _, both, grads = gradient(PARAMS, data(4.0, 4.0))
    assert both.where(grads) == "a"
    _, bad, grads = gradient(PARAMS, data(w=jnp.nan))
    assert "the loss itself is not finite" in bad.reason(grads)
    assert not bool(bad.loss_finite)


def test_a_bad_loss_with_finite_gradients_is_a_skip():
    """A logged infinity would otherwise be applied as if nothing had happened."""

    def odd(w, x):
        return jnp.sum(w) + jax.lax.stop_gradient(x)

    _, finite, grads = halfstep.filter_grad(odd, DynamicLossScaling(), policy="f16")(
        jnp.ones(2), jnp.asarray(jnp.inf)
    )
    assert not finite
    assert halfstep.all_finite(grads)
    assert finite.where(grads) is None
    assert "bad data" in finite.reason(grads)


def test_unchecked_says_so():
    _, verdict, _ = halfstep.filter_grad(loss, NoLossScaling())(PARAMS, data(jnp.nan))
    assert verdict.checked is False
    assert jax.tree.leaves(verdict) == []
    for use in (bool, lambda v: ~v, lambda v: v & True, jnp.asarray, lambda v: v.where(PARAMS)):
        with pytest.raises(ValueError, match=r"finiteness was not checked.*check_finite=True"):
            use(verdict)
    assert "not checked" in verdict.reason()
    checked = halfstep.filter_grad(loss, NoLossScaling(), check_finite=True)
    assert not checked(PARAMS, data(jnp.nan))[1]


def test_no_check_is_compiled_without_a_scale():
    def gradient(check):
        transform = halfstep.filter_grad(loss, NoLossScaling(), check_finite=check)
        return lambda params, x: transform(params, x)[2]

    params = {"a": PARAMS["a"], "layers": [None, {"w": PARAMS["layers"][1]["w"]}]}
    for transform in (gradient(None), gradient(False)):
        compiled = str(jax.jit(transform).lower(params, data()).compile().as_text())
        assert "reduce" not in compiled
        assert "compare" not in compiled

    def used(params, x):
        _, verdict, grads = halfstep.filter_grad(loss, NoLossScaling(), check_finite=True)(
            params, x
        )
        return verdict, grads

    assert "compare" in str(jax.jit(used).lower(params, data()).compile().as_text())


def test_dynamic_scaling_cannot_go_unchecked():
    with pytest.raises(ValueError, match="DynamicLossScaling needs to know"):
        halfstep.filter_grad(loss, DynamicLossScaling(), policy="f16", check_finite=False)(
            PARAMS, data()
        )


def test_a_gradient_that_only_unscaling_makes_infinite():
    """A scale below one divides by less than one: 1e38 in, infinity out."""
    scaling = DynamicLossScaling(2.0**-8, 2.0**-8)
    _, finite, grads = halfstep.filter_grad(
        lambda w: jnp.sum(w * jnp.float32(3e38)), scaling, policy="f32"
    )(jnp.full(2, 1e-30))
    assert bool(jnp.isfinite(grads).all())
    assert finite
    _, finite, grads = halfstep.filter_grad(
        lambda w: jnp.sum(w * jnp.float32(3e38) * jnp.float32(64)), scaling, policy="f32"
    )(jnp.full(2, 1e-30))
    assert not bool(jnp.isfinite(grads).all())
    assert not finite
    assert bool(finite.loss_finite)


def test_a_gradient_that_only_its_parameters_format_makes_infinite():
    """bfloat16 holds 1e6; the float16 parameter it belongs to does not."""
    _, finite, grads = halfstep.filter_grad(
        lambda w: jnp.sum(w * jnp.asarray(1e6, w.dtype)), policy="bf16:inputs", check_finite=True
    )(jnp.ones(2, jnp.float16))
    assert grads.dtype == jnp.float16
    assert not finite


def test_magnitudes():
    tree = [jnp.asarray([-3.0, 2.0]), jnp.ones(0), jnp.asarray([1j]), jnp.arange(3), "text"]
    assert np.array_equal(magnitudes(tree), [3, 0, 0])
    mixed = [jnp.asarray(v, d) for v, d in ((1, "float16"), (-2, "float32"), (3, "bfloat16"))]
    mixed += [jnp.asarray(-4, "float16"), jnp.asarray(5, "float8_e5m2"), jnp.asarray(6.0)]
    assert np.array_equal(magnitudes(mixed), [1, 2, 3, 4, 5, 6])
    assert np.isinf(magnitudes([jnp.asarray([complex(0, np.inf)])])[0])
    assert np.isnan(magnitudes([jnp.asarray([np.nan, 9.0], jnp.float16)])[0])


def test_small_vectors_are_read_together():
    """Biases and norms of one type share a reduction; matrices are not copied."""
    tree = {f"b{i}": jnp.full(8, i, jnp.float32) for i in range(20)}
    tree |= {f"h{i}": jnp.full(8, i, jnp.float16) for i in range(5)}
    tree |= {"w": jnp.full((8, 8), 50.0), "z": jnp.full((8, 8), 60.0)}
    jaxpr = jax.make_jaxpr(magnitudes)(tree).jaxpr
    assert sum(eqn.primitive.name == "reduce_max" for eqn in jaxpr.eqns) == 4
    avals: list[Any] = [eqn.outvars[0].aval for eqn in jaxpr.eqns]
    assert max(aval.size for aval in avals) == 20 * 8
    expected = [float(leaf.reshape(-1)[0]) for leaf in jax.tree.leaves(tree)]
    assert np.array_equal(magnitudes(tree), expected)
    tree["b7"] = tree["b7"].at[3].set(jnp.nan)
    bad = [not np.isfinite(value) for value in magnitudes(tree)]
    assert [index for index, is_bad in enumerate(bad) if is_bad] == [sorted(tree).index("b7")]


def test_vectors_that_are_divided_differently_are_not_read_together(mesh: jax.sharding.Mesh):
    """On a mesh with explicit axes, their types differ, and stacking them would be an error."""
    kinds = (jax.sharding.AxisType.Explicit,) * len(mesh.axis_names)
    explicit = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    rows = jax.sharding.NamedSharding(explicit, jax.P(mesh.axis_names[0]))
    whole = jax.sharding.NamedSharding(explicit, jax.P())
    tree = [jax.device_put(jnp.full(8, i + 1.0), where) for i, where in enumerate((rows, whole))]
    with jax.set_mesh(explicit):
        assert np.array_equal(jax.jit(magnitudes)(tree), [1, 2])


def test_boolean_algebra():
    true, false = (Verdict(jnp.asarray(v), jnp.asarray(v), jnp.asarray(-1)) for v in (True, False))
    assert bool(~false)
    assert bool(true & True)
    assert not bool(true & false)
    assert bool(false | true)
    assert bool(True & true)
    as_array: Any = true
    assert bool(jnp.where(as_array, 1, 0)) is True
    assert bool(jax.jit(lambda v: ~v)(false))
    assert bool(jax.jit(lambda v: jnp.logical_and(v, v))(true))


def verdict_of(leaf: int, *, loss: bool = True) -> Verdict:
    """Of gradients whose leaf of that number is bad; -1 if all are good."""
    return Verdict(jnp.asarray(leaf < 0 and loss), jnp.asarray(loss), jnp.int32(leaf))


def test_a_condition_joins_a_verdict():
    bad, good = verdict_of(1), verdict_of(-1)
    assert (bad & True).where(PARAMS) == bad.where(PARAMS)
    assert (bad & True).reason(PARAMS) == f"part 1 of 2: {bad.reason(PARAMS)}"
    for combined, part in ((good & jnp.asarray(False), 2), (False & good, 1)):
        assert not combined
        assert combined.reason(PARAMS) == f"part {part} of 2: a condition is false."
        assert combined.where(PARAMS) is None
    assert (good & True).reason() == "finite: the loss and every gradient."
    with pytest.raises(TypeError, match=r"required a boolean; got float32 of shape \(\)"):
        _ = good & jnp.float32(1)
    with pytest.raises(ValueError, match="finiteness was not checked"):
        _ = Verdict(None, None, None) & good


def test_two_verdicts_know_their_own_trees():
    other = {"x": jnp.ones(1), "y": jnp.ones(1), "z": jnp.ones(1)}
    combined = jax.jit(lambda a, b: a & b)(verdict_of(-1), verdict_of(2))
    assert combined.where((PARAMS, other)) == "z"
    assert "part 2 of 2: the loss is finite but the gradients are not" in combined.reason()
    three = combined & (jnp.asarray(1.0) < 2)
    assert three.where([PARAMS, other]) == "z"
    assert "part 2 of 3: " in three.reason([PARAMS, other])
    # Whose leaf it is a ledger cannot know.
    assert int(halfstep.Ledger().record(three).last_leaf) == -1
    for many in (verdict_of(2) & verdict_of(-1), verdict_of(2) & three):
        assert int(halfstep.Ledger().record(many).last_leaf) == -1
    assert int(halfstep.Ledger().record(verdict_of(2) & True).last_leaf) == 2
    assert int(halfstep.Ledger().record(three & verdict_of(-1, loss=False)).bad_losses) == 1


def test_a_combined_verdict_gates_a_step():
    new, old = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
    for finite, expected in ((verdict_of(-1) & True, new), (verdict_of(-1) & verdict_of(0), old)):
        chosen = jax.jit(halfstep.select_tree)(finite, new, old)
        assert np.array_equal(chosen["w"], expected["w"])


def test_where_with_the_wrong_tree():
    verdict = Verdict(jnp.asarray(False), jnp.asarray(True), jnp.asarray(7))
    with pytest.raises(ValueError, match="names leaf 7, but `tree` has 2 inexact array leaves"):
        verdict.where(PARAMS)
    scalar = Verdict(jnp.asarray(False), jnp.asarray(True), jnp.asarray(0))
    assert scalar.where(jnp.ones(2)) == "the gradient itself"


def test_all_finite_is_global_on_sharded_arrays(mesh: jax.sharding.Mesh):
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    for bad in range(4):
        x = np.ones((4, 2), np.float32)
        x[bad, 1] = np.inf
        verdict = jax.jit(halfstep.all_finite)({"x": jax.device_put(x, sharding)})
        assert not verdict
        assert verdict.sharding.is_fully_replicated


def test_ten_thousand_leaves():
    """The verdict of a tree of this size is one small program, with one flag a leaf."""
    tree = [jax.ShapeDtypeStruct((), jnp.float32)] * 10_000
    loss = jnp.ones(())
    jaxpr = jax.make_jaxpr(lambda tree: judge(finite_flags(magnitudes(tree), loss)))(tree)
    assert sum(str(eqn.primitive) == "reduce_max" for eqn in jaxpr.eqns) == 10_000


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e5m2", "complex64"])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (64, 65), (2, 3, 40)])
def test_a_single_bad_element_anywhere_is_found(dtype: str, shape: tuple[int, ...]):
    """Also between numbers at the end of the range, where a sum would overflow."""
    finite = jax.jit(halfstep.all_finite)
    largest = float(jnp.finfo(dtype).max)
    full = np.full(shape, largest).astype(dtype)
    assert finite(full)
    for index in range(0, full.size, max(1, full.size // 13)):
        for poison in (np.nan, np.inf, -np.inf):
            bad = full.copy()
            bad.flat[index] = np.asarray(poison).astype(dtype)
            assert not finite(bad), (index, poison)


@pytest.mark.parametrize("ask", [bool, lambda v: v.where(PARAMS), lambda v: v.reason()])
def test_asked_too_early(ask):
    gradient = halfstep.filter_grad(loss, DynamicLossScaling(), policy="f16:inputs")
    errors = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
    with pytest.raises(errors, match=r"[Tt]racer|traced") as caught:
        eqx.filter_jit(lambda: ask(gradient(PARAMS, data())[1]))()
    assert "Return it and ask on the host" in caught.value.__notes__[0]
