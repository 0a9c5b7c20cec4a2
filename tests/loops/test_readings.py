"""Carries of loops are state, in float32, or activations: facts of the traced program."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend import core

import halfstep
from halfstep._autocast.state import LONG
from halfstep._program import Jit, Remat, Scan, While
from halfstep._program.control_flow import structure_of
from tests._jaxprs import equations
from tests._rows import slow_unless

pytestmark = pytest.mark.core

D = 4
STATE, ACTIVATION = "float32", "bfloat16"
Body = Callable[[Any, Any, Any], Any]
"""From parameters, a carry and an input to the next carry."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A loop, and how its carries are read."""

    body: Body
    expected: tuple[str, ...]
    length: int
    init: Callable[[Any, Any], Any]
    """From parameters and data; it is of 16 bits, so that nothing is float32 by itself."""
    xs: Callable[[Any, Any], Any]
    nested: int = 0
    """How many iterations an outer loop has."""

    def run(self, wrap: Callable[..., Any] = lambda step: step) -> Callable[[Any, Any], Any]:
        def func(params: Any, data: Any) -> Any:
            @wrap
            def step(carry: Any, x: Any) -> tuple[Any, Any]:
                return self.body(params, carry, x), None

            init, xs = self.init(params, data), self.xs(params, data)
            if not self.nested:
                return lax.scan(step, init, xs)[0]
            size = self.length // self.nested
            xs = jax.tree.map(lambda x: x.reshape(self.nested, size, *x.shape[1:]), xs)
            return lax.scan(lambda carry, xs: (lax.scan(step, carry, xs)[0], None), init, xs)[0]

        return func

    def given(self) -> tuple[Any, Any]:
        """Parameters and data: one weight, some for each iteration, and inputs."""
        weights = jnp.tile(jnp.eye(D)[None] / 2, (self.length, 1, 1))
        params = {"w": jnp.eye(D) / 2, "a": jnp.full((1, D), 0.9), "stack": weights}
        inputs = jnp.ones((self.length, 2, D))
        return params, {"x": inputs, "matrices": weights, "first": jnp.ones((2, D))}


def a_product(p: Any, d: Any) -> Any:
    return d["first"] @ p["w"]


def two_products(p: Any, d: Any) -> Any:
    return d["first"] @ p["w"], (2 * d["first"]) @ p["w"]


def products(p: Any, d: Any) -> Any:
    return d["x"] @ p["w"]


def stacked(p: Any, d: Any) -> Any:
    del d
    return p["stack"]


def example(
    body: Body,
    *expected: str,
    length: int = 3,
    init: Callable[[Any, Any], Any] = a_product,
    xs: Callable[[Any, Any], Any] = products,
    nested: int = 0,
) -> Example:
    return Example(body, expected, length, init, xs, nested)


# Bodies.


def average(p: Any, h: Any, u: Any) -> Any:
    return p["a"] * h + (1 - p["a"]) * u


def leaky(p: Any, h: Any, u: Any) -> Any:
    return h + 0.1 * (jnp.tanh(h @ p["w"]) + u - h)


def residual(p: Any, h: Any, w: Any) -> Any:
    return h + jax.nn.gelu(h @ w)


def rnn(p: Any, h: Any, u: Any) -> Any:
    return jnp.tanh(h @ p["w"] + u)


def transformer(p: Any, h: Any, w: Any) -> Any:
    """Products of which no operand is a weight: they read what is made of one."""
    q, k, v = h @ w, h @ (w + w), h @ w.T
    h = h + jax.nn.softmax(q @ k.T) @ v
    mean = jnp.mean(h, -1, keepdims=True)
    return h + jax.nn.gelu((h - mean) * p["a"] @ w)


