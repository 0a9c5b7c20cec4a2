"""What layers that are written out repeat is one function, and only that."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad

import halfstep
from halfstep._autocast import run
from halfstep._autocast.again import replay, signatures
from halfstep._program import Finder
from tests._jaxprs import contractions, equations

pytestmark = pytest.mark.core

LAYERS = 4


def recomputed(func: Callable[..., Any], *args: Any) -> list[Any]:
    """The functions that are recomputed for a derivative, in order."""
    return in_trace(lambda *args: jax.jvp(func, args, args), *args)


def in_trace(func: Callable[..., Any], *args: Any) -> list[Any]:
    traced = jax.make_jaxpr(func)(*args)
    found = []
    for equation in equations(traced):
        if equation.primitive.name in ("checkpoint", "remat", "remat2"):
            found.append(equation.params["jaxpr"])
        # The tangents of an island are one operation. So are those of layers that are shared.
        elif isinstance(function := equation.params.get("function"), replay.Recomputed):
            found.append(function)
    return found


def distinct(functions: list[Any]) -> int:
    return len({id(function) for function in functions})


def stacked(layer: Callable[[int, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def loss(weights: Any, x: Any) -> Any:
        for number in range(LAYERS):
            x = layer(number, weights[number], x)
        return jnp.sum(x)

    return loss


@pytest.fixture
def given(getkey) -> tuple[Any, Any]:
    weights = jax.random.normal(getkey(), (LAYERS, 8, 8)) / 8**0.5
    return weights, jax.random.normal(getkey(), (4, 8))


def softmax_layer(number: int, weight: Any, x: Any) -> Any:
    return jax.nn.softmax(x @ weight)


def test_layers_share_their_islands(given):
    loss = halfstep.autocast(stacked(softmax_layer), "bf16")
    islands = recomputed(loss, *given)
    # The last softmax is one island with the sum.
    assert len(islands) == LAYERS
    assert distinct(islands) == 2
    # Also what is derived of them.
    backward = in_trace(jax.grad(loss), *given)
    assert len(backward) >= LAYERS
    assert distinct(backward) == 2


def scaled_layer(number: int, weight: Any, x: Any) -> Any:
    return jnp.exp(x @ weight) * (0.125 * (number + 1))


def over_another_axis(number: int, weight: Any, x: Any) -> Any:
    return jax.nn.softmax(x @ weight, axis=number % 2)


def in_its_own_scope(number: int, weight: Any, x: Any) -> Any:
    with jax.named_scope(f"layer_{number}"):
        return jax.nn.softmax(x @ weight)


def on_another_line(number: int, weight: Any, x: Any) -> Any:
    if number % 2:
        return jnp.tanh(x @ weight)
    return jnp.tanh(x @ weight)


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("layer", "count"),
    [(scaled_layer, 4), (over_another_axis, 3), (on_another_line, 3)],
)
def test_what_differs_is_not_shared(layer, count: int, given, monkeypatch):
    def found() -> Any:
        return jax.jit(jax.value_and_grad(halfstep.autocast(stacked(layer), "bf16")))(*given)

    islands = recomputed(halfstep.autocast(stacked(layer), "bf16"), *given)
    assert len(islands) == LAYERS
    assert distinct(islands) == count
    shared = found()
    monkeypatch.setattr(signatures.Signatures, "region", lambda *_: object())
    jax.tree.map(np.testing.assert_array_equal, shared, found())


def attention_layer(number: int, weight: Any, x: Any) -> Any:
    mixed = jax.nn.softmax(x @ weight @ x.T) @ x
    return x + jax.nn.gelu(mixed @ weight)


LAYER_KINDS = (softmax_layer, attention_layer, in_its_own_scope)


def count_steps(layer: Callable[..., Any], layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many operations are rewritten for a gradient of a number of layers."""
    steps: list[int] = []
    step = run.Environment.step

    def counted(env: Any, index: int) -> None:
        steps.append(index)
        step(env, index)

    def loss(weights: Any, x: Any) -> Any:
        for number in range(layers):
            x = layer(number, weights[number], x)
        return jnp.sum(x)

    given = [jnp.ones((8, 8))] * layers, jnp.ones((4, 8))
    with monkeypatch.context() as patch:
        patch.setattr(run.Environment, "step", counted)
        jax.make_jaxpr(jax.grad(halfstep.autocast(loss, "bf16")))(*given)
    return len(steps)


