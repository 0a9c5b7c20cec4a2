"""Islands: what is stored for the backward pass, and what is recomputed."""

import re
from collections import Counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import halfstep
from halfstep._autocast.again.recompute import _by_bits
from halfstep._autocast.again.regions import Region, schedule
from halfstep._autocast.kinds import Kind
from halfstep._autocast.planning import plan
from halfstep._autocast.plans import Settings
from halfstep._program import spelled
from halfstep._program.graph import graph_of
from tests._jaxprs import contractions, equations
from tests.autocast._shared import stored_as
from tests.models.vit import ViT, loss

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]
BF16 = np.dtype(jnp.bfloat16)
BATCH, TOKENS, WIDTH = 4, 16, 32


@pytest.fixture(scope="module")
def vit() -> tuple[Any, Any, Any]:
    model = ViT(image=16, width=WIDTH, hidden=64, heads=4, blocks=1, key=jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (BATCH, 16, 16, 3))
    return model, images, jnp.arange(BATCH)


def stored(func: Any, *args: Any) -> list[Any]:
    """What is kept for the backward pass, beside the arguments themselves."""
    params, static = eqx.partition(args[0], eqx.is_inexact_array)

    def kept(params: Any, *rest: Any) -> Any:
        return jax.vjp(lambda p: func(eqx.combine(p, static), *rest), params)[1]

    traced = jax.make_jaxpr(kept)(params, *args[1:]).jaxpr
    return [var.aval for var in traced.outvars if var not in traced.invars]


def activations(arrays: list[Any], dtype: Any) -> int:
    """Elements of activations of a dtype: of arrays at least as large as one layer's."""
    large = BATCH * TOKENS * WIDTH
    return sum(x.size for x in arrays if x.dtype == dtype and x.size >= large)


def test_no_float32_activation_is_stored(vit: tuple[Any, Any, Any]):
    low = stored(halfstep.autocast(loss, "bf16"), *vit)
    without = stored(halfstep.autocast(loss, "bf16,store:op:*=keep"), *vit)
    full = stored(loss, *vit)
    assert activations(low, jnp.float32) == 0
    assert activations(low, jnp.bfloat16) > 0
    assert activations(without, jnp.float32) > 0
    assert activations(full, jnp.float32) > activations(low, jnp.bfloat16)


def test_no_contraction_is_computed_twice(vit: tuple[Any, Any, Any]):
    def gradient(func: Any) -> Any:
        params, static = eqx.partition(vit[0], eqx.is_inexact_array)
        return lambda p: jax.grad(lambda p: func(eqx.combine(p, static), *vit[1:]))(p), params

    full, params = gradient(loss)
    low, _ = gradient(halfstep.autocast(loss, "bf16"))
    assert Counter(contractions(low, params)) == {"bfloat16": len(contractions(full, params))}


def test_gradients_are_as_close_as_by_hand(vit: tuple[Any, Any, Any]):
    params, static = eqx.partition(vit[0], eqx.is_inexact_array)

    def gradient(func: Any) -> Any:
        return jax.jit(jax.grad(lambda p: func(eqx.combine(p, static), *vit[1:])))(params)

    exact = gradient(loss)

    def error(func: Any) -> float:
        pairs = zip(jax.tree.leaves(gradient(func)), jax.tree.leaves(exact), strict=True)
        off = sum(float(jnp.sum((a - b) ** 2)) for a, b in pairs)
        return (off / sum(float(jnp.sum(b**2)) for b in jax.tree.leaves(exact))) ** 0.5

    def by_hand(model: Any, images: Any, labels: Any) -> Any:
        return loss(*halfstep.cast_to_bfloat16((model, images)), labels)

    assert error(halfstep.autocast(loss, "bf16")) <= error(by_hand)


def islands_of(func: Any, *args: Any, first: Kind = Kind.LOW) -> list[Region]:
    graph = graph_of(jax.make_jaxpr(func)(*args))
    made = plan(graph, [first] * len(graph.inputs), Settings(BF16))
    units = schedule(made, [Kind.WIDE] * len(graph.outputs))
    flat = [i for unit in units for i in (unit.nodes if isinstance(unit, Region) else (unit,))]
    assert sorted(flat) == list(range(len(graph.nodes))), "everything runs, once"
    ready = {*graph.inputs, *(number for number, _ in graph.constants)}
    for unit in units:
        members = unit.nodes if isinstance(unit, Region) else (unit,)
        if isinstance(unit, Region):
            assert set(unit.inputs) <= ready
        for index in members:
            assert {o for o in graph.nodes[index].ins if isinstance(o, int)} <= ready
            ready |= set(graph.nodes[index].outs)
    return [unit for unit in units if isinstance(unit, Region)]


X = jnp.ones((8, 8))


