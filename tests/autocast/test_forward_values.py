"""How values are stored for the backward pass decides nothing about the forward pass.

A network with attention, norms before or after the residual sum and a loss, with its layers written
out or in a scan, gives the same bits with and without islands, under `jax.checkpoint` with every
preset, and with rules for stores. Random programs are in `tests/fuzz/test_forward.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep

pytestmark = pytest.mark.core

LAYERS, WIDTH, HEADS, WORDS = 2, 16, 4, 20
POLICIES = jax.checkpoint_policies
PRESETS = {
    "checkpoint": None,
    "nothing": POLICIES.nothing_saveable,
    "everything": POLICIES.everything_saveable,
    "dots": POLICIES.dots_saveable,
    "dots without batch": POLICIES.dots_with_no_batch_dims_saveable,
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "all stored": (",store:op:*=keep", {}),
    "keep products": (",store:op:dot_general=keep", {}),
    "recompute products": (",store:op:dot_general=recompute", {}),
    "encode exponentials": (",store:op:exp=e4m3", {}),
    "encode residuals": (",residuals=e4m3", {}),
}


def start() -> tuple[Any, jax.Array]:
    random = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)

    names = {"q": WIDTH, "k": WIDTH, "v": WIDTH, "o": WIDTH, "up": 4 * WIDTH}
    layers = {name: array(LAYERS, WIDTH, size) for name, size in names.items()}
    layers |= {"down": array(LAYERS, 4 * WIDTH, WIDTH), "scale": 1 + 0.1 * array(LAYERS, 1, WIDTH)}
    params = {"words": 4 * array(WORDS, WIDTH), "layers": layers, "head": array(WIDTH, WORDS)}
    return params, jnp.asarray(random.integers(0, WORDS, (3, 9)), jnp.int32)


def norm(x: Any, scale: Any) -> Any:
    centered = x - jnp.mean(x, -1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-5) * scale


def layer(p: Any, x: Any, *, post: bool) -> Any:
    batch, tokens, _ = x.shape
    heads = (batch, tokens, HEADS, WIDTH // HEADS)
    z = x if post else norm(x, p["scale"][None])
    q, k, v = ((z @ p[name]).reshape(heads) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 2.0
    mask = jnp.tril(jnp.ones((tokens, tokens), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ p["o"]
    x = norm(x, p["scale"][None]) if post else x
    z = x if post else norm(x, p["scale"][None])
    x = x + jax.nn.gelu(z @ p["up"]) @ p["down"]
    return norm(x, p["scale"][None]) if post else x


def loss(params: Any, words: Any, *, post: bool, scan: bool, preset: Any = "none") -> Any:
    one = functools.partial(layer, post=post)
    if preset != "none":
        one = jax.checkpoint(one, policy=preset)
    x = params["words"][words[:, :-1]]
    if scan:
        x, _ = jax.lax.scan(lambda x, p: (one(p, x), None), x, params["layers"])
    else:
        for number in range(LAYERS):
            x = one(jax.tree.map(lambda leaf, n=number: leaf[n], params["layers"]), x)
    scores = x @ params["head"]
    picked = jnp.take_along_axis(scores, words[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, -1) - picked), (x, scores)


@pytest.mark.parametrize("scan", [False, True], ids=["written out", "scan"])
@pytest.mark.parametrize("post", [False, True], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("compute", ["bf16", "f16"])
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.rows(1)
def test_forward_values_are_the_same_bits(compute: str, post: bool, scan: bool):
    given = start()
    func = functools.partial(loss, post=post, scan=scan)
    ways = {
        name: halfstep.autocast(func, compute + rules, **options)
        for name, (rules, options) in WAYS.items()
    }
    ways |= {
        name: halfstep.autocast(functools.partial(func, preset=preset), compute)
        for name, preset in PRESETS.items()
    }
    plain = jax.jit(halfstep.autocast(func, compute))(*given)
    # Something is rounded, or nothing could differ.
    assert not np.array_equal(plain[1][1], func(*given)[1][1])
    for name, way in ways.items():
        made = jax.jit(way)(*given)
        for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(made), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.usefixtures("standard_promotion")
def test_a_tpu_subtracts_in_the_same_dtypes():
    """On a TPU, `x - max(x)` is in 16 bits where a contraction comes later, however stored."""
    given, found = start(), set[int]()
    func = functools.partial(loss, post=True, scan=False)
    for policy in ("bf16", "bf16,store:op:*=keep"):
        for preset in ("none", *PRESETS.values()):
            low = halfstep.autocast(functools.partial(func, preset=preset), policy)
            text = jax.jit(low).trace(*given).lower(lowering_platforms=("tpu",)).as_text()
            lines = [line for line in text.splitlines() if "stablehlo.subtract" in line]
            found.add(sum("bf16" in line for line in lines))
    # Two norms and a softmax in each layer; not that of the loss.
    assert found == {3 * LAYERS}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("compute", ["bf16", "f16"])
def test_a_step_that_is_recomputed_makes_what_state_is_computed_with_as_exactly(compute: str):
    """A buffer of all steps is state, and a step's arithmetic makes what is written into it."""

    def loss(wrap: Any, params: Any, x: Any) -> Any:
        def step(h: Any, u: Any) -> Any:
            drive = u @ params["w"] + 1.0
            return 0.9 * h + 0.1 * jnp.tanh(h @ params["v"] + drive)

        def body(i: Any, carry: Any) -> Any:
            h = wrap(step)(carry[0], x[i])
            return h, carry[1].at[i].set(h)

        h, rows = jax.lax.fori_loop(0, 12, body, (jnp.zeros_like(x[0]), jnp.zeros_like(x)))
        return jnp.mean((h @ params["v"]) ** 2), rows

    keys = jax.random.split(jax.random.key(0), 3)
    params = {name: jax.random.normal(key, (8, 8)) for name, key in zip("vw", keys, strict=False)}
    x = jnp.abs(jax.random.normal(keys[2], (12, 3, 8)))
    plain, *others = (
        halfstep.autocast(functools.partial(loss, wrap), compute)(params, x)
        for wrap in (
            lambda step: step,
            jax.checkpoint,
            functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
        )
    )
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, plain, other)
