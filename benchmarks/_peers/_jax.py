"""Probes of libraries for JAX that cast and scale the loss: each one's step is its README's."""

import dataclasses
import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec as P

from benchmarks._peers._probe import Found, count, decide, error_of

W, X = jnp.eye(4) * 0.5, jnp.ones((2, 4))


@dataclasses.dataclass(frozen=True)
class Library:
    """How one takes a step with it, in float16."""

    gradient: Callable[..., Any]
    """Of a loss and the state of its scale: a function that returns the loss, what else the
    function returned, the next state, whether all was finite, and gradients."""
    begin: Callable[..., Any]
    """The state, from a scale and after how many good steps it grows."""
    scale: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    """Parameters and optimizer state after a step, from the optimizer, gradients and verdict."""
    select: Callable[..., Any] | None = None
    """Of a verdict, a new tree and an old one."""
    floor: float | None = None
    """What `begin` says is the smallest scale."""
    axis: Callable[..., Any] | None = None
    """`gradient` inside `shard_map`, if it is told of the axis."""


# Casting.


def operands(func: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
    """The dtypes of the operands of all products that a function is traced to."""
    return [
        (str(one.aval.dtype), str(other.aval.dtype))
        for one, other in _products(jax.make_jaxpr(func)(*args).jaxpr)
    ]


def dots(func: Callable[..., Any], *args: Any) -> list[str]:
    """The wider dtype of the operands of all products."""
    return [max(pair, key=lambda d: "32" in d) for pair in operands(func, *args)]


def _products(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn.invars
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _products(inner)


def in_8_bits(func: Callable[..., Any], *args: Any) -> tuple[Found, Found]:
    """Of a gradient: whether products are in 8 bits, and those of the backward pass."""
    seen = operands(func, *args)
    low = [pair for pair in seen if all("float8" in one for one in pair)]
    wide = [pair for pair in low if any("e5m2" in one for one in pair)]
    shown = ", ".join(" x ".join(pair) for pair in sorted(set(seen)))
    evidence = f"{len(low)} of {len(seen)} products of a layer's gradient are in 8 bits: {shown}."
    return count(len(low) - len(wide), 1, evidence), count(len(wide), 2, evidence)


def gradient_of(library: Library, func: Callable[..., Any], scale: float = 1.0) -> Any:
    """The gradients alone."""
    return lambda *args: library.gradient(func, library.begin(scale))(*args)[4]


def _low(library: Library, func: Callable[..., Any], *args: Any) -> tuple[int, int]:
    found = dots(gradient_of(library, func), *args)
    return sum("32" not in dtype for dtype in found), len(found)


@jax.custom_vjp
def _custom(w: Any, x: Any) -> Any:
    return x @ w


_custom.defvjp(lambda w, x: (x @ w, (w, x)), lambda res, g: (res[1].T @ g, g @ res[0].T))

NESTED: dict[str, Callable[..., Any]] = {
    "plain": lambda w, x: jnp.tanh(x @ w) @ w,
    "jit": lambda w, x: jax.jit(lambda w, x: x @ w)(w, x),
    "remat": lambda w, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x),
    "custom_vjp": _custom,
    "scan": lambda w, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.stack([w, w]))[
        0
    ],
}


def total(func: Callable[..., Any]) -> Callable[..., Any]:
    """A loss, in float32."""
    return lambda w, x: jnp.sum(func(w, x).astype(jnp.float32))


def products(library: Library) -> Found:
    """Products of an unchanged function."""
    seen = {name: _low(library, total(func), W, X) for name, func in NESTED.items()}
    good = sum(low == every for low, every in seen.values())
    shown = ", ".join(f"{name} {low} of {every}" for name, (low, every) in seen.items())
    return count(good, len(seen), f"Products in low precision, with their gradients: {shown}.")


def _rnn(w: Any, x: Any) -> Any:
    def cell(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w + h @ w)
        return h, h

    return jax.lax.scan(cell, jnp.zeros(4), x)[0]


def _filled(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, x: (x @ w, None), jnp.zeros(4), x)[0]


def carry(library: Library) -> Found:
    """Loops whose carry the user begins with float32 zeros."""
    low, every = _low(library, total(_rnn), W, X)
    error = error_of(lambda: gradient_of(library, total(_filled))(W, X))
    evidence = (
        f"A recurrent network: {low} of {every} products in low precision. A carry that is filled"
    )
    evidence += " by a product: " + ("runs." if error is None else f"{error}.")
    return count((low == every) + (error is None), 2, evidence)


