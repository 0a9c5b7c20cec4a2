"""Gradient transforms: what they return, in which dtype, exactly."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import halfstep
from halfstep import DynamicLossScaling, NoLossScaling, Policy
from tests._jaxprs import contractions, equations

pytestmark = [pytest.mark.core, pytest.mark.types]

COMPUTE = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
policies = pytest.mark.parametrize("policy", COMPUTE)


def scaling_for(policy: str):
    return DynamicLossScaling(2.0**8) if policy == "f16" else NoLossScaling()


def quadratic(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def problem(key):
    model = eqx.nn.MLP(4, 2, 8, 1, key=key)
    return model, jax.random.normal(key, (16, 4)), jnp.zeros((16, 2))


class TestDropIn:
    """With policy f32 and no scale, the Equinox functions themselves."""

    def test_bitwise_equal_to_equinox(self, getkey):
        args = problem(getkey())
        value, grads = eqx.filter_jit(eqx.filter_value_and_grad(quadratic))(*args)
        ours = eqx.filter_jit(halfstep.filter_value_and_grad(quadratic, policy="f32"))(*args)
        assert ours[0] == value
        assert eqx.tree_equal(ours[3], grads)

    def test_first_argument_is_filtered(self):
        model = {"w": jnp.ones(2), "n": jnp.arange(2), "f": jax.nn.relu, "s": "x", "none": None}
        _, _, grads = halfstep.filter_grad(lambda m: jnp.sum(m["w"] ** 2))(model)
        assert grads["w"].dtype == jnp.float32
        assert [grads[k] for k in ("n", "f", "s", "none")] == [None] * 4

    def test_return_orders(self):
        def loss(w, x):
            return jnp.sum(w * x), {"metric": x}

        w = x = jnp.ones(2)
        args = {"policy": "f16", "has_aux": True}
        value, scaling, finite, grads = halfstep.filter_value_and_grad(
            loss, DynamicLossScaling(), **args
        )(w, x)
        assert value[0] == 2
        assert set(value[1]) == {"metric"}
        assert isinstance(scaling, DynamicLossScaling)
        assert finite
        again = halfstep.filter_grad(loss, DynamicLossScaling(), **args)(w, x)
        assert len(again) == 4
        assert eqx.tree_equal(again[2], grads)
        assert set(again[3]) == {"metric"}
        assert len(halfstep.filter_grad(lambda w: jnp.sum(w))(w)) == 3

    def test_keyword_arguments_and_names(self):
        def loss(w, *, x):
            """Doc."""
            assert x.dtype == jnp.bfloat16
            return jnp.sum(w * x)

        grad = halfstep.filter_grad(loss, policy="bf16:inputs")
        assert grad.__name__ == "loss"
        assert grad.__doc__ == "Doc."
        assert np.array_equal(grad(jnp.ones(2), x=jnp.ones(2))[2], [1, 1])

    def test_module_as_function(self):
        class Loss(eqx.Module):
            weight: jax.Array

            def __call__(self, model, x):
                return jnp.sum(self.weight.astype(x.dtype) * model * x)

        _, _, grads = halfstep.filter_grad(Loss(jnp.ones(2)), keep=("x",), policy="bf16:inputs")(
            jnp.ones(2, jnp.float32), jnp.ones(2, jnp.bfloat16)
        )
        assert grads.dtype == jnp.float32
        _, _, grads = halfstep.filter_grad(Loss(jnp.ones(2)), keep=("x",), policy="bf16")(
            jnp.ones(2), jnp.ones(2)
        )
        assert grads.dtype == jnp.float32


class TestPrecision:
    @pytest.mark.rows(2)
    @policies
    def test_arguments_enter_in_the_compute_dtype(self, policy: str):
        seen = {}

        def loss(model, x, y):
            seen.update(model=model.layers[0].weight.dtype, x=x.dtype, y=y.dtype)
            return quadratic(model, x, y)

        model, x, y = problem(jax.random.key(0))
        value, _, _, grads = halfstep.filter_value_and_grad(
            loss, scaling_for(policy), policy=f"{policy}:inputs"
        )(model, x, y)
        assert {str(d) for d in seen.values()} == {COMPUTE[policy]}
        assert {str(g.dtype) for g in jtu.tree_leaves(grads)} == {"float32"}
        assert value.dtype == jnp.float32

    @policies
    def test_the_function_is_traced_as_it_is_written(self, policy: str):
        def loss(model, x, y):
            assert {str(leaf.dtype) for leaf in (model.layers[0].weight, x, y)} == {"float32"}
            return quadratic(model, x, y)

        model, *data = problem(jax.random.key(0))
        params, static = eqx.partition(model, eqx.is_array)

        def gradient(params, x, y):
            step = halfstep.filter_grad(loss, scaling_for(policy), policy=policy)
            return step(eqx.combine(params, static), x, y)[2].layers

        assert {str(g.dtype) for g in jtu.tree_leaves(gradient(params, *data))} == {"float32"}
        assert set(contractions(gradient, params, *data)) == {COMPUTE[policy]}

    def test_frozen_parameters(self):
        """A bias that is not differentiated does not widen what it is added to."""

        def loss(w, frozen, x):
            return jnp.sum(jax.nn.relu(x @ w + frozen))

        args = jnp.ones((4, 4)), jnp.ones((1, 4)), jnp.ones((2, 4))
        for params, dtype in ((0, "float32"), ((0, 1), "bfloat16")):
            gradient = halfstep.filter_grad(loss, policy="bf16", params=params)
            found = [
                str(equation.invars[0].aval.dtype)
                for equation in equations(jax.make_jaxpr(lambda *a: gradient(*a)[2])(*args))  # noqa: B023
                if equation.primitive.name == "max"
            ]
            assert set(found) == {dtype}

    @policies
    @pytest.mark.parametrize("mode", ["", ":inputs"])
    def test_error_is_that_of_the_format(self, mode: str, policy: str, getkey):
        """The relative error of a two-layer network's gradient is a few roundings."""
        model, x, y = problem(getkey())
        # A unit of a ReLU that is nearly zero changes sides with a rounding: no bound holds there.
        model = eqx.tree_at(lambda model: model.activation, model, jnp.tanh)
        exact = eqx.filter_grad(quadratic)(model, x, y)
        _, _, grads = halfstep.filter_grad(quadratic, scaling_for(policy), policy=policy + mode)(
            model, x, y
        )
        difference = jtu.tree_map(lambda a, b: a - b, grads, exact)
        norm = lambda t: float(jnp.sqrt(sum(jnp.sum(x**2) for x in jtu.tree_leaves(t))))  # noqa: E731
        # Forward and backward are two layers each of cast, product, sum, bias and nonlinearity:
        # under 32 roundings in a row, each of half an epsilon.
        assert norm(difference) <= 16 * halfstep.FORMATS[policy].eps * norm(exact)

    def test_the_loss_is_float32_before_it_is_scaled(self):
        """2.21 * 2**15 is above 65504; neither the value nor the gradient notices."""

        def loss(w):
            return w + jnp.asarray(1.21, w.dtype)

        value, _, finite, grads = halfstep.filter_value_and_grad(
            loss, DynamicLossScaling(2.0**15), policy="f16:inputs"
        )(jnp.asarray(1.0))
        assert finite
        assert value == np.float32(np.float16(1.0) + np.float16(1.21))
        assert grads == 1

    def test_gradients_are_bit_equal_across_a_growth_step(self):
        """Unscaled with the scale that was applied, never with the one for the next step."""
        scaling = DynamicLossScaling(2.0**4, period=1)
        w, x = jnp.asarray([1.0, -3.0]), jnp.asarray([0.5, 0.25])
        for step in range(6):
            value, scaling, _, grads = halfstep.filter_value_and_grad(
                lambda w, x: jnp.sum(w * x), scaling, policy="f16"
            )(w, x)
            assert float(value) == -0.25
            assert np.array_equal(grads, x)
            assert scaling.loss_scaling == 2.0 ** (5 + step)

    def test_small_gradients_survive_only_with_a_scale(self):
        def loss(w):
            return jnp.sum(w * jnp.asarray(2.0**-10, w.dtype) * jnp.asarray(2.0**-16, w.dtype))

        policy = "f16:inputs"
        none = halfstep.filter_grad(loss, NoLossScaling(), policy=policy)(jnp.ones(2))[2]
        scaled = halfstep.filter_grad(loss, DynamicLossScaling(2.0**12), policy=policy)(
            jnp.ones(2)
        )[2]
        assert np.array_equal(none, [0, 0])
        assert np.array_equal(scaled, [2.0**-26, 2.0**-26])

    def test_sixteen_bit_parameters(self):
        """Their gradients come back in float32, where unscaling loses nothing."""
        w = jnp.ones(2, jnp.float16)
        grads = halfstep.filter_grad(jnp.sum, DynamicLossScaling(2.0**15), policy="f16")(w)[2]
        assert grads.dtype == jnp.float32
        assert np.array_equal(grads, [1, 1])
        assert halfstep.filter_grad(jnp.sum, policy="bf16")(w)[2].dtype == jnp.float16

    def test_complex_and_float64_leaves(self):
        def loss(model):
            return jnp.sum(jnp.abs(model["z"]) ** 2) + jnp.sum(model["w"]).astype("float32")

        model = {"z": jnp.asarray([1 + 2j], jnp.complex64), "w": jnp.ones(2)}
        _, finite, grads = halfstep.filter_grad(loss, DynamicLossScaling(2.0**4), policy="f16")(
            model
        )
        assert finite
        assert np.array_equal(grads["z"], jax.grad(loss)(model)["z"])
        with jax.enable_x64(True):
            wide = {"w": jnp.ones(2, jnp.float64)}
            scaling = DynamicLossScaling(2.0**4)
            grads = halfstep.filter_grad(lambda m: jnp.sum(m["w"]), scaling, policy="f16")(wide)[2]
            assert grads["w"].dtype == jnp.float64


