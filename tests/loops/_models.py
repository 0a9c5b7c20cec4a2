"""Recurrent models, filters, optimizers and solvers; and sums without a loop."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.loops._loop import Arrays, Loop, Products, Program, Whole, Written, normal
from tests.loops._recurrences import BATCH, LONG, D, outputs_loss

STATES = 8


def _sequence(*names: str, length: int = LONG, out: int = D) -> tuple[dict[str, Any], Any, Any]:
    """Weights of these names, an input and a target for each iteration, and the generator."""
    rng = np.random.default_rng(0)
    params = {name: normal(rng, D, D) for name in names} | {"o": normal(rng, out, out)}
    data = {
        "x": normal(rng, length, BATCH, D, scale=1.0) + np.float32(0.5),
        "y": normal(rng, length, BATCH, out, scale=1.0),
    }
    return params, data, rng


# State space models and linear attention.


def mamba(inside: bool) -> Loop:
    """A selective state space model, whose projections are before the loop or in its body."""
    params, data, rng = _sequence("dt")
    params |= {"b": normal(rng, D, STATES), "c": normal(rng, D, STATES)}
    params["log_a"] = np.log(np.tile(np.arange(1, STATES + 1, dtype=np.float32), (D, 1)))

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        def projected(x: Any) -> Any:
            dt = jax.nn.softplus(k.mm(x, p["dt"]) - 6)
            return dt, k.mm(x, p["b"]), k.mm(x, p["c"]), x

        def step(h: Any, given: Any) -> tuple[Any, Any]:
            dt, b, c, x = projected(given) if inside else given
            h = jnp.exp(-dt[..., None] * jnp.exp(p["log_a"])[None]) * h
            h = h + (dt * x)[..., None] * b[:, None, :]
            return h, k.einsum("bdn,bn->bd", h, c)

        xs = d["x"] if inside else projected(d["x"])
        return Written(step, jnp.zeros((BATCH, D, STATES)), xs)

    where = "in the body" if inside else "before"
    return Loop(f"Mamba, projections {where}", params, data, written, outputs_loss)


def attention_state(kind: str) -> Loop:
    """Gated DeltaNet and decayed linear attention: the state is a matrix."""
    params, data, _ = _sequence("q", "k", "v", "a", "b")

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        def step(s: Any, given: Any) -> tuple[Any, Any]:
            query, key, value, decay, rate = given
            s = decay[..., None] * s
            if kind == "gated DeltaNet":
                value = rate * (value - k.einsum("bkv,bk->bv", s, key))
            s = s + key[:, :, None] * value[:, None, :]
            return s, k.einsum("bkv,bk->bv", s, query)

        x = d["x"]
        key = k.mm(x, p["k"])
        key = key * lax.rsqrt(jnp.sum(key**2, -1, keepdims=True) + 1e-6)
        decay = jnp.exp(-jax.nn.softplus(k.mm(x, p["a"])[..., :1] - 6))
        rate = jax.nn.sigmoid(k.mm(x, p["b"])[..., :1] - 2)
        xs = k.mm(x, p["q"]), key, k.mm(x, p["v"]), decay, rate
        return Written(step, jnp.zeros((BATCH, D, D)), xs)

    return Loop(kind, params, data, written, outputs_loss)


def complex_states() -> Loop:
    """A linear recurrence with complex states."""
    params, data, _ = _sequence("w", "u")
    params["nu"] = np.full((1, D), np.log(1e-3), np.float32)
    params["theta"] = np.linspace(0, 0.1, D, dtype=np.float32)[None]

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        size = jnp.exp(-jnp.exp(p["nu"]))
        factor = lax.complex(size * jnp.cos(p["theta"]), size * jnp.sin(p["theta"]))

        def step(h: Any, u: Any) -> tuple[Any, Any]:
            h = factor * h + u
            return h, jnp.real(h) + jnp.imag(h)

        u = lax.complex(k.mm(d["x"], p["w"]), k.mm(d["x"], p["u"]))
        return Written(step, jnp.zeros_like(u[0]), u)

    return Loop("complex states", params, data, written, outputs_loss)


# Recurrent networks.


def lstm() -> Loop:
    params, data, rng = _sequence()
    params |= {"x": normal(rng, D, 4 * D), "h": normal(rng, D, 4 * D)}

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        def step(carry: Any, u: Any) -> tuple[Any, Any]:
            c, h = carry
            i, f, g, o = jnp.split(u + k.mm(h, p["h"]), 4, axis=-1)
            # A forget gate of .998: what is in the cell stays there for hundreds of iterations.
            c = jax.nn.sigmoid(f + 6) * c + jax.nn.sigmoid(i - 3) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (c, h), h

        zero = jnp.zeros((BATCH, D))
        return Written(step, (zero, zero), k.mm(d["x"], p["x"]))

    return Loop("LSTM", params, data, written, outputs_loss)


def gru() -> Loop:
    params, data, rng = _sequence()
    params |= {"x": normal(rng, D, 2 * D), "h": normal(rng, D, 2 * D)}

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        def step(h: Any, u: Any) -> tuple[Any, Any]:
            z, n = jnp.split(u + k.mm(h, p["h"]), 2, axis=-1)
            z = jax.nn.sigmoid(z - 6)
            h = (1 - z) * h + z * jnp.tanh(n)
            return h, h

        return Written(step, jnp.zeros((BATCH, D)), k.mm(d["x"], p["x"]))

    return Loop("GRU", params, data, written, outputs_loss)


def leaky_with_matrices() -> Loop:
    """A leaky system whose matrices are data: one for each iteration, and not weights."""
    params, data, rng = _sequence("w")
    data["a"] = normal(rng, LONG, D, D, scale=0.5 * D**-0.5)

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        def step(h: Any, given: Any) -> tuple[Any, Any]:
            u, a = given
            h = h + 1e-3 * (k.mm(h, a) + u - h)
            return h, h

        return Written(step, jnp.zeros((BATCH, D)), (k.mm(d["x"], p["w"]), d["a"]))

    return Loop("leaky system, matrices from the data", params, data, written, outputs_loss)


# Filters and recursions over discrete states.


def kalman(kind: str) -> Loop:
    params, data, _ = _sequence("w")
    params["noise"] = np.asarray([[-8.0, -12.0, 0.0]], np.float32)
    trend = np.asarray([[1, 1], [0, 1]], np.float32)
    params |= {"f": trend} if kind == "trend" else {}

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        q0, q1, r = jnp.exp(p["noise"])[0]

        def with_trend(carry: Any, z: Any) -> tuple[Any, Any]:
            mean, cov = carry
            mean = k.mm(mean, p["f"].T)
            cov = k.mm(k.mm(p["f"], cov), p["f"].T) + jnp.diag(jnp.stack([q0, q1]))
            spread = cov[0, 0] + r
            gain, off = cov[:, 0] / spread, z - mean[..., 0]
            mean = mean + off[..., None] * gain[None, None]
            cov = cov - gain[:, None] * cov[:1]
            return (mean, cov), off**2 / spread + jnp.log(spread)

        def random_walk(carry: Any, z: Any) -> tuple[Any, Any]:
            mean, cov = carry
            cov = cov + q0
            spread = cov + r
            off = z - mean
            mean, cov = mean + cov / spread * off, cov - cov**2 / spread
            return (mean, cov), off**2 / spread + jnp.log(spread)

        z = k.mm(d["x"], p["w"])
        if kind == "trend":
            return Written(with_trend, (jnp.zeros((BATCH, D, 2)), jnp.eye(2)), z)
        return Written(random_walk, (jnp.zeros((BATCH, D)), jnp.ones(())), z)

    def loss(k: Products, p: Arrays, d: Arrays, state: Any, outs: Any) -> Any:
        return jnp.mean(outs)

    return Loop(f"Kalman filter, {kind}", params, data, written, loss)


def ctc() -> Loop:
    """The forward recursion of CTC: 8 labels in 2,048 frames."""
    params, data, rng = _sequence("w")
    labels = rng.integers(1, D, (BATCH, 8)).astype(np.int32)
    path = np.zeros((BATCH, 17), np.int32)
    path[:, 1::2] = labels
    skip = np.zeros((BATCH, 17), bool)
    skip[:, 2:] = (path[:, 2:] != 0) & (path[:, 2:] != path[:, :-2])
    data |= {"path": path, "skip": skip}

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        def shifted(alpha: Any, by: int) -> Any:
            return jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=-1e30)[:, :-by]

        def step(alpha: Any, frame: Any) -> tuple[Any, Any]:
            jumped = jnp.where(d["skip"], shifted(alpha, 2), -1e30)
            arrived = jnp.logaddexp(jnp.logaddexp(alpha, shifted(alpha, 1)), jumped)
            return arrived + frame, None

        logs = jax.nn.log_softmax(k.mm(d["x"], p["w"]))
        path = jnp.broadcast_to(d["path"][None], (LONG, BATCH, 17))
        init = jnp.broadcast_to(jnp.where(jnp.arange(17) == 0, 0.0, -1e30)[None], (BATCH, 17))
        return Written(step, init, jnp.take_along_axis(logs, path, axis=-1))

    def loss(k: Products, p: Arrays, d: Arrays, state: Any, outs: Any) -> Any:
        return -jnp.mean(jnp.logaddexp(state[:, -1], state[:, -2])) / LONG

    return Loop("CTC", params, data, written, loss)


def hidden_states(kind: str) -> Loop:
    """The forward recursion of a hidden Markov model, and Viterbi's."""
    params, data, _ = _sequence("w", "a")

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        logs, moves = jax.nn.log_softmax(k.mm(d["x"], p["w"])), jax.nn.log_softmax(p["a"])

        def in_logs(alpha: Any, seen: Any) -> tuple[Any, Any]:
            paths = alpha[:, :, None] + moves[None]
            best = kind == "Viterbi"
            return (paths.max(1) if best else jax.nn.logsumexp(paths, axis=1)) + seen, None

        def normalized(carry: Any, seen: Any) -> tuple[Any, Any]:
            alpha, total = carry
            alpha = k.mm(alpha, jnp.exp(moves)) * jnp.exp(seen)
            mass = alpha.sum(-1, keepdims=True)
            return (alpha / mass, total + jnp.log(mass)), None

        if kind == "normalized":
            init = jnp.full((BATCH, D), 1 / D), jnp.zeros((BATCH, 1))
            return Written(normalized, init, logs)
        return Written(in_logs, jnp.zeros((BATCH, D)), logs)

    def loss(k: Products, p: Arrays, d: Arrays, state: Any, outs: Any) -> Any:
        if kind == "normalized":
            return -jnp.mean(state[1]) / LONG
        return -jnp.mean(jax.nn.logsumexp(state, axis=-1)) / LONG

    return Loop(f"HMM, {kind}", params, data, written, loss)