def branches(library: Library) -> Found:
    """One branch is a product, the other one zeros."""

    def func(w: Any, x: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.zeros((2, 4)))

    error = error_of(lambda: gradient_of(library, total(func))(W, X))
    return decide(error is None, "Runs." if error is None else f"{error}.")


def sums(library: Library) -> Found:
    """What overflows in float16 unless it is computed in float32."""
    ones = jnp.ones(())

    def entropy(w: Any, x: Any) -> Any:
        return jax.nn.logsumexp(w * x) - (w * x)[0]

    cases: dict[str, tuple[Callable[..., Any], Any, float]] = {
        "a sum of 4,096 times 256": (
            lambda w, x: jnp.sum(w * x),
            jnp.full(4096, 256.0),
            4096 * 256.0,
        ),
        "a mean of squares of 400": (
            lambda w, x: jnp.mean((w * x) ** 2),
            jnp.full(64, 400.0),
            160000.0,
        ),
        "a cross-entropy over 128,256 classes": (entropy, jnp.zeros(128256), math.log(128256)),
    }
    values = {
        name: float(library.gradient(func, library.begin(1.0))(ones, x)[0])
        for name, (func, x, _) in cases.items()
    }
    good = [name for name in cases if abs(values[name] / cases[name][2] - 1) < 0.01]
    shown = ", ".join(
        f"{name} is {values[name]:.6g} (exactly {cases[name][2]:.6g})" for name in cases
    )
    return count(len(good), len(cases), f"{shown[0].upper()}{shown[1:]}.")


def shared(library: Library) -> Found:
    """The gradient of a weight that 4096 iterations share."""

    def loss(w: Any, x: Any) -> Any:
        def turn(c: Any, x: Any) -> Any:
            return c + (w * x).astype(jnp.float32), None

        return jax.lax.scan(turn, jnp.zeros((), jnp.float32), x)[0]

    got = float(gradient_of(library, loss)(jnp.ones(()), jnp.ones(4096)))
    return decide(got == 4096, f"It is {got:g}, exactly 4096.")


def leaves(library: Library) -> Found:
    """Leaves that are not floating-point arrays, in the batch."""
    batch = {
        "key": jax.random.key(0),
        "ids": jnp.array([2049, 4097]),
        "phase": jnp.array([1 + 3j]),
        "none": None,
        "text": "relu",
    }

    def loss(w: Any, batch: Any) -> Any:
        noise = jnp.sum(w * jax.random.uniform(batch["key"], (4,)))
        phase = jnp.dot(batch["phase"], batch["phase"]).imag
        return noise + phase + jnp.sum(batch["ids"]).astype(jnp.float32) / 6146

    exact = float(loss(jnp.ones(4), batch))
    made: list[float] = []
    error = error_of(
        lambda: made.append(
            float(library.gradient(loss, library.begin(1.0))(jnp.ones(4), batch)[0])
        )
    )
    good = error is None and abs(made[0] / exact - 1) < 0.01
    seen = error or f"a loss of {made[0]:.4g}, exactly {exact:.4g}"
    evidence = f"A batch with a key, whole and complex numbers, `None` and text: {seen}."
    if library.select is None:
        return decide(good, evidence)
    select = library.select
    error = error_of(lambda: select(jnp.asarray(False), batch, batch))
    return count(
        good + (error is None), 2, f"{evidence} To keep such a tree in a bad step: {error or 'ok'}."
    )


def statistics(library: Library) -> Found:
    """A running mean of squares that the loss takes and returns beside its value."""

    def loss(w: Any, running: Any, x: Any) -> Any:
        running = 0.9 * running + 0.1 * jnp.mean(jnp.square(x))
        return jnp.mean(w * x), running

    func = library.gradient(loss, library.begin(1.0), has_aux=True)
    given = (jnp.ones(64), jnp.float32(160000.0), jnp.full(64, 400.0))
    new = func(*given)[1]
    good = new.dtype == jnp.float32 and abs(float(new) / 160000 - 1) < 0.01
    return decide(
        bool(good), f"A running variance of 160,000 comes back as {float(new):g} in {new.dtype}."
    )


# The scale of the loss.


def dot(w: Any, x: Any) -> Any:
    """A loss whose gradient is `x`."""
    return jnp.sum(w * x)


