"""What microbatches would repeat is split off from their loop."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep._program import Invariants, equations

ROWS, WIDTH, HIDDEN = 576, 64, 128
X = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
PARAMS = {
    "up": jax.random.normal(jax.random.key(1), (WIDTH, HIDDEN)) / 8,
    "down": jax.random.normal(jax.random.key(2), (HIDDEN, WIDTH)) / 8,
}
LOW = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu, jnp.float4_e2m1fn)


def written_out(params: Any, x: Any) -> Any:
    for _ in range(2):
        x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    return jnp.mean(x**2)


def in_jit(params: Any, x: Any) -> Any:
    layer = jax.jit(lambda x, params: jax.nn.gelu(x @ params["up"]) @ params["down"])
    return jnp.mean((x + layer(x, params)) ** 2)


def in_scan(params: Any, x: Any) -> Any:
    def layer(x: Any, each: Any) -> Any:
        return x + jax.nn.gelu(x @ each["up"]) @ each["down"], None

    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    return jnp.mean(jax.lax.scan(layer, x, stacked)[0] ** 2)


def in_remat(params: Any, x: Any) -> Any:
    return in_scan(params, x) + jax.checkpoint(written_out)(params, x)


def made_by(loss: Any, policy: str, microbatches: int) -> Any:
    options: dict[str, Any] = {}
    if microbatches > 1:
        options = {"microbatches": microbatches, "batch": ("x",)}
    return lambda params, x: halfstep.filter_grad(loss, policy=policy, **options)(params, x)[2]


def loops(loss: Any, policy: str) -> list[Any]:
    """The bodies of the loop over 4 microbatches."""
    traced = jax.make_jaxpr(made_by(loss, policy, 4))(PARAMS, X)
    found = [e for e in traced.jaxpr.eqns if e.primitive.name == "scan" and e.params["length"] == 4]
    return [equation.params["jaxpr"] for equation in found]


def encodings_of_weights(body: Any) -> int:
    """Operations that make 8 or 4 bits of the size of a weight, and of no activation."""
    avals: list[Any] = [
        out.aval
        for equation in equations(body.jaxpr)
        if equation.primitive.name == "convert_element_type"
        for out in equation.outvars
    ]
    return sum(aval.dtype in LOW and aval.size == WIDTH * HIDDEN for aval in avals)


@pytest.mark.rows(4)
@pytest.mark.parametrize("policy", ["f8", "f8-row", "f8-block", "mxfp8"])
@pytest.mark.parametrize("loss", [written_out, in_jit, in_scan, in_remat])
def test_weights_are_encoded_before_the_loop(loss, policy):
    (body,) = loops(loss, policy)
    # A microbatch has 144 rows: none of its activations has the size of a weight.
    assert encodings_of_weights(body) == 0


def test_encodings_inside_the_loop_would_be_seen(monkeypatch):
    monkeypatch.setattr(Invariants, "__len__", lambda _: 0)
    (body,) = loops(written_out, "mxfp8")
    assert encodings_of_weights(body) >= 2


@pytest.mark.rows(1)
@pytest.mark.parametrize("policy", ["f8", "mxfp8"])
@pytest.mark.parametrize("loss", [written_out, in_jit, in_scan, in_remat])
def test_gradients_have_the_same_bits(loss, policy, monkeypatch):
    ours = jax.jit(made_by(loss, policy, 4))(PARAMS, X)
    monkeypatch.setattr(Invariants, "__len__", lambda _: 0)
    plain = jax.jit(made_by(loss, policy, 4))(PARAMS, X)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(one, other)


def test_casts_to_16_bits_stay_in_the_loop():
    traced = jax.make_jaxpr(lambda x: x @ PARAMS["up"].astype(jnp.bfloat16).astype(jnp.float32))(X)
    assert not len(Invariants(traced))


def test_effects_stay_where_they_are_and_happen_once():
    seen: list[float] = []

    def func(x: Any) -> Any:
        small = jnp.max(jnp.abs(PARAMS["up"]))
        jax.debug.callback(lambda value: seen.append(float(value)), small)
        return x * small

    traced = jax.make_jaxpr(func)(X)
    found = Invariants(traced)
    assert len(found) == 1
    made = found.before([None])
    assert not seen
    (result,) = found.rest([X], made)
    jax.effects_barrier()
    assert len(seen) == 1
    np.testing.assert_array_equal(result, func(X))


def test_results_that_are_known_as_a_whole_are_returned():
    traced = jax.make_jaxpr(lambda x: (x, jnp.sum(PARAMS["up"]), 3.0))(X)
    found = Invariants(traced)
    same, total, three = found.rest([X], found.before([None]))
    np.testing.assert_array_equal(same, X)
    assert total == jnp.sum(PARAMS["up"])
    assert three == 3


def test_a_call_with_effects_inside_runs_once(capfd):
    @functools.partial(jax.jit, inline=False)
    def layer(x: Any) -> Any:
        jax.debug.print("layer")
        return x * jnp.max(PARAMS["up"])

    found = Invariants(jax.make_jaxpr(layer)(X))
    found.rest([X], found.before([None]))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("layer") == 1