def test_a_softmax_is_one_island():
    (island,) = islands_of(lambda x: jax.nn.softmax(x @ x) @ x, X)
    ((_, dtype),) = island.outputs
    assert dtype == BF16
    assert {dtype for _, dtype in island.reads} == {BF16}


def wide(func: Any, *args: Any) -> list[tuple[int, ...]]:
    """The shapes of what is kept in float32 for the backward pass."""
    return [aval.shape for aval in stored(func, *args) if aval.dtype == jnp.float32]


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_what_is_made_of_a_reduced_value_is_recomputed_too(policy: str):
    def func(x: Any) -> Any:
        return jnp.log(jnp.sum(jnp.exp(x @ x), axis=-1))

    assert wide(halfstep.autocast(func, policy), X) == []
    assert (8,) in wide(halfstep.autocast(func, f"{policy},store:op:*=keep"), X)


@pytest.mark.parametrize("policy", ["bf16", "f16"])
@pytest.mark.parametrize(
    "func",
    [
        jnp.exp,
        # Made of what has been made of low values: bfloat16 may hold it, and float16 may not.
        lambda w: jnp.tanh(jnp.exp(w)),
        # And here both may.
        lambda w: jnp.exp(jnp.tanh(w)),
    ],
    ids=["exp", "tanh of exp", "exp of tanh"],
)
def test_float32_of_a_parameter_that_is_stored_low_is_recomputed(func: Any, policy: str):
    w = jnp.ones((16, 8), halfstep.FORMATS[policy].dtype)

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(func(w) @ x)

    assert wide(halfstep.autocast(loss, policy), w, X) == []
    assert (16, 8) in wide(halfstep.autocast(loss, f"{policy},store:op:*=keep"), w, X)


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_float32_of_float32_before_the_first_contraction_stays_as_it_is(policy: str):
    def func(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.tanh(jnp.sin(x)) @ w)

    x = jnp.linspace(-2, 2, 128).reshape(16, 8)
    gradient = jax.grad(halfstep.autocast(func, policy, params=1))
    exact = (1 - jnp.tanh(jnp.sin(x)) ** 2) * jnp.cos(x)
    single = halfstep.FORMATS["f32"].eps
    np.testing.assert_allclose(gradient(x, jnp.eye(8)), exact, rtol=8 * single, atol=8 * single)
    made = Counter(e.primitive.name for e in equations(jax.make_jaxpr(gradient)(x, jnp.eye(8))))
    assert (made["tanh"], made["sin"]) == (1, 1), "and it is not made again"


def test_contractions_part_islands():
    assert len(islands_of(lambda x: jnp.exp(jnp.exp(x @ x) @ x), X)) == 2


def test_what_lies_between_two_members_belongs_to_them():
    def func(x: Any) -> Any:
        y = jnp.exp(x @ x)
        # By way of a boolean, which is not float32.
        return jnp.where(y > 1, jnp.log(y), y)

    assert len(islands_of(func, X)) == 1


def test_two_strands_are_two_islands():
    def func(x: Any) -> Any:
        return jnp.exp(x @ x) @ x, jnp.tanh(x @ x.T) @ x

    assert len(islands_of(func, X)) == 2


def test_a_loss_is_not_rounded_between_islands():
    def func(x: Any) -> Any:
        early = jnp.mean(jnp.exp(x @ x))
        return early + jnp.mean(jnp.exp((x @ x) @ x))

    exact = jax.jit(lambda x: func(x))
    got = halfstep.autocast(func, "bf16")(jnp.full((8, 8), 0.125))
    want = exact(jnp.full((8, 8), 0.125))
    # All products are exact in bfloat16; the means are float32's, wherever they are added.
    assert got == want


def test_an_effect_is_in_no_island(capsys: pytest.CaptureFixture[str]):
    def func(x: Any) -> Any:
        y = jnp.exp(x @ x)
        jax.debug.print("seen {}", y[0, 0])
        return jnp.sum(jnp.log(y))

    jax.grad(halfstep.autocast(func, "bf16"))(X)
    jax.effects_barrier()
    assert capsys.readouterr().out.count("seen") == 1


def test_without_islands_nothing_is_computed_again():
    def func(x: Any) -> Any:
        return jnp.sum(jax.nn.softmax(x @ x))

    def names(islands: bool) -> set[str]:
        low = halfstep.autocast(func, stored_as("bf16", islands))
        return {spelled(equation)[0].name for equation in equations(jax.make_jaxpr(low)(X))}

    assert names(True) - names(False) <= {"checkpoint", "remat", "remat2"}
    assert names(True) != names(False)


def test_the_same_dropout_forward_and_backward():
    key = jax.random.key(3)

    def func(w: Any, x: Any) -> Any:
        hidden = jnp.exp(x @ w)
        return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), hidden, 0.0))

    w, x = jnp.zeros((4, 4)), jnp.eye(4)
    grads = jax.grad(halfstep.autocast(func, "bf16"))(w, x)
    # exp(0) = 1: the gradient is the mask itself.
    assert (grads == jax.random.bernoulli(key, 0.5, (4, 4))).all()