class TestAux:
    @policies
    def test_comes_back_in_its_own_dtypes(self, policy: str):
        def loss(w, x, ema):
            hidden = w * x
            aux = {
                "hidden": hidden,
                "half": hidden.astype(jnp.float16),
                "ema": ema * jnp.asarray(0.5, ema.dtype),
                "count": jnp.arange(3),
                "name": "text",
                "none": None,
            }
            return jnp.sum(hidden), aux

        args = (jnp.ones(2), jnp.ones(2), jnp.ones(2, jnp.bfloat16))
        transform = halfstep.filter_value_and_grad(
            loss, scaling_for(policy), policy=policy, has_aux=True, keep=("ema",)
        )
        (_, aux), *_ = transform(*args)
        assert aux["name"] == "text"
        assert aux["none"] is None
        assert aux["hidden"].dtype == jnp.float32
        assert aux["half"].dtype == jnp.float16
        assert aux["ema"].dtype == jnp.bfloat16
        assert aux["count"].dtype == jnp.int32

    def test_an_infinite_metric_is_no_overflow(self):
        def loss(w):
            return jnp.sum(w), {"perplexity": jnp.asarray(jnp.inf)}

        scaling, finite, _, aux = halfstep.filter_grad(
            loss, DynamicLossScaling(2.0**10), policy="f16", has_aux=True
        )(jnp.ones(2))
        assert finite
        assert scaling.loss_scaling == 2.0**10
        assert aux["perplexity"] == jnp.inf

    def test_a_function_that_only_runs_in_low_precision(self):
        def loss(w):
            carry = jnp.zeros((), jnp.bfloat16)
            total, _ = jax.lax.scan(lambda c, x: (c + x, None), carry, w)
            return total, total

        with pytest.warns(UserWarning, match=r"cannot be traced at its own dtypes.*in f32"):
            (_, aux), *_ = halfstep.filter_value_and_grad(loss, has_aux=True, policy="bf16:inputs")(
                jnp.ones(3)
            )
        assert aux.dtype == jnp.float32

    def test_a_function_that_refuses_its_own_dtypes_without_a_word(self):
        def loss(w):
            if w.dtype != jnp.bfloat16:
                raise ValueError
            return jnp.sum(w), w

        with pytest.warns(UserWarning, match=r"at its own dtypes \(ValueError\), so its aux"):
            (_, aux), *_ = halfstep.filter_value_and_grad(loss, has_aux=True, policy="bf16:inputs")(
                jnp.ones(3)
            )
        assert aux.dtype == jnp.float32

    def test_not_a_pair(self):
        with pytest.raises(TypeError, match=r"returns \(loss, aux\); got tuple of length 3"):
            halfstep.filter_grad(lambda w: (w, w, w), has_aux=True)(jnp.asarray(1.0))