def float32_loss(library: Library) -> Found:
    """A loss that times its scale is beyond float16."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(w * x)

    args = (jnp.ones(1024), jnp.full(1024, 2.21))
    value, _, _, finite, grads = library.gradient(loss, library.begin(2.0**15))(*args)
    right = abs(float(value) / 2.21 - 1) < 0.01 and bool(finite)
    right = right and bool(abs(grads.sum() / 2.21 - 1) < 0.01)
    return decide(
        right,
        f"A loss of 2.21 at a scale of 32,768 is reported as {float(value):.4g}, "
        f"finite={bool(finite)}.",
    )


def growth(library: Library) -> Found:
    """Gradients of the same batch, in the step before the scale grows and in that one."""
    scaling, seen, scales = library.begin(2.0**10, 3), [], []
    func = jax.jit(lambda s, w, x: library.gradient(dot, s)(w, x)[2:5:2])
    for _ in range(6):
        scaling, grads = func(scaling, jnp.ones(2), jnp.full(2, 0.5))
        seen.append(float(grads[0]))
        scales.append(float(library.scale(scaling)))
    if len(set(scales)) < 2:
        raise AssertionError(f"the scale did not grow: {scales}")
    return decide(set(seen) == {0.5}, f"Gradients of 0.5 are {', '.join(f'{g:g}' for g in seen)}.")


def bounds(library: Library) -> Found:
    """Where the scale ends after long series of good and bad steps, and what comes after."""

    @jax.jit
    def step(scaling: Any, x: Any) -> Any:
        _, _, scaling, _, grads = library.gradient(dot, scaling)(jnp.ones(2), x)
        return scaling, grads

    parts, good = [], 0
    for name, x, period in (
        ("400 bad steps", jnp.full(2, jnp.nan), 2000),
        ("400 steps that could grow", jnp.zeros(2), 1),
    ):
        scaling = library.begin(2.0**15, period)
        for _ in range(400):
            scaling, _ = step(scaling, x)
        end = float(library.scale(scaling))
        after = []
        for _ in range(150):
            scaling, grads = step(scaling, jnp.full(2, 2.0**-3))
            after.append(float(grads[0]))
        right = 2.0**-3 in after[-2:]  # A scale that can grow in each step fails in each other.
        odd = "" if end == math.inf or math.log2(end or 3).is_integer() else ", no power of two"
        works = right and end < math.inf and math.log2(end or 3).is_integer()
        if name.endswith("bad steps") and library.floor not in (None, end):
            works, odd = False, f" (the floor was {library.floor:g})"
        good += works
        then = "right" if right else f"{after[-1]:g} instead of 0.125"
        parts.append(f"After {name} the scale is {end:g}{odd}, and the gradients later are {then}")
    return count(good, 2, f"{'. '.join(parts)}.")


def skip(library: Library) -> Found:
    """A step with a bad batch: parameters and state, bit for bit."""
    optimizer = optax.adamw(1e-2)

    @jax.jit
    def step(params: Any, state: Any, scaling: Any, x: Any) -> Any:
        _, _, scaling, finite, grads = library.gradient(dot, scaling)(params, x)
        params, state = library.update(params, optimizer, state, grads, finite)
        return params, state, scaling

    params = jnp.ones(8)
    kept = (params, optimizer.init(params), library.begin(2.0**10))
    kept = step(*kept, jnp.full(8, 0.5))
    new = step(*kept, jnp.full(8, 0.5).at[3].set(jnp.inf))
    same = [
        np.array_equal(a, b, equal_nan=True)
        for a, b in zip(jax.tree.leaves(new[:2]), jax.tree.leaves(kept[:2]), strict=True)
    ]
    bad = int(jnp.sum(jnp.isnan(new[0])))
    return decide(
        all(same),
        f"After a bad batch {sum(same)} of {len(same)} arrays of parameters and AdamW's state are "
        f"as before; {bad} of 8 parameters are NaN.",
    )


def names_leaf(library: Library) -> Found:
    """What the verdict of a bad step says of the leaf that was bad."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(params["encoder"]["w"]) + jnp.sum(params["decoder"]["w"] * x)

    params = {"decoder": {"w": jnp.ones(2)}, "encoder": {"w": jnp.ones(2)}}
    finite = library.gradient(loss, library.begin(1.0))(params, jnp.full(2, jnp.inf))[3]
    where = getattr(finite, "where", None)
    text = f"{finite!r} {where(params)}" if where is not None else repr(finite)
    return decide("decoder" in text, f"The verdict is `{' '.join(text.split())}`.")


