"""NNX modules that functions change in place, given to `autocast` as they are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import halfstep

pytestmark = pytest.mark.core
X = jnp.arange(32.0).reshape(8, 4) / 8


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(self.linear(x)))


def loss(net: Net, x: Any) -> Any:
    return jnp.mean(net(x) ** 2)


def later(w: Any, net: Net, x: Any) -> Any:
    return jnp.mean(net(x @ w) ** 2)


def test_statistics_and_counters_come_back():
    plain, low = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    func = halfstep.autocast(loss, "bf16")
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(3):
            assert float(func(low, X)) == pytest.approx(float(loss(plain, X)), rel=2**-5)
    for name in ("mean", "var"):
        found, expected = getattr(low.norm, name)[...], getattr(plain.norm, name)[...]
        assert found.dtype == jnp.float32
        assert np.allclose(found, expected, rtol=2**-7, atol=2**-9)
        assert np.any(expected != getattr(Net(nnx.Rngs(0)).norm, name)[...])
    counts = [nnx.state(net, nnx.RngCount) for net in (low, plain)]
    assert [int(leaf) for count in counts for leaf in jax.tree.leaves(count)] == [3, 3]


def test_within_nnx_transforms():
    def three(func: Any) -> tuple[list[float], Any]:
        net = Net(nnx.Rngs(0))
        step = nnx.jit(lambda net, x: nnx.value_and_grad(func)(net, x)[0])
        with jax.numpy_dtype_promotion("standard"):
            return [float(step(net, X)) for _ in range(3)], net.norm.mean[...]

    values, mean = three(halfstep.autocast(loss, "bf16"))
    expected, expected_mean = three(loss)
    assert values == pytest.approx(expected, rel=2**-5)
    assert len(set(values)) == 3
    assert np.allclose(mean, expected_mean, rtol=2**-7, atol=2**-9)


def test_looking_changes_nothing():
    net = Net(nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"):
        halfstep.explain(loss, "bf16")(net, X)
    assert jnp.all(net.norm.mean[...] == 0)


def test_a_gradient_function_says_where_to_go():
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(
            ValueError,
            match="of an NNX module in place, and its new value cannot leave the gradient function",
        ),
    ):
        halfstep.filter_value_and_grad(later)(jnp.eye(4), Net(nnx.Rngs(0)), X)


class Growing(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.eye(4))

    def __call__(self, x: Any) -> Any:
        self.seen = nnx.Variable(x)
        return x @ self.w[...]


def test_new_variables_are_refused():
    with pytest.raises(ValueError, match=r"other variables than it had \(1 before, 2 after"):
        halfstep.autocast(loss, "bf16")(Growing(), X)
