"""Operations of every rule on 16-bit activations: they run, and come near what float32 gives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import halfstep
from tests._rows import slow_unless

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]

# Small integers: exact in both formats, products and sums included.
W = jnp.asarray(np.arange(36).reshape(6, 6) % 5 - 2, jnp.float32)
X = jnp.asarray(np.arange(36).reshape(6, 6) % 7 - 3, jnp.float32)
AT = jnp.array([1, 3])

OPERATIONS = {
    "sort": lambda h: jnp.sort(h, axis=0),
    "argsort and take": lambda h: jnp.take_along_axis(h, jnp.argsort(h, axis=0), axis=0),
    "top_k": lambda h: lax.top_k(h, 2)[0],
    "sort by key": lambda h: lax.sort((h[0], h[1]), num_keys=1)[1],
    "at set": lambda h: h.at[AT].set(2.0),
    "at set activations": lambda h: h.at[AT].set(h[:2]),
    "at add": lambda h: h.at[AT].add(h[:2]),
    "at min": lambda h: h.at[AT].min(h[:2]),
    "at max": lambda h: h.at[AT].max(h[:2]),
    "at multiply": lambda h: h.at[AT].multiply(h[:2], unique_indices=True),
    "concatenate": lambda h: jnp.concatenate([h, jnp.zeros((1, 6)), h[:1]]),
    "one row concatenated": lambda h: jnp.concatenate([W[:1], h]),
    "pad": lambda h: jnp.pad(h, 1),
    "dynamic_slice": lambda h: lax.dynamic_slice(h, (1, 1), (2, 2)),
    "dynamic_update_slice": lambda h: lax.dynamic_update_slice(h, h[:1], (2, 0)),
    "clamp": lambda h: jnp.clip(h, -1.0, 1.0),
    "max pool": lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
    "sum pool": lambda h: lax.reduce_window(h, 0.0, lax.add, (2, 2), (2, 2), "VALID"),
    "cummax": lambda h: lax.cummax(h, axis=0),
    "cumsum": lambda h: jnp.cumsum(h, axis=0),
    "cumprod": lambda h: jnp.cumprod(jnp.sign(h), axis=0),
    "one hot of argmax": lambda h: jax.nn.one_hot(jnp.argmax(h, axis=1), 6) * h,
    "reduce": lambda h: lax.reduce(h, -jnp.inf, lambda a, b: jnp.maximum(a, b), (0,)),
    "fft": lambda h: jnp.abs(jnp.fft.fft(h)[:, :1]),
    "complex": lambda h: jnp.real(lax.complex(h, h) * lax.complex(h, -h)),
    "solve": lambda h: jnp.linalg.solve(h @ h.T * 0 + jnp.eye(6), h),
    "where": lambda h: jnp.where(h > 0, h, -1e9) + 1e9 * (h <= 0),
    "flip and roll": lambda h: jnp.roll(h[::-1], 1, axis=0),
    "stack and split": lambda h: jnp.split(jnp.stack([h, h]), 2)[1],
    "tile and repeat": lambda h: jnp.repeat(jnp.tile(h, 2), 2, axis=0),
    "bits": lambda h: lax.bitcast_convert_type(lax.bitcast_convert_type(h, jnp.int32), jnp.float32),
    "round and floor": lambda h: jnp.round(h) + jnp.floor(h) + jnp.ceil(h),
    "integer and back": lambda h: h.astype(jnp.int32).astype(jnp.float32),
    "bfloat16 and back": lambda h: h.astype(jnp.bfloat16).astype(jnp.float32),
    "convolution": lambda h: lax.conv(h[None, None], W[None, None, :2, :2], (1, 1), "SAME"),
    "stop_gradient": lambda h: h + lax.stop_gradient(h),
    "einsum": lambda h: jnp.einsum("ab,cb,cd->ad", h, W, h),
    "trace of a product": lambda h: jnp.trace(h @ h),
    "segment sum": lambda h: jax.ops.segment_sum(h, jnp.array([0, 0, 1, 1, 2, 2]), 3),
    "norm": lambda h: jnp.linalg.norm(h, axis=1),
    "map": lambda h: lax.map(lambda row: row * 2, h),
    "associative_scan": lambda h: lax.associative_scan(jnp.maximum, h),
    "optimization_barrier": lambda h: lax.optimization_barrier(h) * 2,
    "reduce_precision": lambda h: lax.reduce_precision(h, 8, 7),
}


# In the other format on every change one operation of each rule only.
IN_BOTH = {"sort", "at add", "concatenate", "max pool", "cumsum", "fft", "convolution", "map"}
every_row = pytest.mark.parametrize(
    ("name", "policy"),
    slow_unless(
        [(name, policy) for name in OPERATIONS for policy in ("bf16", "f16")],
        lambda name, policy: policy == "bf16" or name in IN_BOTH,
    ),
)


@pytest.mark.parametrize(
    ("name", "policy"),
    slow_unless(
        [(name, policy) for name in OPERATIONS for policy in ("bf16", "f16")],
        lambda name, policy: policy == "bf16" and name in IN_BOTH,
    ),
)
def test_on_the_result_of_a_product(name: str, policy: str):
    operation = OPERATIONS[name]

    def func(w: Any, x: Any) -> Any:
        return operation(x @ w)

    exact = func(W, X)
    got = jax.jit(halfstep.autocast(func, policy))(W, X)
    assert got.dtype == exact.dtype
    assert got.shape == exact.shape
    # The product itself is exact; what follows rounds a handful of times, in the largest value's
    # unit at most.
    bound = 8 * halfstep.FORMATS[policy].eps * float(jnp.abs(exact).max())
    assert float(jnp.abs(got - exact).max()) <= bound


@pytest.mark.rows(7)
@every_row
def test_and_its_gradient(name: str, policy: str):
    operation = OPERATIONS[name]

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(operation(x @ w) * 0.5)

    exact = jax.grad(loss)(W, X)
    got = jax.jit(jax.grad(halfstep.autocast(loss, policy)))(W, X)
    assert got.dtype == jnp.float32
    bound = 8 * halfstep.FORMATS[policy].eps * float(jnp.abs(exact).max())
    assert float(jnp.abs(got - exact).max()) <= bound
