"""Averages, sums and blockwise attention: carries that a loop decays or adds to."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.loops._loop import Arrays, Loop, Products, Written, normal

D = 16
BATCH = 4
LONG = 2048


# Averages: what is averaged is computed before the loop, and each iteration's average is read.


def _average_step(kind: str, decay: float, k: Products, p: Arrays) -> Callable[[Any, Any], Any]:
    def step(h: Any, u: Any) -> Any:
        match kind:
            case "literal":
                return decay * h + (1 - decay) * u
            case "parameter":
                return p["r"] * h + (1 - p["r"]) * u
            case "sigmoid":
                a = jax.nn.sigmoid(p["a"])
                return a * h + (1 - a) * u
            case "lerp":
                return h + (1 - decay) * (u - h)
            case "exp of exp":
                a = jnp.exp(-jnp.exp(p["a"] * 0 + np.log(-np.log(decay))))
                return a * h + (1 - a) * u
            case "sum":
                return h + u * (1 - decay)
            case "leaky RNN":
                return h + (1 - decay) * (jnp.tanh(k.mm(h, p["o"])) + u - h)
            case "product of the input":
                return decay * h + (1 - decay) * k.mm(u, p["o"])
            case _:
                raise ValueError(kind)

    return step


AVERAGES = (
    *("literal", "parameter", "sigmoid", "lerp", "exp of exp", "sum", "leaky RNN"),
    "product of the input",
)


def outputs_loss(k: Products, p: Arrays, d: Arrays, state: Any, outs: Any) -> Any:
    del state
    return jnp.mean((k.mm(outs, p["o"]) - d["y"]) ** 2)


def average(kind: str, length: int, decay: float) -> Loop:
    rng = np.random.default_rng(0)
    params = {
        "w": normal(rng, D, D),
        "o": normal(rng, D, D),
        "a": np.full((1, D), np.log(decay / (1 - decay)), np.float32),
        "r": np.full((1, D), decay, np.float32),
    }
    data = {
        "x": normal(rng, length, BATCH, D, scale=1.0) + np.float32(1),
        "y": normal(rng, length, BATCH, D, scale=1.0),
    }

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        make = _average_step(kind, decay, k, p)

        def step(h: Any, u: Any) -> tuple[Any, Any]:
            h = make(h, u)
            return h, h

        return Written(step, jnp.zeros((BATCH, D)), k.mm(d["x"], p["w"]))

    return Loop(f"average, {kind}, {length}", params, data, written, outputs_loss)


# Sums: positive terms, so that 16 bits stall.


def _sum_data() -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(0)
    params = {
        "w": np.abs(normal(rng, D, D)),
        "o": normal(rng, D, D),
        "g": np.full((1, D), 0.999, np.float32),
    }
    data = {
        "x": np.abs(normal(rng, LONG, BATCH, D, scale=1.0)),
        "y": normal(rng, BATCH, D, scale=1.0),
        "mask": np.arange(LONG) % 8 != 0,
        "ids": (np.arange(LONG) % 2).astype(np.int32),
        "number": np.arange(LONG, dtype=np.float32),
    }
    return params, data


def _add(h: Any, u: Any) -> Any:
    return h + u


def _kahan(state: Any, u: Any) -> Any:
    total, lost = state
    term = u - lost
    more = total + term
    return more, (more - total) - term


def _online_softmax(state: Any, u: Any) -> Any:
    top, weights, total = state
    s = u[:, :1]
    new = jnp.maximum(top, s)
    decay, weight = jnp.exp(top - new), jnp.exp(s - new)
    return new, weights * decay + weight, total * decay + weight * u


Input = Mapping[str, Any]
"""What a step of a sum is given: `u`, the mask, the class, the number and `product`."""

_SUM_STEPS: Mapping[str, Callable[[Any, Any, Input], Any]] = {
    "plain": lambda p, h, x: h + x["u"],
    "where of a sum": lambda p, h, x: jnp.where(x["mask"], h + x["u"], h),
    "sum of where": lambda p, h, x: h + jnp.where(x["mask"], x["u"], 0.0),
    "cond": lambda p, h, x: lax.cond(x["mask"], _add, lambda h, u: h, h, x["u"]),
    "two terms": lambda p, h, x: h + x["u"] + x["u"] * 2,
    "at add": lambda p, h, x: h.at[jnp.arange(BATCH)].add(x["u"]),
    "jit": lambda p, h, x: jax.jit(_add)(h, x["u"]),
    "mean": lambda p, h, x: (h[0] + 1, h[1] + (x["u"] - h[1]) / (h[0] + 1)),
    "reshape": lambda p, h, x: (h.reshape(-1) + x["u"].reshape(-1)).reshape(BATCH, D),
    "decay": lambda p, h, x: 0.999 * h + x["u"],
    "decay by a parameter": lambda p, h, x: h * p["g"] + x["product"](x["u"], "o"),
    "Kahan": lambda p, h, x: _kahan(h, x["u"]),
    # The products are in the body.
    "product in the body": lambda p, h, x: h + x["product"](x["x"], "w"),
    "vmap in the body": lambda p, h, x: jax.vmap(lambda a, c: a + x["product"](c[None], "w")[0])(
        h, x["x"]
    ),
    "by class": lambda p, h, x: h.at[x["id"]].add(x["product"](x["x"], "w")),
    "two sums": lambda p, h, x: (h[0] + x["product"](x["x"], "w"), h[1] + 1.0),
    "running mean": lambda p, h, x: (
        h * (x["number"] / (x["number"] + 1)) + x["product"](x["x"], "w") / (x["number"] + 1)
    ),
    "minus a minus": lambda p, h, x: x["product"](x["x"], "w") - (-h),
    "online softmax": lambda p, h, x: _online_softmax(h, x["product"](x["x"], "w")),
}
SUMS = (*_SUM_STEPS, "read", "previous")


def _sum_init(kind: str) -> Any:
    zero = jnp.zeros((BATCH, D))
    match kind:
        case "mean":
            return jnp.zeros(()), zero
        case "two sums":
            return zero, jnp.zeros(())
        case "Kahan":
            return zero, zero
        case "by class":
            return jnp.zeros((2, BATCH, D))
        case "online softmax":
            return jnp.full((BATCH, 1), -jnp.inf), jnp.zeros((BATCH, 1)), zero
        case _:
            return zero


def _summed(kind: str, state: Any) -> Any:
    match kind:
        case "mean":
            return state[1]
        case "two sums" | "Kahan":
            return state[0] / LONG
        case "by class":
            return state.sum(0) / LONG
        case "online softmax":
            return state[2] / state[1]
        case "running mean":
            return state
        case _:
            return state / LONG


def total(kind: str) -> Loop:
    params, data = _sum_data()

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        def step(h: Any, x: Any) -> tuple[Any, Any]:
            x = {**x, "product": lambda value, name: k.mm(value, p[name])}
            if kind == "read":
                return h + x["u"], jnp.tanh((h + x["u"]) / LONG)
            if kind == "previous":
                return h + x["u"], h
            return _SUM_STEPS[kind](p, h, x), None

        xs = {"x": d["x"], "mask": d["mask"], "id": d["ids"], "number": d["number"]}
        return Written(step, _sum_init(kind), {**xs, "u": k.mm(d["x"], p["w"])})

    def loss(k: Products, p: Arrays, d: Arrays, state: Any, outs: Any) -> Any:
        made = jnp.mean((k.mm(_summed(kind, state), p["o"]) - d["y"]) ** 2)
        return made if outs is None else made + jnp.mean(jnp.tanh(k.mm(outs, p["o"])))

    return Loop(f"sum, {kind}", params, data, written, loss)


def gradient_sum() -> Loop:
    """Sum gradients over microbatches, as users write it."""
    params, data = _sum_data()

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        def error(w: Any, x: Any) -> Any:
            return jnp.mean((k.mm(x, w) - d["y"]) ** 2)

        def step(sums: Any, x: Any) -> tuple[Any, Any]:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(error)(p["w"], x)), None

        return Written(step, (jnp.zeros(()), jnp.zeros((D, D))), d["x"])

    def loss(k: Products, p: Arrays, d: Arrays, state: Any, outs: Any) -> Any:
        return state[0] / LONG

    return Loop("sum, gradients of microbatches", params, data, written, loss)


# Blockwise attention.


def attention(blocks: int) -> Loop:
    width, size, queries = 32, 16, 32
    rng = np.random.default_rng(0)
    params = {name: normal(rng, width, width) for name in "qkvo"}
    data = {
        "x": normal(rng, 2, blocks * size, width, scale=1.0),
        "y": normal(rng, 2, queries, width, scale=1.0),
    }

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        def in_blocks(x: Any) -> Any:
            return x.reshape(2, blocks, size, width).swapaxes(0, 1)

        query = k.mm(d["x"][:, :queries], p["q"])
        keys, values = k.mm(d["x"], p["k"]), k.mm(d["x"], p["v"]) + 1.0

        def step(carry: Any, block: Any) -> tuple[Any, Any]:
            top, weights, total = carry
            s = k.einsum("btd,bsd->bts", query, block[0]) * width**-0.5
            new = jnp.maximum(top, s.max(-1, keepdims=True))
            decay, weight = jnp.exp(top - new), jnp.exp(s - new)
            weights = weights * decay + weight.sum(-1, keepdims=True)
            return (new, weights, total * decay + k.einsum("bts,bsd->btd", weight, block[1])), None

        one = (2, queries, 1)
        init = jnp.full(one, -1e30), jnp.zeros(one), jnp.zeros((2, queries, width))
        return Written(step, init, (in_blocks(keys), in_blocks(values)))

    def loss(k: Products, p: Arrays, d: Arrays, state: Any, outs: Any) -> Any:
        return jnp.mean((k.mm(state[2] / state[1], p["o"]) - d["y"]) ** 2)

    return Loop(f"attention, {blocks} blocks", params, data, written, loss)


# Log space, and statistics.


def _log_step(kind: str, h: Any, u: Any) -> Any:
    match kind:
        case "survival":  # The product of many probabilities, as a sum of logarithms.
            return h + jax.nn.log_sigmoid(u + 4)
        case "cumulative product":
            return h * (1 + 1e-3 * u)
        case "logsumexp":
            return jnp.logaddexp(h, u)
        case "Welford":
            count, mean, squares = h
            change = u - mean
            mean = mean + change / (count + 1)
            return count + 1, mean, squares + change * (u - mean)
        case _:
            raise ValueError(kind)


STATISTICS = ("survival", "cumulative product", "logsumexp", "Welford")


def statistic(kind: str) -> Loop:
    rng = np.random.default_rng(0)
    params = {"w": normal(rng, D, D), "o": normal(rng, D, D)}
    data = {
        "x": normal(rng, LONG, BATCH, D, scale=1.0) + np.float32(0.5),
        "y": normal(rng, BATCH, D, scale=1.0),
    }

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        def step(h: Any, u: Any) -> tuple[Any, Any]:
            return _log_step(kind, h, u), None

        zero = jnp.zeros((BATCH, D))
        init = (jnp.zeros(()), zero, zero) if kind == "Welford" else zero
        init = jnp.ones((BATCH, D)) if kind == "cumulative product" else init
        return Written(step, init, k.mm(d["x"], p["w"]))

    def loss(k: Products, p: Arrays, d: Arrays, state: Any, outs: Any) -> Any:
        if kind == "Welford":
            _, mean, squares = state
            state = (squares / LONG) ** 0.5 + mean
        elif kind == "survival":
            state = jnp.exp(state / 64)
        return jnp.mean((k.mm(state, p["o"]) - d["y"]) ** 2)

    return Loop(f"statistic, {kind}", params, data, written, loss)


ROWS: Mapping[str, Callable[[], Loop]] = {
    **{
        f"average, {kind}, {length}": functools.partial(average, kind, length, decay)
        for length, decay in ((256, 0.99), (LONG, 0.999))
        for kind in AVERAGES
    },
    **{f"sum, {kind}": functools.partial(total, kind) for kind in SUMS},
    "sum, gradients of microbatches": gradient_sum,
    **{
        f"attention, {blocks} blocks": functools.partial(attention, blocks)
        for blocks in (8, 32, 128, 512)
    },
    **{f"statistic, {kind}": functools.partial(statistic, kind) for kind in STATISTICS},
}
