"""Programs with a loop, each written once, and the spellings of their loops.

A program is a step, a carry to begin with and inputs for each iteration. Its products go through an
object, so that the same text is evaluated plainly, by `autocast` and as an expert casts by hand.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Arrays = Mapping[str, Any]
Step = Callable[[Any, Any], tuple[Any, Any]]


class Products:
    """Matrix products as they are written."""

    def mm(self, left: Any, right: Any) -> Any:
        return left @ right

    def einsum(self, equation: str, left: Any, right: Any) -> Any:
        return jnp.einsum(equation, left, right)


class ByHand(Products):
    """Matrix products as an expert casts them; everything else stays in float32."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype

    def mm(self, left: Any, right: Any) -> Any:
        return (left.astype(self.dtype) @ right.astype(self.dtype)).astype(jnp.float32)

    def einsum(self, equation: str, left: Any, right: Any) -> Any:
        made = jnp.einsum(equation, left.astype(self.dtype), right.astype(self.dtype))
        return made.astype(jnp.float32)


class Written(NamedTuple):
    """A loop: its step, and all that it begins with."""

    step: Step
    init: Any
    xs: Any


class Program(Protocol):
    """Anything that is judged: from parameters and data to a loss, a state and outputs."""

    @property
    def name(self) -> str: ...
    @property
    def params(self) -> Arrays: ...
    @property
    def data(self) -> Arrays: ...
    def run(self, products: Products, params: Arrays, data: Arrays, spelling: str) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Loop:
    """A program with one loop."""

    name: str
    params: Arrays
    data: Arrays
    written: Callable[[Products, Arrays, Arrays], Written]
    loss: Callable[[Products, Arrays, Arrays, Any, Any], Any]
    """From the final state and the stacked outputs."""

    def run(self, products: Products, params: Arrays, data: Arrays, spelling: str) -> Any:
        """Return the loss, the final state and the stacked outputs.

        Loops without stacked outputs have the loss zero.
        """

        def of(data: Arrays) -> Any:
            step, init, xs = self.written(products, params, data)
            state, outs = SPELLINGS[spelling].loop(step, init, xs)
            if outs is NO_OUTPUTS:
                return jnp.zeros(()), (state, None)
            return self.loss(products, params, data, state, outs), (state, outs)

        if not SPELLINGS[spelling].is_mapped:
            return of(data)
        # Both rows are the same: what is judged is the program, not `vmap`.
        losses, rest = jax.vmap(of)(jax.tree.map(lambda x: jnp.stack([x, x]), data))
        return jnp.mean(losses), rest


@dataclasses.dataclass(frozen=True)
class Whole:
    """A program without a loop: it is measured and has no verdict."""

    name: str
    params: Arrays
    data: Arrays
    func: Callable[[Products, Arrays, Arrays], Any]

    def run(self, products: Products, params: Arrays, data: Arrays, spelling: str) -> Any:
        """Return the loss, the final state and no outputs."""
        del spelling
        return self.func(products, params, data)


# Spellings.

NO_OUTPUTS = object()
"""A loop that stacks no outputs returns this in their place."""


@dataclasses.dataclass(frozen=True)
class Spelling:
    """One way to write a loop."""

    loop: Callable[[Step, Any, Any], tuple[Any, Any]]
    is_mapped: bool = False

    has_gradient: bool = True
    """Whether gradients are taken in reverse; otherwise the derivative is taken forward."""


def length_of(xs: Any) -> int:
    return jax.tree.leaves(xs)[0].shape[0]


def scan(step: Step, init: Any, xs: Any) -> tuple[Any, Any]:
    return lax.scan(step, init, xs)


def unrolled(step: Step, init: Any, xs: Any) -> tuple[Any, Any]:
    return lax.scan(step, init, xs, unroll=4)


def checkpointed_step(step: Step, init: Any, xs: Any) -> tuple[Any, Any]:
    return lax.scan(jax.checkpoint(step), init, xs)


def checkpointed_loop(step: Step, init: Any, xs: Any) -> tuple[Any, Any]:
    return jax.checkpoint(lambda init, xs: lax.scan(step, init, xs))(init, xs)


def _nested(step: Step, init: Any, xs: Any, wrap: Callable[[Step], Step]) -> tuple[Any, Any]:
    length = length_of(xs)
    chunks = next(size for size in range(int(length**0.5), 0, -1) if length % size == 0)
    xs = jax.tree.map(lambda x: x.reshape(chunks, length // chunks, *x.shape[1:]), xs)
    state, outs = lax.scan(wrap(lambda carry, chunk: lax.scan(step, carry, chunk)), init, xs)
    return state, jax.tree.map(lambda y: y.reshape(length, *y.shape[2:]), outs)


def nested(step: Step, init: Any, xs: Any) -> tuple[Any, Any]:
    return _nested(step, init, xs, lambda body: body)


def nested_checkpointed(step: Step, init: Any, xs: Any) -> tuple[Any, Any]:
    return _nested(step, init, xs, jax.checkpoint)


def fori_loop(step: Step, init: Any, xs: Any) -> tuple[Any, Any]:
    def body(number: Any, carry: Any) -> Any:
        return step(carry, jax.tree.map(lambda x: x[number], xs))[0]

    return lax.fori_loop(0, length_of(xs), body, init), NO_OUTPUTS


def while_loop(step: Step, init: Any, xs: Any) -> tuple[Any, Any]:
    def body(carry: Any) -> Any:
        number, inner = carry
        return number + 1, step(inner, jax.tree.map(lambda x: x[number], xs))[0]

    length = length_of(xs)
    return lax.while_loop(lambda carry: carry[0] < length, body, (0, init))[1], NO_OUTPUTS


SPELLINGS: Mapping[str, Spelling] = {
    "scan": Spelling(scan),
    "unrolled": Spelling(unrolled),
    "checkpointed step": Spelling(checkpointed_step),
    "checkpointed loop": Spelling(checkpointed_loop),
    "vmapped": Spelling(scan, is_mapped=True),
    "vmapped, checkpointed step": Spelling(checkpointed_step, is_mapped=True),
    "nested": Spelling(nested),
    "nested, checkpointed": Spelling(nested_checkpointed),
    "fori_loop": Spelling(fori_loop, has_gradient=False),
    "while_loop": Spelling(while_loop, has_gradient=False),
}


def normal(rng: np.random.Generator, *shape: int, scale: float | None = None) -> np.ndarray:
    """Random numbers; those of a weight by default, which is as wide as its first axis."""
    made = rng.standard_normal(shape) * (scale or shape[0] ** -0.5)
    return made.astype(np.float32)