# Optimizers and solvers.


def adam(batches: bool) -> Loop:
    """A thousand steps of Adam, on the same batch or each on its own."""
    length = 1000
    rng = np.random.default_rng(0)
    params = {"w": normal(rng, D, D)}
    target = normal(rng, D, D)
    x = normal(rng, *((length, 8, D) if batches else (32, D)), scale=1.0)
    noise = normal(rng, *x.shape, scale=0.1)
    # The target is further away than a thousand steps go: at it, Adam divides noise by noise.
    data = {"x": x, "y": x @ (3 * target) + noise, "number": np.arange(1, length + 1)}
    data["number"] = data["number"].astype(np.float32)

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        def error(w: Any, x: Any, y: Any) -> Any:
            return jnp.mean((k.mm(x, w) - y) ** 2)

        def step(carry: Any, given: Any) -> tuple[Any, Any]:
            w, mean, square = carry
            x, y = (given["x"], given["y"]) if batches else (d["x"], d["y"])
            loss, grad = jax.value_and_grad(error)(w, x, y)
            mean = 0.9 * mean + 0.1 * grad
            square = 0.999 * square + 0.001 * grad**2
            unbiased = mean / (1 - 0.9 ** given["number"])
            scale = jnp.sqrt(square / (1 - 0.999 ** given["number"])) + 1e-8
            return (w - 1e-3 * unbiased / scale, mean, square), loss

        xs = {"number": d["number"]} | ({"x": d["x"], "y": d["y"]} if batches else {})
        return Written(step, (p["w"], jnp.zeros((D, D)), jnp.zeros((D, D))), xs)

    def loss(k: Products, p: Arrays, d: Arrays, state: Any, outs: Any) -> Any:
        return jnp.mean(outs)

    name = "Adam, a batch for each step" if batches else "Adam, one batch"
    return Loop(name, params, data, written, loss)


