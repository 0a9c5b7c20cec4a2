"""Casting functions: what goes in, what comes out, what is protected."""

import collections
import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep

pytestmark = [pytest.mark.core, pytest.mark.types, pytest.mark.wheel]

Point = collections.namedtuple("Point", ["x", "y"])


def dtypes(tree) -> list[str]:
    return [str(leaf.dtype) for leaf in jax.tree.leaves(tree)]


def test_cast_function_casts_in_and_out():
    def func(a, *, b):
        return {"sum": a + b, "point": Point(a, [b])}, a.dtype.name

    tree, inside = halfstep.cast_function(func, "bf16", "f32")(jnp.ones(2), b=jnp.ones(2))
    assert inside == "bfloat16"
    assert dtypes(tree) == ["float32"] * 3
    assert isinstance(tree["point"], Point)
    tree, _ = halfstep.cast_function(func, "bf16")(jnp.ones(2), b=jnp.ones(2))
    assert dtypes(tree) == ["bfloat16"] * 3


def test_cast_function_keeps_what_rules_select():
    def func(model, batch, *, scale, state=None):
        return dtypes((model, batch, scale, state))

    batch = {"x": jnp.ones(2), "targets": jnp.ones(2)}
    call = halfstep.cast_function(func, "f16", keep=("batch/targets", "scale", "state"))
    assert call(jnp.ones(2), batch, scale=jnp.ones(()), state=None) == [
        "float16",
        "float32",  # targets comes before x
        "float16",
        "float32",
    ]
    with pytest.raises(ValueError, match=r"'batch/target' in `keep`.*'batch/targets'"):
        halfstep.cast_function(func, "f16", keep=("batch/target",))(1, batch, scale=1)


def test_a_kept_weak_type_does_not_follow_its_neighbors():
    """`jnp.full(4, 1e5)` is weakly typed: beside float16 it would become infinite."""
    weak = jnp.full(4, 1e5)
    assert weak.weak_type
    add = halfstep.cast_function(lambda x, y: (x.dtype.name, y.weak_type), "f16", keep=("y",))
    assert add(jnp.ones(4), weak) == ("float16", False)


@pytest.mark.parametrize("kept", ["inputs", "targets"])
def test_one_array_given_twice_can_be_kept_once(kept: str):
    """An autoencoder's input is its target."""
    call = halfstep.cast_function(
        lambda inputs, targets: {"inputs": inputs.dtype.name, "targets": targets.dtype.name},
        "f16",
        keep=(kept,),
    )
    x = jnp.ones(2)
    seen = call(x, x)
    assert seen.pop(kept) == "float32"
    assert set(seen.values()) == {"float16"}


def test_persistent_state_is_protected():
    """BatchNorm statistics by type and by name, on the way in and on the way out."""
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema")

    def func(model, state, x, others):
        seen = dtypes((state, others, x))
        return state, others, x, seen

    others = {"batch_stats": {"mean": jnp.ones(2)}, "bn": {"running_var": jnp.ones(2)}}
    call = halfstep.cast_function(func, "f16", "bf16")
    out_state, out_others, out_x, seen = call(model, state, jnp.ones(3), others)
    assert seen[-1] == "float16"
    assert set(seen[:-1]) <= {"float32", "bool", "int32"}
    assert dtypes(out_state) == dtypes(state)
    assert dtypes(out_others) == ["float32", "float32"]
    assert out_x.dtype == jnp.bfloat16