def convolution(p: Any, h: Any, u: Any) -> Any:
    kernel = p["w"][None, :3].swapaxes(0, 1)[:, :, :1]
    made = lax.conv_general_dilated(
        h[..., None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jnp.tanh(made[..., 0] + u)


def lstm(p: Any, carry: Any, u: Any) -> Any:
    c, h = carry
    gate = jax.nn.sigmoid(u + h @ p["w"])
    c = gate * c + (1 - gate) * u
    return c, gate * jnp.tanh(c)


def descent(p: Any, w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)


@jax.custom_jvp
def doubled(x: Any) -> Any:
    return x + x


@doubled.defjvp
def _doubled_jvp(primals: Any, tangents: Any) -> Any:
    return doubled(*primals), 2 * tangents[0]


@jax.custom_vjp
def halved(x: Any) -> Any:
    return x * 0.5


halved.defvjp(lambda x: (halved(x), None), lambda _, g: (g * 0.5,))


@jax.jit
def called(h: Any, u: Any) -> Any:
    return 0.9 * h + u


def inner_scan(p: Any, h: Any, u: Any) -> Any:
    return lax.scan(lambda h, _: (0.9 * h + u, None), h, None, length=2)[0]


def inner_while(p: Any, h: Any, u: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, 0.9 * c[1] + u), (0, h))[1]


def _row(h: Any) -> Any:
    return jnp.arange(h.shape[0])


# Sums and averages are state after few iterations already.
ALWAYS: Mapping[str, Body] = {
    "average": average,
    "sum": lambda p, h, u: h + u,
    "two terms": lambda p, h, u: h + u + 2 * u,
    "where": lambda p, h, u: jnp.where(u > 0, h + u, h),
    "cond": lambda p, h, u: lax.cond(u[0, 0] > 0, lambda: 0.9 * h + u, lambda: h),
    "at add": lambda p, h, u: h.at[_row(h)].add(u),
    "reshape": lambda p, h, u: (h.reshape(-1) + u.reshape(-1)).reshape(h.shape),
    "transpose": lambda p, h, u: (h.T + u.T).T,
    "minus a minus": lambda p, h, u: u - (-h),
    "maximum": lambda p, h, u: jnp.maximum(0.9 * h, u),
    "exponential": lambda p, h, u: jnp.exp(-jnp.abs(h)) + u,
    "logaddexp": jax.tree_util.Partial(lambda p, h, u: jnp.logaddexp(h, u)),
    "reduction": lambda p, h, u: h - jnp.mean(h, -1, keepdims=True) + u,
    "cumsum": lambda p, h, u: jnp.cumsum(0.1 * h, axis=-1) + u,
    "product with the input": lambda p, h, u: h * (1 + 0.001 * u),
    "jit": lambda p, h, u: called(h, u),
    "checkpoint": lambda p, h, u: jax.checkpoint(called)(h, u),
    "custom_jvp": lambda p, h, u: doubled(0.4 * h) + u,
    "custom_vjp": lambda p, h, u: halved(h) + u,
    "vmap": lambda p, h, u: jax.vmap(lambda h, u: 0.9 * h + u)(h, u),
    "inner scan": inner_scan,
    "inner while": inner_while,
    "product beside it": lambda p, h, u: 0.9 * h + u @ p["w"],
}

EXAMPLES: Mapping[str, Example] = {
    **{name: example(body, STATE) for name, body in ALWAYS.items()},
    "average, nested": example(average, STATE, length=4, nested=2),
    "average, 2048 iterations": example(average, STATE, length=2048),
    # Carries that feed each other.
    "two by arithmetic": example(
        lambda p, c, u: (0.5 * c[0] + c[1], c[0] - u), STATE, STATE, init=two_products
    ),
    "two that swap": example(lambda p, c, u: (c[1] + u, c[0]), STATE, STATE, init=two_products),
    "two by products": example(
        lambda p, c, u: (jnp.tanh(c[1] @ p["w"]), jnp.sin(c[0] @ p["w"]) + u),
        *(ACTIVATION, ACTIVATION),
        length=2048,
        init=two_products,
    ),
    "two, one way by a product": example(
        lambda p, c, u: (jnp.tanh(c[1] @ p["w"]), 0.5 * c[0] + u),
        *(ACTIVATION, ACTIVATION),
        length=2048,
        init=two_products,
    ),
    "a sum of an activation": example(
        lambda p, c, u: (c[0] + c[1], jnp.tanh(c[1] @ p["w"])), STATE, ACTIVATION, init=two_products
    ),
    # Also a path through a product: shared weights.
    "leaky RNN, 100 iterations": example(leaky, ACTIVATION, length=100),
    "leaky RNN, 127 iterations": example(leaky, ACTIVATION, length=127),
    "leaky RNN, 128 iterations": example(leaky, STATE, length=128),
    "leaky RNN, 8 x 16": example(leaky, STATE, length=128, nested=8),
    "leaky RNN, 10 x 12": example(leaky, ACTIVATION, length=120, nested=10),
    "LSTM, 127 iterations": example(lstm, ACTIVATION, ACTIVATION, length=127, init=two_products),
    "LSTM, 128 iterations": example(lstm, STATE, ACTIVATION, length=128, init=two_products),
    "a shared layer, 200 iterations": example(
        lambda p, h, _: residual(p, h, p["w"]), STATE, length=200
    ),
    # Weights of their own for each iteration.
    "residual stream": example(residual, ACTIVATION, length=200, xs=stacked),
    "residual stream, 8 x 25": example(residual, ACTIVATION, length=200, xs=stacked, nested=8),
    "residual stream, transposed weights": example(
        lambda p, h, w: residual(p, h, w.astype(h.dtype)),
        ACTIVATION,
        length=200,
        xs=lambda p, d: p["stack"].astype(jnp.bfloat16).reshape(200, D, D).transpose(0, 2, 1),
    ),
    "residual stream, sliced weights": example(
        residual,
        ACTIVATION,
        length=200,
        xs=lambda p, d: jnp.concatenate([p["stack"][:100], p["stack"][100:]]),
    ),
    "residual stream, dropped layers": example(
        lambda p, h, w: lax.cond(w[0, 0] > 0, lambda: residual(p, h, w), lambda: h),
        ACTIVATION,
        length=200,
        xs=stacked,
    ),
    "residual stream, jit": example(
        lambda p, h, w: jax.jit(functools.partial(residual, p))(h, w),
        ACTIVATION,
        length=200,
        xs=stacked,
    ),
    "residual stream, custom_jvp": example(
        lambda p, h, w: h + jax.nn.relu(doubled(h) @ w), ACTIVATION, length=200, xs=stacked
    ),
    "transformer": example(transformer, ACTIVATION, length=200, xs=stacked),
    "residual stream and a sum": example(
        lambda p, c, w: (residual(p, c[0], w), c[1] + jnp.mean(c[0] @ w)),
        *(ACTIVATION, STATE),
        length=200,
        init=lambda p, d: (a_product(p, d), jnp.sum(a_product(p, d))),
        xs=stacked,
    ),
    "computed weights, 127 iterations": example(
        residual, ACTIVATION, length=127, xs=lambda p, d: p["stack"] @ p["w"]
    ),
    "computed weights, 128 iterations": example(
        residual, STATE, length=128, xs=lambda p, d: p["stack"] @ p["w"]
    ),
    # Inputs of their own for each iteration are no weights.
    "descent, a batch for each step": example(
        descent,
        STATE,
        length=128,
        init=lambda p, d: p["w"] @ p["w"],
        xs=lambda p, d: d["x"],
    ),
    "leaky system, matrices from the data": example(
        lambda p, h, a: h + 0.001 * (h @ a - h), STATE, length=128, xs=lambda p, d: d["matrices"]
    ),
    # Only paths through products.
    "RNN, 2048 iterations": example(rnn, ACTIVATION, length=2048),
    "convolution, 2048 iterations": example(convolution, ACTIVATION, length=2048),
}


def floating_carries(equation: core.JaxprEqn) -> list[str]:
    loop = structure_of(equation.primitive.name, equation.params)
    outs = equation.outvars[: loop.carries] if isinstance(loop, Scan) else equation.outvars
    dtypes = [getattr(out.aval, "dtype", None) for out in outs]
    return [str(dtype) for dtype in dtypes if dtype and jnp.issubdtype(dtype, jnp.floating)]


def readings(func: Callable[..., Any], *args: Any) -> list[list[str]]:
    """The dtypes of carries of the first loop of a program and of all loops in its body."""
    loops = (*Scan.names, *While.names)
    found = [one for one in equations(jax.make_jaxpr(func)(*args)) if one.primitive.name in loops]
    structure = structure_of(found[0].primitive.name, found[0].params)
    assert structure is not None
    inside = [
        one
        for inner in structure.inner()
        for one in equations(inner.function)
        if one.primitive.name in loops
    ]
    return [floating_carries(one) for one in (found[0], *inside)]


def led_to(equation: Any, reached: set[int]) -> set[int]:
    """The results of an operation that depend on some values; of calls, each result by itself."""
    given = [number for number, value in enumerate(equation.invars) if id(value) in reached]
    structure = structure_of(equation.primitive.name, equation.params)
    if not given or not isinstance(structure, Remat | Jit):
        return {id(out) for out in equation.outvars} if given else set()
    inside = structure.function.jaxpr
    found = {id(inside.invars[number]) for number in given}
    for inner in inside.eqns:
        found |= led_to(inner, found)
    pairs = zip(inside.outvars, equation.outvars, strict=True)
    return {id(out) for made, out in pairs if id(made) in found}


def narrowed(jaxpr: Any, ins: set[int], outs: set[int]) -> list[str]:
    """Operations between some inputs and some outputs of a function that return 16 bits.

    A carry in float32 is no more exact than what its body makes of it on the way.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    reached = {id(jaxpr.invars[number]) for number in ins}
    needed = {id(jaxpr.outvars[number]) for number in outs}
    for equation in jaxpr.eqns:
        reached |= led_to(equation, reached)
    for equation in reversed(jaxpr.eqns):
        if any(id(out) in needed for out in equation.outvars):
            needed |= {id(value) for value in equation.invars}
    found: list[str] = []
    for equation in jaxpr.eqns:
        between = [
            number
            for number, out in enumerate(equation.outvars)
            if id(out) in needed and id(out) in reached
        ]
        if not between or not any(id(value) in reached for value in equation.invars):
            continue
        dtypes = {str(equation.outvars[number].aval.dtype) for number in between}
        found += [equation.primitive.name] if dtypes & {"bfloat16", "float16"} else []
        structure = structure_of(equation.primitive.name, equation.params)
        for inner in structure.inner() if structure else ():
            given = {
                number
                for number, operand in enumerate(inner.operands or ())
                if id(equation.invars[operand]) in reached
            }
            if not inner.is_test:
                found += narrowed(inner.function, given, set(between))
    return found


def read(found: list[list[str]], expected: tuple[str, ...]) -> bool:
    """Whether all loops carry this; carries of tangents come after those of values."""
    return all(tuple(carries[: len(expected)]) == expected for carries in found)


@pytest.mark.parametrize("name", EXAMPLES)
def test_carries(name: str):
    one = EXAMPLES[name]
    found = readings(halfstep.autocast(one.run(), "bf16"), *one.given())
    assert len(found) == 1 + (one.nested > 0) + name.startswith("inner ")
    assert read(found, one.expected), found


@pytest.mark.parametrize(
    "name", [name for name, one in EXAMPLES.items() if set(one.expected) == {STATE}]
)
def test_state_without_islands(name: str):
    """Activations are not asked about: what no island rounds is as wide as it is computed."""
    one = EXAMPLES[name]
    found = readings(halfstep.autocast(one.run(), "bf16,store:op:*=keep"), *one.given())
    assert read(found, one.expected), found


def online_softmax(p: Any, carry: Any, u: Any) -> Any:
    top, weights, total = carry
    s = u @ p["w"]
    new = jnp.maximum(top, jnp.max(s, -1, keepdims=True))
    decay, weight = jnp.exp(top - new), jnp.exp(s - new)
    weights = weights * decay + jnp.sum(weight, -1, keepdims=True)
    return new, weights, total * decay + weight @ p["w"]


WITHOUT_PRODUCTS: Mapping[str, Example] = {
    **{name: EXAMPLES[name] for name in ALWAYS},
    "online softmax": example(
        online_softmax,
        *(STATE, STATE, STATE),
        init=lambda p, d: (a_product(p, d)[:, :1], a_product(p, d)[:, :1], a_product(p, d)),
    ),
}


@pytest.mark.parametrize("wrap", [lambda step: step, jax.checkpoint], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("name", WITHOUT_PRODUCTS)
def test_nothing_on_the_way_to_itself_is_narrow(name: str, wrap: Callable[..., Any]):
    one = WITHOUT_PRODUCTS[name]
    traced = jax.make_jaxpr(halfstep.autocast(one.run(wrap), "bf16"))(*one.given())
    (loop,) = [found for found in traced.jaxpr.eqns if found.primitive.name == "scan"]
    scan = structure_of("scan", loop.params)
    assert isinstance(scan, Scan)
    assert scan.carries == len(one.expected)
    for number, expected in enumerate(one.expected):
        assert floating_carries(loop)[number] == expected
        assert narrowed(scan.body, {scan.consts + number}, {number}) == []


Transform = Callable[[Example], Callable[..., Any]]


def cast(func: Callable[..., Any]) -> Callable[..., Any]:
    return halfstep.autocast(func, "bf16")


def total(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(func(*args)))


def twice(data: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x, x]), data)


def pushed(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jax.jvp(func, args, args)


def unrolled(one: Example) -> Callable[..., Any]:
    def func(params: Any, data: Any) -> Any:
        init, xs = one.init(params, data), one.xs(params, data)
        return lax.scan(lambda c, x: (one.body(params, c, x), None), init, xs, unroll=2)[0]

    return func


def backwards(one: Example) -> Callable[..., Any]:
    def func(params: Any, data: Any) -> Any:
        init, xs = one.init(params, data), one.xs(params, data)
        return lax.scan(lambda c, x: (one.body(params, c, x), None), init, xs, reverse=True)[0]

    return func


TRANSFORMS: Mapping[str, Transform] = {
    "jit inside": lambda one: cast(jax.jit(one.run())),
    "checkpointed step": lambda one: cast(one.run(jax.checkpoint)),
    "checkpointed loop": lambda one: cast(jax.checkpoint(one.run())),
    "unrolled": lambda one: cast(unrolled(one)),
    "reverse": lambda one: cast(backwards(one)),
    "vmap inside": lambda one: cast(lambda p, d: jax.vmap(one.run(), (None, 0))(p, twice(d))),
    "vmap outside": lambda one: lambda p, d: jax.vmap(cast(one.run()), (None, 0))(p, twice(d)),
    "jvp": lambda one: pushed(cast(one.run())),
    "jvp inside": lambda one: cast(pushed(one.run())),
    "grad": lambda one: jax.grad(cast(total(one.run()))),
    "grad inside": lambda one: cast(jax.grad(total(one.run()))),
    "grad, checkpointed step": lambda one: jax.grad(cast(total(one.run(jax.checkpoint)))),
    "grad, checkpointed loop": lambda one: jax.grad(cast(total(jax.checkpoint(one.run())))),
    "grad of vmap": lambda one: jax.grad(
        cast(lambda p, d: jnp.sum(jax.vmap(total(one.run()), (None, 0))(p, twice(d))))
    ),
}
TRANSFORMED = (
    *("average", "cond", "inner scan", "custom_jvp", "two by arithmetic", "two by products"),
    *("leaky RNN, 127 iterations", "leaky RNN, 128 iterations", "LSTM, 128 iterations"),
    *("residual stream", "residual stream, transposed weights", "transformer"),
    *("computed weights, 128 iterations", "RNN, 2048 iterations"),
)
FAST = {"average", "leaky RNN, 127 iterations", "leaky RNN, 128 iterations", "residual stream"}


@pytest.mark.parametrize(
    ("name", "transform"),
    slow_unless(
        [(name, transform) for name in TRANSFORMED for transform in TRANSFORMS],
        lambda name, transform: name in FAST,
    ),
)
def test_transformations_do_not_change_the_reading(name: str, transform: str):
    one = EXAMPLES[name]
    found = readings(TRANSFORMS[transform](one), *one.given())
    assert read(found, one.expected), found


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_nested_loops_are_counted_together(transform: str):
    if transform in ("unrolled", "reverse"):
        pytest.skip("these are of a single loop")
    one = EXAMPLES["leaky RNN, 8 x 16"]
    found = readings(TRANSFORMS[transform](one), *one.given())
    assert len(found) == 2
    assert read(found, one.expected), found


def test_a_loop_that_begins_anew_is_counted_alone():
    """The outer loop does not hand its carry on: errors of 100 iterations add up, not of 800."""

    def func(params: Any, data: Any) -> Any:
        def begun(inputs: Any) -> Any:
            init = inputs[0] @ params["w"]
            return lax.scan(lambda h, u: (leaky(params, h, u), None), init, inputs)[0]

        inputs = products(params, data).reshape(8, 100, 2, D)
        return lax.scan(lambda _, inputs: (0, begun(inputs)), 0, inputs)[1]

    one = example(leaky, ACTIVATION, length=800)
    assert readings(cast(func), *one.given()) == [[], [ACTIVATION]]


def looped(one: Example) -> Callable[..., Any]:
    """The same as a `while_loop` over the inputs."""

    def func(params: Any, data: Any) -> Any:
        init, xs = one.init(params, data), one.xs(params, data)

        def body(carry: Any) -> Any:
            number, state = carry
            return number + 1, one.body(params, state, jax.tree.map(lambda x: x[number], xs))

        return lax.while_loop(lambda carry: carry[0] < one.length, body, (0, init))[1]

    return func


WHILE = {
    **dict.fromkeys(("average", "cond", "inner while", "residual stream"), (STATE,)),
    **dict.fromkeys(("leaky RNN, 100 iterations", "leaky RNN, 128 iterations"), (STATE,)),
    "RNN, 2048 iterations": (STATE,),
    "two by products": (STATE, STATE),
    "LSTM, 127 iterations": (STATE, STATE),
}


@pytest.mark.parametrize("name", WHILE)
@pytest.mark.parametrize("wrap", [cast, lambda func: pushed(cast(func))], ids=["forward", "jvp"])
def test_while_loops(name: str, wrap: Callable[..., Any]):
    one = EXAMPLES[name]
    found = readings(wrap(looped(one)), *one.given())
    assert read(found, WHILE[name]), found


@pytest.mark.parametrize("loop", ["scan", "while", "fori"])
@pytest.mark.parametrize("length", [LONG - 1, LONG])
def test_a_carry_that_is_handed_on_keeps_what_it_had(loop: str, length: int):
    def func(params: Any, data: Any) -> Any:
        # Of two shapes, to tell them apart: a product, and an argument.
        low, wide = data["first"] @ params["w"], data["first"][:1]

        def step(carry: Any) -> Any:
            low, wide, h = carry
            return low, wide, jnp.tanh(h @ params["w"] + low[:1] + wide[0, 0])

        init = low, wide, jnp.zeros((4, D))
        match loop:
            case "scan":
                return lax.scan(lambda c, _: (step(c), None), init, None, length=length)[0]
            case "while":
                return lax.while_loop(
                    lambda c: c[0] < length, lambda c: (c[0] + 1, step(c[1])), (0, init)
                )[1]
            case _:
                return lax.fori_loop(0, length, lambda _, c: step(c), init)

    given = EXAMPLES["average"].given()
    name = "while" if loop == "while" else "scan"
    traced = jax.make_jaxpr(halfstep.autocast(func, "bf16"))(*given)
    found = next(one for one in equations(traced) if one.primitive.name == name)
    held = {
        var.aval.shape: str(var.aval.dtype)
        for var in found.invars
        if hasattr(var.aval, "shape") and jnp.issubdtype(var.aval.dtype, jnp.floating)
    }
    assert held[1, D] == "float32"
    # A long scan takes it in float32, in which its gradient is summed, and its body rounds it.
    is_summed = length == LONG and loop != "while"
    assert held[2, D] == ("float32" if is_summed else "bfloat16")
    loop_of = structure_of(found.primitive.name, found.params)
    assert loop_of is not None
    body = loop_of.inner()[-1].function.jaxpr.eqns
    casts = [var for one in body if "convert" in one.primitive.name for var in one.outvars]
    assert (f"bfloat16[2,{D}]" in [str(cast.aval) for cast in casts]) == is_summed