def solver(kind: str) -> Loop:
    """A thousand steps of an equation whose solutions neither grow nor decay."""
    length = 1000
    rng = np.random.default_rng(0)
    params = {"a": normal(rng, D, D), "o": normal(rng, D, D), "init": normal(rng, BATCH, D)}
    data = {
        "y": normal(rng, BATCH, D, scale=1.0),
        "size": np.full((length, 1, 1), 0.01, np.float32),
    }

    def written(k: Products, p: Arrays, d: Arrays) -> Written:
        def runge_kutta(y: Any, size: Any) -> tuple[Any, Any]:
            a = p["a"] - p["a"].T
            k1 = k.mm(y, a)
            k2 = k.mm(y + size / 2 * k1, a)
            k3 = k.mm(y + size / 2 * k2, a)
            k4 = k.mm(y + size * k3, a)
            return y + size / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        def leapfrog(carry: Any, size: Any) -> tuple[Any, Any]:
            place, speed = carry
            speed = speed - size * k.mm(place, p["a"] + p["a"].T)
            speed = speed - size * 3 * place
            return (place + size * speed, speed), None

        # Not a parameter, which is float32 wherever it is carried.
        init = k.mm(p["init"], p["o"])
        if kind == "RK4":
            return Written(runge_kutta, init, d["size"])
        return Written(leapfrog, (init, jnp.zeros((BATCH, D))), d["size"])

    def loss(k: Products, p: Arrays, d: Arrays, state: Any, outs: Any) -> Any:
        place = state if kind == "RK4" else state[0]
        return jnp.mean((k.mm(place, p["o"]) - d["y"]) ** 2)

    return Loop(kind, params, data, written, loss)


