"""What is stored of layers in a loop, where no rule says it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep
from tests._jaxprs import equations
from tests.autocast._shared import stored_as

pytestmark = pytest.mark.core

TOKENS, WIDTH, LAYERS, HEADS = 64, 64, 3, 8


def layer(x: Any, weights: Any) -> tuple[Any, None]:
    qkv = (x @ weights["qkv"]).reshape(x.shape[0], 3, HEADS, -1)
    query, key, value = jnp.moveaxis(qkv, 1, 0)
    scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", query, key))
    mixed = jnp.einsum("hqk,khd->qhd", scores, value).reshape(x.shape)
    return x + jax.nn.gelu(mixed @ weights["up"]) @ weights["down"], None


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def shapes(tokens: int = TOKENS) -> tuple[Any, Any]:
    sizes = {"qkv": (WIDTH, 3 * WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = {
        name: jax.ShapeDtypeStruct((LAYERS, *size), jnp.float32) for name, size in sizes.items()
    }
    return params, jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32)


def handed_over(policy: str, tokens: int = TOKENS, loss: Any = loss) -> list[Any]:
    """The types of what the forward loop hands to the backward loop, of all layers."""
    gradient = jax.make_jaxpr(jax.grad(halfstep.autocast(loss, policy)))(*shapes(tokens))
    first = next(one for one in equations(gradient.jaxpr) if one.primitive.name == "scan")
    return [out.aval for out in first.outvars if out.aval.shape[:1] == (LAYERS,)]


def stacked(*args: Any, **options: Any) -> list[tuple[int, ...]]:
    """The shapes of the same, for one layer."""
    return sorted(aval.shape[1:] for aval in handed_over(*args, **options))


def test_scores_are_made_again_and_other_products_are_stored():
    # What enters the layer, three products of weights, and what is mixed by the scores.
    narrow, wide = (TOKENS, WIDTH), (TOKENS, 4 * WIDTH)
    qkv, mixed = (TOKENS, 3 * WIDTH), (HEADS, WIDTH // HEADS, TOKENS)
    assert stacked("bf16") == sorted([narrow, wide, qkv, mixed])


def test_nothing_is_stored_in_float32():
    # What enters a layer is float32 here, since the batch is, and so is what a norm reads.
    def normed(x: Any, weights: Any) -> tuple[Any, None]:
        return layer(x + jax.nn.standardize(x), weights)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(normed, x, params)[0] ** 2)

    assert {aval.dtype for aval in handed_over("bf16", loss=loss)} == {jnp.dtype(jnp.bfloat16)}


def test_a_rule_stores_them():
    scores = (HEADS, TOKENS, TOKENS)
    assert scores not in stacked("bf16")
    assert scores in stacked("bf16,store:op:dot_general=keep")


def test_products_of_narrow_weights_do_not_count_as_scores():
    # They are as large beside their factors, and as cheap.
    tokens = 4 * TOKENS
    assert (tokens, 4 * WIDTH) in stacked("bf16", tokens)
    assert (HEADS, tokens, tokens) not in stacked("bf16", tokens)


def test_products_are_not_made_again_where_that_takes_long():
    # With so many tokens nearly all FLOPs are those of the scores.
    tokens = 32 * WIDTH
    assert (HEADS, tokens, tokens) in stacked("bf16", tokens)


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_products_of_weights_are_not_made_again(policy: str):
    gradients = jax.grad(loss), jax.grad(halfstep.autocast(loss, policy))
    plain, ours = (
        sum(
            one.primitive.name == "dot_general"
            for one in equations(jax.make_jaxpr(gradient)(*shapes()).jaxpr)
        )
        for gradient in gradients
    )
    # Scores are multiplied once more in each layer, that is in the body of the loop.
    assert ours == plain + 1


def test_what_the_user_recomputes_stays_so():
    def again(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    assert stacked("bf16", loss=again) == [(TOKENS, WIDTH)]


# Layers that are written out: an island takes in the scores, and the products that read them.


def kept(func: Any, *args: Any, policy: str = "bf16") -> set[str]:
    """The shapes of all that is stored."""
    rows = halfstep.explain(func, policy)(*args).residuals
    return {str(row.type).partition("[")[2].rstrip("]") for row in rows if row.bytes}


def written_out(params: Any, x: Any) -> Any:
    for number in range(LAYERS):
        x, _ = layer(x, jax.tree.map(lambda leaf, number=number: leaf[number], params))
    return jnp.mean(x**2)


def test_layers_that_are_written_out_store_no_scores():
    square = f"{HEADS},{TOKENS},{TOKENS}"
    assert square not in kept(written_out, *shapes())
    assert square in kept(written_out, *shapes(), policy="bf16,store:op:dot_general=keep")

    def scored(params: Any, x: Any, *, returns: bool) -> Any:
        total = 0.0
        for wide, narrow in zip(params["up"], params["down"], strict=True):
            heads = (jax.nn.relu(x @ wide) @ narrow).reshape(TOKENS, HEADS, -1)
            scores = jnp.einsum("qhd,khd->hqk", heads, heads)
            x = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), heads).reshape(x.shape)
            total += jnp.sum(scores**2) if returns else 0.0
        return total + jnp.sum(x**2)

    assert square not in kept(functools.partial(scored, returns=False), *shapes())
    # Another reader than the softmax: what it makes goes out.
    assert square in kept(functools.partial(scored, returns=True), *shapes())


def test_the_two_computations_of_a_lone_layer_of_attention_may_be_merged():
    # Made again, its scores would be alive at once just as they are if they are stored.
    def alone(params: Any, x: Any, *, layers: int = 1) -> Any:
        for _ in range(layers):
            x, _ = layer(x, jax.tree.map(lambda leaf: leaf[0], params))
        return jnp.mean(x**2)

    def held_apart(func: Any, policy: str = "bf16") -> set[Any]:
        """The values that a copy of the forward pass reads in a form that XLA does not merge."""
        gradient = jax.make_jaxpr(jax.grad(halfstep.autocast(func, policy)))(*shapes())
        names = "halfstep_apart", "optimization_barrier"
        return {
            out.aval.shape
            for one in equations(gradient.jaxpr)
            if one.primitive.name in names
            for out in one.outvars
        }

    factor = (TOKENS, HEADS, WIDTH // HEADS)
    assert factor not in held_apart(alone)
    assert factor in held_apart(functools.partial(alone, layers=2))
    # A rule still says otherwise.
    assert factor in held_apart(alone, "bf16,store:op:exp=recompute")


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_gradients_are_those_of_what_is_stored(policy: str):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    params, x = jax.tree.map(
        lambda leaf: jax.random.normal(next(keys), leaf.shape) / leaf.shape[-1] ** 0.5, shapes()
    )
    exact = jax.grad(written_out)(params, x)
    for loss_of in (loss, written_out):
        errors = [
            optax.tree.norm(jax.tree.map(jnp.subtract, found, exact)) / optax.tree.norm(exact)
            for islands in (True, False)
            for found in [
                jax.grad(halfstep.autocast(loss_of, stored_as(policy, islands)))(params, x)
            ]
        ]
        # What is made again is rounded where the stored value was.
        assert errors[0] <= errors[1] + halfstep.FORMATS[policy].eps, errors


# Rules change single choices, and nothing else.


def all_kept(policy: str) -> list[str]:
    rows = halfstep.explain(written_out, policy)(*shapes()).residuals
    return sorted(str(row.type) for row in rows if row.bytes >= TOKENS * WIDTH)


def test_a_rule_changes_one_choice():
    before = all_kept("bf16")
    # The hyperbolic tangent of an activation function is float32. JAX stores its slope, too.
    gelu = [f"f32[{TOKENS},{4 * WIDTH}]"] * 2 * LAYERS
    assert all_kept("bf16,store:op:tanh=keep") == sorted([*before, *gelu])
    # What is made of it is not stored either, but made again for the product that reads it.
    without = list(before)
    for _ in range(LAYERS):
        without.remove(f"bf16[{TOKENS},{4 * WIDTH}]")
    assert all_kept("bf16,store:op:tanh=recompute") == without
    scores = [f"bf16[{HEADS},{TOKENS},{TOKENS}]"] * 2 * LAYERS
    assert all_kept("bf16,store:op:dot_general=keep") == sorted([*before, *scores])


def test_a_rule_for_a_value_within_scores():
    square = f"[{HEADS},{TOKENS},{TOKENS}]"
    kept = [text for text in all_kept("bf16,store:op:exp=keep") if text.endswith(square)]
    # What the rule keeps is float32, and what is made of it, and the scores, are stored.
    assert f"f32{square}" in kept


def counted(func: Any, names: tuple[str, ...]) -> dict[str, int]:
    """How many operations of some names the gradient of a function has."""
    found = [
        one.primitive.name for one in equations(jax.make_jaxpr(jax.grad(func))(*shapes()).jaxpr)
    ]
    return {name: found.count(name) for name in names}


@pytest.mark.parametrize("number", range(4))
def test_a_product_that_a_rule_makes_again(number: int):
    plain, ruled = (
        counted(halfstep.autocast(written_out, policy), ("dot_general",))["dot_general"]
        for policy in ("bf16", f"bf16,store:op:dot_general#{number}=recompute")
    )
    # The scores are made again in any case: they are the second product of a layer.
    assert ruled == plain + (number != 1)


@pytest.mark.parametrize("func", [loss, written_out])
def test_with_everything_stored_nothing_is_made_again(func: Any):
    names = "dot_general", "exp", "tanh", "reduce_max"
    kept = halfstep.autocast(func, "bf16,store:op:*=keep")
    assert counted(kept, names) == counted(func, names)
    assert counted(halfstep.autocast(func, "bf16"), names) != counted(func, names)


# A norm straight after an embedding.


def layer_norm(x: Any, scale: Any) -> Any:
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5) * scale


def rms_norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


LOOKUPS: dict[str, Any] = {
    "indexed": lambda table, ids: table[ids],
    "taken": lambda table, ids: jnp.take(table, ids, axis=0),
    "mapped": lambda table, ids: jax.vmap(lambda one: table[one])(ids),
    "scaled": lambda table, ids: table[ids] * WIDTH**0.5,
    "with positions": lambda table, ids: table[ids] + table[:TOKENS],
    "one-hot": lambda table, ids: jax.nn.one_hot(ids, 2 * WIDTH) @ table,
}


@pytest.mark.rows(6)
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_a_norm_after_an_embedding_keeps_no_float32(lookup: str, norm: Any, scan: bool):
    def loss(params: Any, ids: Any) -> Any:
        def block(x: Any, weights: Any) -> tuple[Any, None]:
            hidden = jax.nn.gelu(norm(x, weights["scale"]) @ weights["up"])
            return x + hidden @ weights["down"], None

        x = LOOKUPS[lookup](params["table"], ids)
        if scan:
            x, _ = jax.lax.scan(block, x, params["blocks"])
        else:
            for number in range(LAYERS):
                part = jax.tree.map(lambda leaf, number=number: leaf[number], params["blocks"])
                x, _ = block(x, part)
        return -jnp.mean(jax.nn.log_softmax(x @ params["table"].T)[..., 0])

    sizes = {"scale": (1, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    blocks = {
        name: jax.ShapeDtypeStruct((LAYERS, *size), "float32") for name, size in sizes.items()
    }
    params = {"table": jax.ShapeDtypeStruct((2 * WIDTH, WIDTH), "float32"), "blocks": blocks}
    ids = jax.ShapeDtypeStruct((TOKENS,), "int32")
    rows = halfstep.explain(loss, "bf16")(params, ids).residuals
    wide = [str(row.type) for row in rows if str(row.type).endswith(f"{TOKENS},{WIDTH}]")]
    assert not [text for text in wide if text.startswith("f32")]


# A model's logits: the gradients of their product leave it together.


def head(params: Any, x: Any) -> Any:
    return -jnp.mean(jax.nn.log_softmax(x @ params["in"] @ params["out"])[..., 0])


def head_values() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": jax.random.normal(keys[0], (WIDTH, WIDTH)) / WIDTH**0.5,
        "out": jax.random.normal(keys[1], (WIDTH, 16 * WIDTH)) / WIDTH**0.5,
    }
    return params, jax.random.normal(keys[2], (TOKENS, WIDTH))


def barriers(loss: Any, policy: str = "bf16") -> int:
    program = jax.make_jaxpr(jax.grad(halfstep.autocast(loss, policy)))(*head_values())
    return sum(
        one.primitive.name == "optimization_barrier" and len(one.outvars) == 2
        for one in equations(program.jaxpr)
    )


def test_gradients_of_logits_leave_together():
    assert barriers(head) == 1
    # Neither of the first product, which is no larger than its factor, nor in the body of a loop.
    assert barriers(lambda params, x: head({**params, "out": params["in"]}, x)) == 0
    looped = lambda params, x: jax.lax.scan(lambda c, _: (c, head(params, c)), x, length=2)[1].sum()  # noqa: E731
    assert barriers(looped) == 0


def test_gradients_of_slices_of_stacked_weights_leave_together():
    def layers(params: Any, x: Any, of: Callable[[Any, int], Any]) -> Any:
        for number in range(3):
            x = jax.nn.relu(x @ of(params["out"], number))
        return jnp.sum(x)

    def sliced(stack: Any, number: int) -> Any:
        return stack[:, number * WIDTH : (number + 1) * WIDTH]

    def of_rows(count: int, of: Callable[[Any, int], Any]) -> Callable[[Any, Any], Any]:
        return lambda params, x: layers(params, jnp.resize(x, (count, WIDTH)), of)

    # Two of three: nobody asks the first product for a second gradient, that of `x`.
    assert barriers(of_rows(2 * WIDTH, sliced)) == 2
    # Results no larger than their weights, and whole parameters, are left to XLA.
    assert barriers(of_rows(WIDTH, sliced)) == 0
    whole = of_rows(2 * WIDTH, lambda weight, number: weight)
    assert barriers(lambda params, x: whole({"out": params["in"]}, x)) == 0


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_logits_have_all_derivatives(policy: str):
    params, x = head_values()
    low = halfstep.autocast(head, policy)
    stored = halfstep.autocast(head, f"{policy},store:op:*=keep")
    ways = {
        "reverse": lambda loss: jax.grad(loss)(params, x),
        "forward": lambda loss: jax.jvp(loss, (params, x), (params, x))[1],
        "mapped": lambda loss: jax.vmap(jax.grad(loss), (None, 0))(params, jnp.stack([x, 2 * x])),
        "second": lambda loss: jax.jvp(jax.grad(loss), (params, x), (params, x))[1],
        "one": lambda loss: jax.grad(lambda x: loss(params, x))(x),
    }
    eps = float(jnp.finfo(halfstep.FORMATS[policy].dtype).eps)
    for name, way in ways.items():
        for one, two in zip(*map(jax.tree.leaves, (way(low), way(stored))), strict=True):
            atol = 8 * eps * float(jnp.max(jnp.abs(two)))
            np.testing.assert_allclose(one, two, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    "transform", [halfstep.autocast, halfstep.explain, halfstep.filter_value_and_grad]
)
def test_an_option_that_is_a_rule_now(transform: Any):
    with pytest.raises(TypeError, match=r"policy='bf16,store:op:\*=keep' stores what JAX stores"):
        transform(loss, islands=False)