@pytest.mark.parametrize("layer", [softmax_layer, in_its_own_scope])
def test_more_layers_are_not_more_work(layer, monkeypatch):
    assert count_steps(layer, 6, monkeypatch) == count_steps(layer, 12, monkeypatch)


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all operations by themselves from now on."""
    monkeypatch.setattr(run, "with_repeats", lambda plan, units, signatures, **_options: units)


TRANSFORMED = {
    "grad": jax.grad,
    "grad of jit": lambda loss: jax.grad(jax.jit(loss)),
    "jit of grad": lambda loss: jax.jit(jax.grad(loss)),
    "jvp": lambda loss: lambda *args: jax.jvp(loss, args, args),
    "linearize": lambda loss: lambda *args: jax.linearize(loss, *args)[1](*args),
    "vmap of grad": lambda loss: jax.vmap(jax.grad(loss), (None, 0)),
    "grad of vmap": lambda loss: jax.grad(
        lambda weights, xs: jnp.sum(jax.vmap(loss, (None, 0))(weights, xs))
    ),
    "checkpoint": lambda loss: jax.grad(jax.checkpoint(loss)),
    "forward over reverse": lambda loss: lambda *args: jax.jvp(jax.grad(loss), args, args),
    "reverse over reverse": lambda loss: jax.grad(
        lambda *args: jnp.sum(jax.grad(loss)(*args) ** 2)
    ),
}


@pytest.mark.rows(2)
@pytest.mark.parametrize("layer", LAYER_KINDS)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_results_are_those_of_layers_by_themselves(name: str, layer, given, monkeypatch):
    """Bit by bit, where the program is compiled and where it is not.

    But `vmap` of a derivative puts the mapped axis of tangents first, and sums over another axis
    are rounded differently. Both are compared with float32.
    """
    weights, x = given
    x = jnp.stack([x, 2 * x]) if "vmap" in name else x

    def found() -> Any:
        return TRANSFORMED[name](halfstep.autocast(stacked(layer), "bf16"))(weights, x)

    shared = found()
    apart(monkeypatch)
    if name != "grad of vmap":
        jax.tree.map(np.testing.assert_array_equal, shared, found())
        return
    exact = TRANSFORMED[name](stacked(layer))(weights, x)
    far, near = (np.linalg.norm(made - exact) for made in (shared, found()))
    assert far <= 2 * near


@pytest.mark.rows(1)
@pytest.mark.parametrize("policy", ["bf16", "f16", "f8"])
def test_a_value_that_all_layers_read_has_its_gradient_added_up_in_one_order(
    policy: str, given, monkeypatch
):
    def loss(weights: Any, context: Any) -> Any:
        context = jnp.tanh(context @ weights[0])
        x = context
        for weight in weights:
            keys, values = context @ weight, (2 * context) @ weight
            x = x + jax.nn.softmax(x @ keys.T) @ values
        return jnp.sum(x) + jnp.sum(context**2)

    def program() -> str:
        return jax.jit(jax.grad(halfstep.autocast(loss, policy))).lower(*given).as_text()

    def found() -> Any:
        return jax.jit(jax.grad(halfstep.autocast(loss, policy)))(*given)

    shared, text = found(), program()
    apart(monkeypatch)
    np.testing.assert_array_equal(shared, found())
    assert sorted(operations(text)) == sorted(operations(program()))


def operations(text: str) -> list[str]:
    """The operations of a program, without the names of their values."""
    return [re.sub(r"%[\w#]+(:\d+)?", "", line).strip() for line in text.splitlines()]


def test_derivatives_that_mix_values_and_tangents(given, monkeypatch):
    """The derivative of an operation may be a call that returns both."""
    called = jax.jit(lambda x: jnp.sin(x) * x)
    operation = Primitive("of_the_user")
    operation.def_impl(called)
    operation.def_abstract_eval(lambda x: x)
    ad.primitive_jvps[operation] = lambda primals, tangents: jax.jvp(called, primals, tangents)

    def layer(number: int, weight: Any, x: Any) -> Any:
        return jnp.tanh(operation.bind(x @ weight) @ weight)

    def found() -> Any:
        return jax.grad(halfstep.autocast(stacked(layer), "bf16"))(*given)

    split: list[bool] = []
    is_split = replay._is_split
    with monkeypatch.context() as patch:
        patch.setattr(replay, "_is_split", lambda *args: split.append(is_split(*args)) or split[-1])
        shared = found()
    assert not all(split)
    apart(monkeypatch)
    np.testing.assert_array_equal(shared, found())


def test_layers_that_return_something_without_a_derivative(given, monkeypatch):
    weights, x = given

    def loss(weights: Any, x: Any, counts: Any) -> Any:
        totals = []
        for weight in weights:
            x = jax.nn.softmax(x @ weight)
            # A scalar tangent of zero is a number that is written into the program.
            totals.append(jnp.exp(jnp.sum(counts)))
        return jnp.sum(x) * sum(totals)

    def found() -> Any:
        counts = jnp.ones(3) / 8
        return jax.grad(halfstep.autocast(loss, "bf16,store:op:*=keep"))(list(weights), x, counts)

    shared = found()
    apart(monkeypatch)
    jax.tree.map(np.testing.assert_array_equal, shared, found())


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_layers_on_a_mesh(kind: str, given, monkeypatch):
    weights, x = given
    axis_type = jax.sharding.AxisType.Auto if kind == "auto" else jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((1,), ("data",), axis_types=(axis_type,))
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))

    def found() -> Any:
        with jax.set_mesh(mesh):
            return jax.jit(jax.grad(halfstep.autocast(stacked(softmax_layer))))(weights, x)

    shared = found()
    apart(monkeypatch)
    np.testing.assert_array_equal(shared, found())


def test_layers_in_a_shard_map(given, monkeypatch):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(weights: Any, x: Any) -> Any:
        return jax.lax.pmean(halfstep.autocast(stacked(attention_layer))(weights, x), "data")

    def found() -> Any:
        specs = (jax.P(), jax.P("data"))
        mapped = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=jax.P())
        return jax.jit(jax.grad(mapped))(*given)

    shared = found()
    apart(monkeypatch)
    np.testing.assert_array_equal(shared, found())


def test_layers_with_a_symbolic_batch(given):
    weights, x = given
    (batch,) = jax.export.symbolic_shape("batch")
    loss = jax.jit(jax.grad(halfstep.autocast(stacked(softmax_layer))))
    exported = jax.export.export(loss)(weights, jax.ShapeDtypeStruct((batch, 8), x.dtype))
    np.testing.assert_array_equal(exported.call(weights, x), loss(weights, x))


def test_every_operation_keeps_its_line(given, monkeypatch):
    def lines() -> list[tuple[str, str]]:
        traced = jax.make_jaxpr(jax.grad(halfstep.autocast(stacked(attention_layer))))(*given)
        finder = Finder()
        return sorted(
            (equation.primitive.name, finder.find(equation.source_info.traceback).short)
            for equation in equations(traced)
            if equation.primitive.name in ("dot_general", "exp", "tanh", "transpose")
        )

    shared = lines()
    assert {line.partition(":")[0] for _, line in shared} == {"test_repeats.py"}
    apart(monkeypatch)
    assert shared == lines()


def test_no_value_outlives_its_trace(given):
    with jax.checking_leaks():
        jax.jit(jax.grad(halfstep.autocast(stacked(attention_layer)))).lower(*given)


def test_layers_share_their_islands_and_keep_their_scopes(given):
    loss = halfstep.autocast(stacked(in_its_own_scope), "bf16")
    assert distinct(recomputed(loss, *given)) == 2
    text = jax.jit(jax.grad(loss)).lower(*given).as_text(debug_info=True)
    for number in range(LAYERS):
        found = {
            name
            for name in ("dot_general", "exp", "reduce_max")
            if re.search(rf"layer_{number}\)?/[^\"]*{name}\b", text)
        }
        assert found == {"dot_general", "exp", "reduce_max"}


def test_a_sum_of_operands_in_another_order_is_not_shared(given):
    def layer(number: int, weight: Any, x: Any) -> Any:
        product = x @ weight
        a, b = jnp.exp(product), jnp.sin(product)
        pair = (a, b) if number % 2 else (b, a)
        return jnp.subtract(*pair)

    islands = recomputed(halfstep.autocast(stacked(layer), "bf16"), *given)
    assert distinct(islands) == 3


def test_calls_that_the_user_recomputes_are_shared(given):
    layer = jax.checkpoint(lambda weight, x: jax.nn.softmax(x @ weight))

    def of_product(number: int, weight: Any, x: Any) -> Any:
        return layer(weight, x @ weight if number % 2 else jnp.sin(x))

    for outer, count in ((lambda number, weight, x: layer(weight, x), 3), (of_product, 4)):
        loss = halfstep.autocast(stacked(outer), "bf16")
        calls = [jaxpr for jaxpr in recomputed(loss, *given) if "dot_general" in str(jaxpr)]
        assert len(calls) == LAYERS
        # The first reads an argument in float32. The last one's softmax is part of the loss, and is
        # not approximated on TPUs. All between are one.
        assert distinct(calls) == count


def test_what_is_recomputed_can_be_kept_as_written(given):
    layer = jax.checkpoint(lambda weight, x: jax.nn.softmax(x @ weight))

    def kept(number: int, weight: Any, x: Any) -> Any:
        with halfstep.keep_precision():
            return layer(weight, x)

    low = halfstep.autocast(stacked(kept), "bf16")
    assert set(contractions(low, *given)) == {"float32"}