# Without a loop: measured only.


def _folded(z: Any) -> Any:
    h = z[0]
    for number in range(1, 64):
        h = h + z[number]
    return h


def _halved(z: Any) -> Any:
    while z.shape[0] > 1:
        z = z[::2] + z[1::2]
    return z[0]


def _scanned(z: Any) -> Any:
    decays = jnp.full((LONG, 1, 1), 0.999)

    def combine(a: Any, c: Any) -> Any:
        return a[0] * c[0], c[0] * a[1] + c[1]

    return lax.associative_scan(combine, (decays, z))[1][-1]


def _scanned_by_hand(z: Any) -> Any:
    decays, by = jnp.full((LONG, 1, 1), 0.999), 1
    while by < LONG:
        # Both as `by` iterations before, and the neutral element in front.
        before = jnp.concatenate([jnp.zeros_like(z[:by]), z[:-by]])
        factors = jnp.concatenate([jnp.ones_like(decays[:by]), decays[:-by]])
        z, decays, by = decays * before + z, decays * factors, 2 * by
    return z[-1]


WITHOUT_LOOP: Mapping[str, Callable[[Any], Any]] = {
    "fold": _folded,
    "halving": _halved,
    "assoc": _scanned,
    "associative_scan by hand": _scanned_by_hand,
    "reduce": lambda z: lax.reduce(z, np.zeros((), z.dtype)[()], lax.add, (0,)),
}


def without_loop(kind: str) -> Whole:
    params, data, _ = _sequence("w")
    params["w"], data["x"] = np.abs(params["w"]), np.abs(data["x"])

    def func(k: Products, p: Arrays, d: Arrays) -> Any:
        h = WITHOUT_LOOP[kind](k.mm(d["x"], p["w"]))
        return jnp.mean((k.mm(h / LONG, p["o"]) - d["y"][0]) ** 2), (h, None)

    return Whole(kind, params, data, func)


LOOPS: Mapping[str, Callable[[], Loop]] = {
    "Mamba, projections before": functools.partial(mamba, False),
    "Mamba, projections in the body": functools.partial(mamba, True),
    "gated DeltaNet": functools.partial(attention_state, "gated DeltaNet"),
    "decayed linear attention": functools.partial(attention_state, "decayed linear attention"),
    "complex states": complex_states,
    "LSTM": lstm,
    "GRU": gru,
    "leaky system, matrices from the data": leaky_with_matrices,
    "Kalman filter, trend": functools.partial(kalman, "trend"),
    "Kalman filter, random walk": functools.partial(kalman, "random walk"),
    "CTC": ctc,
    **{
        f"HMM, {kind}": functools.partial(hidden_states, kind)
        for kind in ("log space", "normalized", "Viterbi")
    },
    "Adam, one batch": functools.partial(adam, False),
    "Adam, a batch for each step": functools.partial(adam, True),
    "RK4": functools.partial(solver, "RK4"),
    "leapfrog": functools.partial(solver, "leapfrog"),
}
MEASURED: Mapping[str, Callable[[], Program]] = {
    kind: functools.partial(without_loop, kind) for kind in WITHOUT_LOOP
}