def test_the_difference_from_the_maximum_is_not_stored():
    def func(x: Any) -> Any:
        scores = x @ x
        away = scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
        return jnp.log(jnp.sum(jnp.exp(away), axis=-1)), away[:, 0]

    graph = graph_of(jax.make_jaxpr(func)(X))
    made = plan(graph, [Kind.LOW], Settings(BF16))
    units = schedule(made, [Kind.WIDE] * 2)
    (island,) = (unit for unit in units if isinstance(unit, Region))
    (sub,) = (index for index, node in enumerate(graph.nodes) if node.name == "sub")
    assert sub in island.nodes
    assert sub not in units
    sizes = sorted(graph.avals[number].size for number in island.inputs)
    assert sizes == [8, 64]


def test_what_is_spread_and_read_elsewhere_too_is_spread_again():
    def func(x: Any) -> Any:
        spread = jnp.broadcast_to((x @ x)[:, :1], (8, 8))
        return jnp.log(jnp.sum(jnp.exp(spread), axis=-1)), spread

    graph = graph_of(jax.make_jaxpr(func)(X))
    made = plan(graph, [Kind.LOW], Settings(BF16))
    units = schedule(made, [Kind.WIDE] * 2)
    (island,) = (unit for unit in units if isinstance(unit, Region))
    (spread,) = (i for i, node in enumerate(graph.nodes) if node.name == "broadcast_in_dim")
    assert spread in island.nodes
    assert spread in units
    assert [graph.avals[number].size for number in island.inputs] == [8]


def barriers(func: Any, platform: str) -> int:
    """How often XLA is kept from merging values, in a gradient lowered for a platform."""
    lowered = jax.export.export(jax.jit(jax.grad(func)), platforms=[platform])(X)
    return lowered.mlir_module().count("stablehlo.optimization_barrier")


def test_what_comes_back_is_barred_but_on_tpu():
    low = halfstep.autocast(lambda x: jnp.sum(jnp.tanh(x @ x) @ x), "bf16")
    assert barriers(low, "tpu") == 1
    assert barriers(low, "cuda") == 2


def test_saved_values_pass_no_barrier_on_gpus():
    low = halfstep.autocast(lambda x: jnp.sum(jnp.tanh(x @ x) @ x), "bf16")

    def barred(platform: str) -> list[str]:
        lowered = jax.export.export(jax.jit(jax.grad(low)), platforms=[platform])(X)
        return re.findall(r"stablehlo.optimization_barrier .* : (\S+)", lowered.mlir_module())

    saved = "tensor<8x8xbf16>"
    assert barred("tpu") == [saved]
    # What comes back is of the same type.
    assert sorted(barred("cuda")) == [saved, "tensor<ui16>"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn])
def test_values_that_are_held_apart_keep_all_their_bits(dtype: Any):
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[np.dtype(dtype).itemsize]
    top = np.iinfo(unsigned).max
    bits = np.linspace(0, top, 2**16).astype(unsigned)
    values = jax.lax.bitcast_convert_type(jnp.asarray(bits), dtype)
    made = jax.lax.bitcast_convert_type(jax.jit(_by_bits)(values), unsigned)
    np.testing.assert_array_equal(made, bits)


@pytest.mark.parametrize(("func", "xors"), [(jnp.tanh, 1), (jax.nn.softmax, 0), (jnp.abs, 0)])
def test_activation_functions_are_computed_twice_where_the_user_recomputes(func: Any, xors: int):
    def layer(x: Any) -> Any:
        return func(x @ x) @ x

    def program(platform: str) -> str:
        low = halfstep.autocast(lambda x: jnp.sum(jax.checkpoint(layer)(x) @ x), "bf16")
        return jax.export.export(jax.jit(jax.grad(low)), platforms=[platform])(X).mlir_module()

    assert program("cuda").count("stablehlo.xor") == xors
    assert "stablehlo.xor" not in program("tpu")


def test_nothing_is_barred_after_the_last_contraction():
    low = halfstep.autocast(lambda x: jnp.sum(jnp.tanh(x @ x)), "bf16")
    assert barriers(low, "cuda") == barriers(low, "tpu") == 0


def test_a_contraction_in_float32_is_one_too():
    def func(x: Any) -> Any:
        return jnp.sum(jnp.dot(jnp.tanh(x @ x), x, precision="highest"))

    assert barriers(halfstep.autocast(func, "bf16"), "tpu") == 1


