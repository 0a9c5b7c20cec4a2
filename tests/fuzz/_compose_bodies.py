"""The bodies of loops that composed programs draw: state, activations, and mixtures of the two.

A body reads parameters `q`, a carry `h`, its input `u` and a row `t` with a mask `t["m"]`, a place
`t["k"]` and an iteration number `t["i"]`. It sets the next `h` and a row `y` of the shape of `u`.
All of it works on one example and on a batch: axes are counted from the last.
"""

import dataclasses
import enum


class Reading(enum.Enum):
    """What a body's carry is, by the paths that lead from it to itself."""

    STATE = "no contraction on them"
    SHARED = "some with contractions, of weights that all iterations share"
    OWN = "some with contractions, of weights that each iteration has of its own"
    THROUGH = "all with contractions"


@dataclasses.dataclass(frozen=True)
class Body:
    """The body of a loop, as text.

    Attributes:
        lines: What it computes. `{d}` is a decay, `{n}` the number of iterations, and `ACT(...)`
            is around the activations of bodies whose carry is one.
        init: The first carry, made from a row `u`.
        final: What is read of the last carry.
        params: Its parameters, beside those of its input: `r` is a vector of decays, `a` a vector
            of their logits, `g` of logarithms of rates, `W` a matrix for each iteration, and other
            names are matrices.
        reading: What its carry is.
        longest: The largest number of iterations for which the program is well conditioned.
        has_scalars: Whether the carry has numbers without axes.
        batch: The axis of its carry along which the batch lies.
    """

    lines: str
    init: str = "jnp.zeros_like(u)"
    final: str = "h"
    params: str = ""
    reading: Reading = Reading.STATE
    longest: int = 600
    has_scalars: bool = False
    batch: int = 0


def _sum(text: str) -> Body:
    return Body(f"h = {text}\ny = jnp.tanh(h * (4.0 / {{n}}))")


def _average(text: str, params: str = "") -> Body:
    return Body(f"h = {text}\ny = h", params=params)


_SUMS = {
    "sum": "h + u",
    "sum of three": "h + u + 0.5 * jnp.tanh(u)",
    "sum of three, read": "h + 0.75 * u + 0.25 * u",
    "sum, subtracted": "u - (-h)",
    "sum through a reshape": "(h.reshape(-1) + u.reshape(-1)).reshape(u.shape)",
    "sum through a transpose": "(h.T + u.T).T",
    "sum through a call": "jax.jit(lambda a, b: a + b)(h, u)",
    "sum by index": 'h.at[..., t["k"]].add(u[..., 0])',
    "sum by indices": "h.at[..., jnp.arange(8)].add(u)",
    "sum by a slice": "h.at[..., :5].add(u[..., 3:])",
    "sum by a mask": 'jnp.where(t["m"], h + u, h)',
    "sum of masked terms": 'h + jnp.where(t["m"], u, 0.0)',
    "sum by a branch": 'lax.cond(t["m"], lambda h, u: h + u, lambda h, u: h, h, u)',
    "sum by a switch": 'lax.switch(t["k"] % 3, '
    "[lambda h, u: h + u, lambda h, u: h, lambda h, u: u + h + u], h, u)",
    "sum by a reduction": "jnp.stack([h, u, 0.5 * u]).sum(0)",
    "sum of a mean": "h + jnp.mean(u, axis=-1, keepdims=True) + 0.1 * u",
    "sum by a barrier": "lax.optimization_barrier(h) + u",
    "sum of halves": "jnp.concatenate([h[..., :4] + u[..., :4], h[..., 4:] - u[..., 4:]], axis=-1)",
    "sum that turns": "jnp.roll(h, 1, axis=-1) + u",
    "sum of a scaled carry": "(0.5 * h + 0.5 * u) * 2.0",
    "sum of updated slices": "lax.dynamic_update_slice_in_dim("
    "h, lax.dynamic_slice_in_dim(h, 2, 4, -1) + u[..., :4], 2, -1)",
}

_AVERAGES = {
    "average": ("{d} * h + (1 - {d}) * u", ""),
    "average, one product": "h + (1 - {d}) * (u - h)",
    "average of a parameter": ('q["r"] * h + (1 - q["r"]) * u', "r"),
    "average of a sigmoid": (
        'jax.nn.sigmoid(q["a"]) * h + (1 - jax.nn.sigmoid(q["a"])) * u',
        "a",
    ),
    "average of an exponential": (
        'jnp.exp(-jnp.exp(q["g"])) * h + (1 - jnp.exp(-jnp.exp(q["g"]))) * u',
        "g",
    ),
    "average by a mask": 'jnp.where(t["m"], {d} * h + (1 - {d}) * u, h)',
    "average by index": 'h.at[..., t["k"]].multiply({d})'
    '.at[..., t["k"]].add((1 - {d}) * u[..., 1])',
    "average of a bias": ('q["r"] * h + (1 - q["r"]) * (u + q["a"])', "ra"),
}