class TestForceFullPrecision:
    def test_bare_decorator_returns_to_the_arguments_dtype(self):
        @halfstep.force_full_precision
        def func(x, *, axis):
            """Doc."""
            return {"d": x.sum(axis), "l": [x, (x, None)], "p": Point(x, x)}, x.dtype.name

        for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
            tree, inside = func(jnp.ones((2, 2), dtype), axis=0)
            assert inside == "float32"
            assert set(dtypes(tree)) == {np.dtype(dtype).name}
        assert func.__doc__ == "Doc."
        assert func.__name__ == "func"

    def test_decorator_with_return_dtype(self):
        @halfstep.force_full_precision(return_dtype=jnp.float32)
        def total(x):
            return jnp.sum(x)

        assert total(jnp.full(4096, 60000.0, jnp.float16)) == 60000 * 4096
        assert total(jnp.ones(3, jnp.bfloat16)).dtype == jnp.float32

    def test_positional_return_dtype(self):
        x = jnp.ones(4, jnp.bfloat16)
        assert halfstep.force_full_precision(jax.nn.softmax, x.dtype)(x, axis=-1).dtype == x.dtype

    def test_mixed_arguments_return_the_widest(self):
        add = halfstep.force_full_precision(lambda a, b: a + b)
        half, brain = jnp.ones(2, jnp.float16), jnp.ones(2, jnp.bfloat16)
        assert add(half, half).dtype == jnp.float16
        assert add(half, brain).dtype == jnp.float32
        assert add(half, jnp.ones(2)).dtype == jnp.float32

    def test_no_float_arguments(self):
        assert halfstep.force_full_precision(jnp.sqrt, None)(4).dtype == jnp.float32

    def test_module(self):
        norm = eqx.nn.LayerNorm(4)
        full = halfstep.force_full_precision(norm)
        assert isinstance(full, eqx.Module)
        assert jax.tree.structure(full) != jax.tree.structure(norm)
        assert len(jax.tree.leaves(full)) == len(jax.tree.leaves(norm))
        # In a float16 model its parameters are float16, and still it computes in float32.
        cast: Any = halfstep.cast_to_float16(full)
        x = jnp.arange(4, dtype=jnp.float16) * 400
        out = cast(x)
        assert out.dtype == jnp.float16
        exact = norm(x.astype(jnp.float32))
        # One rounding at the end, of values below 2: half a unit in the last place.
        assert np.abs(np.asarray(out, np.float32) - exact).max() <= halfstep.FORMATS["f16"].eps

    def test_module_is_differentiable_through(self):
        full = halfstep.force_full_precision(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
        grads = eqx.filter_grad(lambda m: jnp.sum(m(jnp.ones(2, jnp.float16)).astype("float32")))(
            full
        )
        assert dtypes(grads) == ["float32", "float32"]

    def test_method(self):
        class Layer(eqx.Module):
            weight: jax.Array

            @halfstep.force_full_precision
            def __call__(self, x):
                assert self.weight.dtype == x.dtype == jnp.float32
                return self.weight * x

        layer: Any = halfstep.cast_to_float16(Layer(jnp.ones(2)))
        assert layer(jnp.ones(2, jnp.float16)).dtype == jnp.float16

    def test_errors(self):
        with pytest.raises(
            TypeError, match=r"must be a function or a module; got .*Give the return"
        ):
            halfstep.force_full_precision(jnp.ones(3))  # pyright: ignore[reportArgumentType, reportCallIssue]
        with pytest.raises(ValueError, match="unknown format 'f33'"):
            halfstep.force_full_precision(jnp.sum, "f33")


def test_float64_needs_x64():
    with pytest.raises(ValueError, match=r"casting to float64 needs 64-bit types.*jax_enable_x64"):
        halfstep.cast_tree(jnp.ones(2), "f64")


def test_under_transforms():
    cast = halfstep.cast_function(lambda x: jnp.sum(x * x), "bf16", "f32")
    x = jnp.arange(4.0)
    assert jax.jit(cast)(x) == 14
    assert jax.grad(cast)(x).dtype == jnp.float32
    assert np.array_equal(jax.vmap(jax.grad(cast))(jnp.stack([x, x])), [2 * x, 2 * x])
    assert jax.eval_shape(lambda x: halfstep.cast_tree(x, "f16"), x).dtype == jnp.float16
    out, tangent = jax.jvp(cast, (x,), (jnp.ones(4),))
    assert (out, tangent) == (14, 12)


def test_sharding_is_kept(mesh: jax.sharding.Mesh):
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(jnp.ones(8), sharding)
    assert halfstep.cast_tree(x, "bf16").sharding == sharding
    struct = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    assert halfstep.cast_tree(struct, "bf16").sharding == sharding


def test_arguments_in_the_wrong_order():
    with pytest.raises(ValueError, match="required a dtype or its name, got a dict"):
        inspect.unwrap(halfstep.cast_tree)("bf16", {"w": jnp.ones(3), "offset": jnp.zeros(3)})