def shards(library: Library) -> Found:
    """One of four devices overflows: do all of them see it?"""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    gradient = library.axis or library.gradient

    def step(scaling: Any, w: Any, x: Any) -> Any:
        scaling = gradient(dot, scaling)(w, x)[2]
        return jnp.asarray(library.scale(scaling)).reshape(1)

    options = {"mesh": mesh, "in_specs": (P(), P(), P("data")), "out_specs": P("data")}
    try:
        func = jax.shard_map(step, check_vma=False, **options)
    except (AttributeError, TypeError):
        from jax.experimental.shard_map import shard_map

        func = shard_map(step, check_rep=False, **options)
    scales = jax.jit(func)(library.begin(2.0**15), jnp.ones(1), jnp.ones(4).at[2].set(jnp.inf))
    shown = ", ".join(f"{float(scale):g}" for scale in scales)
    return decide(len(set(np.asarray(scales).tolist())) == 1, f"Scales of the devices: {shown}.")


def metric(library: Library) -> Found:
    """A metric that is infinite, beside a loss and gradients that are not."""

    def loss(w: Any) -> Any:
        return jnp.sum(w), {"perplexity": jnp.asarray(jnp.inf, jnp.float32)}

    _, _, new, finite, _ = library.gradient(loss, library.begin(2.0**10), has_aux=True)(jnp.ones(2))
    scale = float(library.scale(new))
    return decide(
        bool(finite) and scale == 1024,
        f"The scale of 1024 is {scale:g} afterwards, finite={bool(finite)}.",
    )


# The rest.


def checkpoint(library: Library) -> Found:
    """The state of the scale in the middle of a run, pickled, and as the arrays of its leaves."""
    func = jax.jit(lambda s, x: library.gradient(dot, s)(jnp.ones(2), x)[2])
    good = jnp.full(2, 0.5)
    kept = library.begin(2.0**12, 5)
    for x in (good, good, jnp.full(2, jnp.nan), good, good, good):
        kept = func(kept, x)

    def pickled() -> Any:
        return pickle.loads(pickle.dumps(kept))

    def arrays() -> Any:
        file = io.BytesIO()
        np.savez(file, *[np.asarray(leaf) for leaf in jax.tree.leaves(kept)])
        file.seek(0)
        found = np.load(file)
        new = [jnp.asarray(found[f"arr_{i}"]) for i in range(len(found.files))]
        return jax.tree.unflatten(jax.tree.structure(library.begin(2.0**12, 5)), new)

    results = {}
    for name, way in (("pickle", pickled), ("arrays of its leaves", arrays)):
        wrong: list[str] = []

        def compare(way: Callable[[], Any] = way, wrong: list[str] = wrong) -> None:
            back = way()
            for field in vars(kept) if hasattr(kept, "__dict__") else kept._fields:
                if not np.array_equal(getattr(back, field), getattr(kept, field)):
                    wrong.append(f"`{field}` is {getattr(back, field)}")
            one, other = kept, back
            for _ in range(12):
                one, other = func(one, good), func(other, good)
            if float(library.scale(one)) != float(library.scale(other)):
                wrong.append(f"goes on at {float(library.scale(other)):g}")

        error = error_of(compare)
        results[name] = error or ", ".join(wrong) or "same bits"
    same = sum(result == "same bits" for result in results.values())
    return count(same, 2, "; ".join(f"{name}: {result}" for name, result in results.items()) + ".")


def stored(made: Any, parameters: int) -> Found:
    """Bytes a parameter, of parameters and optimizer state."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(made)) / parameters
    return Found(
        "yes" if size < 8 else "no",
        f"{size:.2f} bytes per parameter for parameters and state of AdamW.",
        f"{size:.2f}",
    )


def plain_adamw() -> Found:
    """Parameters of float32 and Optax's AdamW, which is what libraries that have none leave."""
    params = jnp.zeros((1024, 1024))
    return stored((params, optax.adamw(1e-3).init(params)), params.size)


def newest(library: Library) -> Found:
    """A step on the JAX that we are tested with."""
    error = error_of(lambda: gradient_of(library, dot)(jnp.ones(1), jnp.ones(1)))
    return decide(
        error is None, f"A step on JAX {jax.__version__}: {'runs' if error is None else error}."
    )


def all_of(library: Library) -> dict[str, Callable[[], Found]]:
    """Every probe here."""
    probes = (
        products,
        carry,
        branches,
        sums,
        shared,
        leaves,
        statistics,
        float32_loss,
        growth,
        bounds,
        skip,
        names_leaf,
        shards,
        metric,
        checkpoint,
        newest,
    )
    return {probe.__name__: lambda probe=probe: probe(library) for probe in probes}