_OTHERS = {
    "two averages": Body(
        "m, v = h\nm = 0.9 * m + 0.1 * u\nv = {d} * v + (1 - {d}) * u**2\nh = (m, v)\n"
        "y = m / (jnp.sqrt(v) + 0.1)",
        "(jnp.zeros_like(u), jnp.ones_like(u))",
        "h[0] / (jnp.sqrt(h[1]) + 0.1)",
    ),
    "sum of a sum": Body(
        "a, b = h\na = a + u * (1.0 / {n})\nb = b + a * (1.0 / {n})\nh = (a, b)\ny = b",
        "(jnp.zeros_like(u), jnp.zeros_like(u))",
        "h[1]",
    ),
    "sums that swap": Body(
        "a, b = h\nh = (b + 0.5 * u, a + u)\ny = jnp.tanh(h[0] * (2.0 / {n}))",
        "(jnp.zeros_like(u), jnp.ones_like(u))",
        "h[0] - 0.5 * h[1]",
    ),
    "sum of Kahan": Body(
        "s, c = h\nv = u - c\nw = s + v\nh = (w, (w - s) - v)\ny = jnp.tanh(w * (4.0 / {n}))",
        "(jnp.zeros_like(u), jnp.zeros_like(u))",
        "h[0]",
    ),
    "running mean": Body(
        "n, m = h\nn = n + 1\nm = m + (u - m) / n\nh = (n, m)\ny = m",
        "(jnp.zeros((), u.dtype), jnp.zeros_like(u))",
        "h[1]",
        has_scalars=True,
    ),
    "Welford": Body(
        "n, m, v = h\nn = n + 1\nd = u - m\nm = m + d / n\nv = v + d * (u - m)\nh = (n, m, v)\n"
        "y = jnp.sqrt(v / n + 0.1)",
        "(jnp.zeros((), u.dtype), jnp.zeros_like(u), jnp.zeros_like(u))",
        "h[2] / {n}",
        has_scalars=True,
    ),
    "running maximum": Body(
        "h = jnp.maximum(h, lax.stop_gradient(u))\ny = u - h",
        "jnp.full_like(u, -1e9)",
    ),
    "running logsumexp": Body(
        "h = jnp.logaddexp(h, u)\ny = h - jnp.log(1.0 + {n})", "jnp.full_like(u, -10.0)"
    ),
    "online softmax": Body(
        'm, l, o = h\ns = C.einsum("...d,d->...", u, q["v"][0])[..., None]\n'
        "n = jnp.maximum(m, s)\na = jnp.exp(m - n)\nw = jnp.exp(s - n)\n"
        "h = (n, l * a + w, o * a + w * u)\ny = h[2] / h[1]",
        "(jnp.full_like(u[..., :1], -1e9), jnp.zeros_like(u[..., :1]), jnp.zeros_like(u))",
        "h[2] / h[1]",
        "v",
    ),
    "blockwise attention": Body(
        'm, l, o = h\nk = C.mm(u, q["v"])\ns = jnp.sum(k * k, axis=-1, keepdims=True) * 0.2\n'
        "n = jnp.maximum(m, lax.stop_gradient(s))\na = jnp.exp(m - n)\nw = jnp.exp(s - n)\n"
        'h = (n, l * a + w, o * a + w * C.mm(u, q["o"]))\ny = h[2] / h[1]',
        "(jnp.full_like(u[..., :1], -1e9), jnp.zeros_like(u[..., :1]), jnp.zeros_like(u))",
        "h[2] / h[1]",
        "vo",
    ),
    "linear attention": Body(
        'k = jnp.tanh(u)\nv = C.mm(u, q["v"])\n'
        "h = {d} * h + k[..., :, None] * v[..., None, :] * (1 - {d})\n"
        'y = C.einsum("...d,...de->...e", k, h)',
        "u[..., :, None] * jnp.zeros_like(u)[..., None, :]",
        "h[..., 0, :] + h[..., 1, :]",
        "v",
    ),
    "gated linear attention": Body(
        'k = jax.nn.sigmoid(u)\ng = jax.nn.sigmoid(C.mm(u, q["v"]) + 3.0)\n'
        "h = g[..., :, None] * h + k[..., :, None] * u[..., None, :]\n"
        'y = C.einsum("...d,...de->...e", k, h)',
        "u[..., :, None] * jnp.zeros_like(u)[..., None, :]",
        "h[..., 0, :] + h[..., 1, :]",
        "v",
    ),
    "gated scan": Body(
        'g = jax.nn.sigmoid(C.mm(u, q["v"]) + 2.0)\nh = g * h + (1 - g) * u\n'
        'y = h * C.mm(u, q["o"])',
        params="vo",
    ),
    "selective scan": Body(
        'g = jnp.exp(-jax.nn.softplus(C.mm(u, q["v"]) - 3.0) * jnp.exp(q["g"]))\n'
        "h = g * h + (1 - g) * u\ny = jax.nn.silu(h)",
        params="vg",
    ),
    "running product": Body(
        "h = h * jnp.exp(jnp.tanh(u) * (1.0 / {n}))\ny = h", "jnp.ones_like(u)"
    ),
    "ring of slots": Body(
        's = t["k"] % 4\nh = h.at[s].set({d} * h[s] + (1 - {d}) * u)\ny = h[s]',
        "jnp.zeros((4, *u.shape), u.dtype)",
        "h.sum(0)",
        batch=1,
    ),
    "sum, averaged inside a loop": Body(
        "h = lax.fori_loop(0, 3, lambda i, h: h + u * (1.0 / 3.0), h)\n"
        "y = jnp.tanh(h * (4.0 / {n}))",
        longest=200,
    ),
    "sum that is clipped": Body("h = jnp.clip(h + u, -1e3, 1e3)\ny = jnp.tanh(h * (4.0 / {n}))"),
    "sum and its contraction": Body('h = h + u\ny = C.mm(rms(h), q["v"])', params="v"),
    "average of a derivative": Body(
        'f = lambda v: jnp.sum(jnp.tanh(C.mm(v, q["v"])) ** 2)\n'
        "h = {d} * h + (1 - {d}) * jax.grad(f)(u)\ny = h",
        params="v",
    ),
    # Activations, and carries that are one thing or the other.
    "recurrence": Body(
        'h = ACT(jnp.tanh(C.mm(h, q["v"]) + u))\ny = h', params="v", reading=Reading.THROUGH
    ),
    "recurrence with a norm": Body(
        'h = ACT(rms(C.mm(h, q["v"]) + u))\ny = h',
        params="v",
        reading=Reading.THROUGH,
        longest=100,
    ),
    "leaky recurrence": Body(
        'h = ACT(0.9 * h + 0.1 * jnp.tanh(C.mm(h, q["v"]) + u))\ny = h',
        params="v",
        reading=Reading.SHARED,
    ),
    "Euler steps": Body(
        'h = ACT(h + (1.0 / {n}) * (jnp.tanh(C.mm(h, q["v"])) + u))\ny = h',
        params="v",
        reading=Reading.SHARED,
    ),
    "midpoint steps": Body(
        'f = lambda h: jnp.tanh(C.mm(h, q["v"])) + 0.1 * u\n'
        "h = ACT(h + (1.0 / {n}) * f(h + (0.5 / {n}) * f(h)))\ny = h",
        params="v",
        reading=Reading.SHARED,
        longest=200,
    ),
    "gated recurrence": Body(
        'z = jax.nn.sigmoid(C.mm(h, q["v"]) + u + 2.0)\n'
        'h = ACT(z * h + (1 - z) * jnp.tanh(C.mm(h, q["o"]) + u))\ny = h',
        params="vo",
        reading=Reading.SHARED,
    ),
    "delta rule": Body(
        "k = u * lax.rsqrt(jnp.sum(u**2, axis=-1, keepdims=True) + 0.1)\n"
        'e = 0.5 * (C.mm(u, q["v"]) - C.einsum("...d,...de->...e", k, h))\n'
        'h = ACT(h + k[..., :, None] * e[..., None, :])\ny = C.einsum("...d,...de->...e", k, h)',
        "u[..., :, None] * jnp.zeros_like(u)[..., None, :]",
        "h[..., 0, :] + h[..., 1, :]",
        "v",
        Reading.SHARED,
    ),
    "descent": Body(
        'f = lambda h: jnp.mean((jnp.tanh(C.mm(h, q["v"])) - 0.5 * jnp.tanh(u)) ** 2)\n'
        "h = ACT(h - 0.2 * jax.grad(f)(h))\ny = h",
        params="v",
        reading=Reading.SHARED,
        longest=200,
    ),
    "residual stream": Body(
        'h = ACT(h + 0.3 * jnp.tanh(C.mm(rms(h), t["W"]) + 0.1 * u))\ny = h',
        "ACT(1.0 * u)",
        params="W",
        reading=Reading.OWN,
        longest=32,
    ),
    "gated residual stream": Body(
        'z = C.mm(rms(h), t["W"])\nh = ACT(h + 0.3 * jax.nn.silu(z) * z)\ny = h',
        "ACT(1.0 * u)",
        params="W",
        reading=Reading.OWN,
        longest=32,
    ),
}

BODIES: dict[str, Body] = {
    **{name: _sum(text) for name, text in _SUMS.items()},
    **{
        name: _average(*((made,) if isinstance(made, str) else made))
        for name, made in _AVERAGES.items()
    },
    **_OTHERS,
}
"""All bodies, by name."""