def test_nothing_is_barred_in_a_loop():
    def func(x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda c, _: (jnp.tanh(c @ x) @ x, None), x, length=3)[0])

    low = halfstep.autocast(func, "bf16")
    assert barriers(low, "cuda") == barriers(low, "tpu") == 0
    inner = jax.make_jaxpr(jax.grad(low))(X)
    assert {"checkpoint", "remat", "remat2"} & {spelled(eqn)[0].name for eqn in equations(inner)}


def test_forward_mode_agrees_with_reverse_mode():
    key = jax.random.key(0)
    x, tangent = jax.random.normal(key, (2, 8, 8)) / 8

    def func(x: Any) -> Any:
        return jnp.sum(jnp.square(jax.nn.softmax(x @ x) @ x))

    low = halfstep.autocast(func, "bf16")
    _, pushed = jax.jit(lambda x, t: jax.jvp(low, (x,), (t,)))(x, tangent)
    pulled = jnp.sum(jax.jit(jax.grad(low))(x) * tangent)
    # Both round each of a handful of intermediate values once, of sums over 64 elements of either
    # sign: compared with the sum of their sizes.
    size = jnp.sum(jnp.abs(jax.grad(func)(x) * tangent))
    assert abs(pushed - pulled) <= 8 * halfstep.FORMATS["bf16"].eps * size
    _, curved = jax.jit(lambda x, t: jax.jvp(jax.grad(low), (x,), (t,)))(x, tangent)
    assert jnp.isfinite(curved).all()


def test_numbers_that_are_not_differentiated_pass_through():
    index, keep = jnp.arange(8), jnp.arange(8) > 2

    def func(x: Any) -> Any:
        scores = jnp.where(keep, jnp.exp(x @ x)[index], 0.0)
        return jnp.sum((scores / jnp.sum(scores)) @ x)

    grads = jax.grad(halfstep.autocast(func, "bf16"))(X / 8)
    assert jnp.isfinite(grads).all()


def exponentials(func: Any) -> int:
    jaxpr = jax.make_jaxpr(jax.grad(func))(X)
    return sum(equation.primitive.name == "exp" for equation in equations(jaxpr))


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_what_the_user_saves_by_name_is_saved(where: str):
    def block(x: Any) -> Any:
        kept = checkpoint_name(jnp.exp(x @ x), "kept")
        return jnp.tanh(jnp.log1p(kept)) @ x

    policy = jax.checkpoint_policies.save_only_these_names("kept")

    def func(x: Any) -> Any:
        inner = jax.checkpoint(block, policy=policy) if where == "inside" else block
        return jnp.sum(jnp.square(inner(x)))

    low = halfstep.autocast(func, "bf16")
    if where == "outside":
        low = jax.checkpoint(low, policy=policy)
    pullback = jax.vjp(low, X / 8)[1]
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == X.shape]
    value = jnp.exp((X / 8) @ (X / 8))
    assert any(jnp.allclose(leaf.astype(jnp.float32), value, rtol=1 / 64) for leaf in kept)
    bare = jax.checkpoint(func, policy=policy) if where == "outside" else func
    assert exponentials(low) == exponentials(bare), "and it is not made again"


@pytest.mark.parametrize("policy", ["dots_saveable", "nothing_saveable", "everything_saveable"])
def test_islands_within_what_the_user_computes_again(policy: str):
    def block(x: Any) -> Any:
        return jax.nn.softmax(x @ x) @ x

    def func(x: Any, block: Any) -> Any:
        return jnp.sum(jnp.square(jax.lax.scan(lambda c, _: (block(c), None), x, length=2)[0]))

    again = jax.checkpoint(block, policy=getattr(jax.checkpoint_policies, policy))
    x = jax.random.normal(jax.random.key(0), (8, 8)) / 8
    got = jax.jit(jax.grad(halfstep.autocast(lambda x: func(x, again), "bf16")))(x)
    want = jax.jit(jax.grad(halfstep.autocast(lambda x: func(x, block), "bf16")))(x)
    # The same operations, but for one rounding of each softmax, in two turns, there and back.
    off = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    assert off <= 4 * halfstep.FORMATS["bf16"].eps


def test_a_result_of_an_island_that_is_not_differentiated_has_no_tangent():
    """A `while` loop takes it, which has no derivative in reverse."""

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ params
        weights = jax.nn.softmax(h) * jnp.tanh(h)

        def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return state[0] + 1, 0.5 * state[1] + 1

        start = jnp.int32(0), lax.stop_gradient(weights)
        _, made = lax.while_loop(lambda state: state[0] < 3, step, start)
        return jnp.sum(made) + jnp.sum(weights)

    w, x = jnp.ones((5, 5)), jnp.linspace(0, 1, 20).reshape(4, 5)
    found = jax.grad(halfstep.autocast(loss, "bf16"))(w, x)
    exact = jax.grad(loss)(w, x)
    np.testing.assert_allclose(found, exact, atol=4 * 2.0**-8 * float(jnp.max(jnp.abs(exact))))