class TestKeep:
    def test_rules_of_the_policy_and_of_the_call(self):
        seen = {}

        def loss(model, batch, table):
            seen.update(y=batch["y"].dtype, x=batch["x"].dtype, table=table.dtype)
            return jnp.sum(model * batch["x"])

        batch = {"x": jnp.ones(2), "y": jnp.ones(2)}
        policy = Policy.parse("c=bf16,keep=batch/y:inputs")
        halfstep.filter_grad(loss, policy=policy, keep=("table",))(jnp.ones(2), batch, jnp.ones(2))
        assert {k: str(v) for k, v in seen.items()} == {
            "y": "float32",
            "x": "bfloat16",
            "table": "float32",
        }

    def test_unmatched(self):
        with pytest.raises(ValueError, match=r"'batch/target' in `keep` selects nothing.*targets"):
            halfstep.filter_grad(lambda model, batch: 0.0, keep=("batch/target",))(
                jnp.ones(2), {"targets": jnp.ones(2)}
            )


class TestErrors:
    def test_float16_needs_a_decision(self):
        with pytest.raises(ValueError, match=r"computes in float16.*DynamicLossScaling\(\)"):
            halfstep.filter_grad(jnp.sum, policy="f16")

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            (lambda w: w, r"real floating-point scalar; got float32\[2\]. Reduce it"),
            (lambda w: jnp.sum(w).astype(jnp.int32), r"got int32\[\]"),
            (lambda w: jnp.sum(w).astype(jnp.complex64), r"got complex64\[\]"),
            (lambda w: (jnp.sum(w), 1), "got tuple"),
        ],
    )
    def test_loss_must_be_a_real_scalar(self, result, message):
        with pytest.raises(TypeError, match=message):
            halfstep.filter_grad(result)(jnp.ones(2))

    def test_reduce_dtype_needs_something_to_reduce(self):
        with pytest.raises(ValueError, match="`reduce_dtype` has nothing to act on"):
            halfstep.filter_grad(jnp.sum, policy="bf16:inputs", reduce_dtype="f32")
        with pytest.raises(ValueError, match="float32 or the compute dtype, bf16"):
            halfstep.filter_grad(jnp.sum, policy="bf16", reduce_dtype="f16")

    def test_state_is_not_differentiated(self):
        _, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")
        with pytest.raises(TypeError, match=r"holds persistent state: State at `1`.*has_aux=True"):
            halfstep.filter_grad(lambda both: 0.0)((jnp.ones(2), state))

    def test_no_argument(self):
        with pytest.raises(TypeError, match="Pass the model by position"):
            halfstep.filter_grad(lambda w: jnp.sum(w))(w=jnp.ones(2))

    def test_carry_needs_aux_and_microbatches(self):
        with pytest.raises(ValueError, match="`carry` goes with has_aux=True and microbatches > 1"):
            halfstep.filter_grad(jnp.sum, carry="state")

    def test_microbatches(self):
        with pytest.raises(ValueError, match="`microbatches` is an integer, 1 or more; got 0"):
            halfstep.filter_grad(jnp.sum, microbatches=0)


@pytest.mark.rows(2)
@policies
def test_under_every_transform(policy: str):
    """jit, vmap, scan, checkpoint and a second derivative of the transformed function."""
    scaling = scaling_for(policy)

    def grads_of(w, x):
        return halfstep.filter_grad(lambda w, x: jnp.sum((w * x) ** 2), scaling, policy=policy)(
            w, x
        )[2]

    w, x = jnp.asarray([1.0, 2.0]), jnp.asarray([0.5, 0.25])
    plain = grads_of(w, x)
    assert np.array_equal(plain, 2 * w * x**2)
    assert np.array_equal(jax.jit(grads_of)(w, x), plain)
    assert np.array_equal(jax.vmap(grads_of)(w[None], x[None])[0], plain)
    assert np.array_equal(jax.lax.map(lambda a: grads_of(*a), (w[None], x[None]))[0], plain)
    assert np.array_equal(jax.checkpoint(grads_of)(w, x), plain)
    hessian = jax.jacfwd(grads_of)(w, x)
    assert np.array_equal(hessian, np.diag(2 * np.asarray(x) ** 2))
    assert np.array_equal(jax.jacrev(grads_of)(w, x), hessian)
