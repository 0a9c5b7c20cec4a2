"""Keras on JAX, with the policy `mixed_float16` and `LossScaleOptimizer`."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks._peers import _jax, _probe

keras: Any = importlib.import_module("keras")

keras.config.set_dtype_policy("mixed_float16")
PARTS = (keras.mixed_precision, keras.dtype_policies, keras.optimizers)


class Body(keras.layers.Layer):
    """A function of a weight, as a layer."""

    def __init__(self, func: Callable[..., Any], value: Any):
        super().__init__()
        self.func = func
        self.w = self.add_weight(
            shape=np.shape(value), initializer=lambda shape, dtype: jnp.asarray(value, dtype)
        )
        self.built = True

    def call(self, x: Any) -> Any:
        return self.func(self.w, x)


class Outer(keras.Model):
    """A model of one layer: it is in calling this one that Keras casts."""

    def __init__(self, layer: Any):
        super().__init__()
        self.layer = layer
        self.trains = isinstance(layer, keras.layers.Dense)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.layer(x, training=training) if self.trains else self.layer(x)


def called(func: Callable[..., Any], value: Any) -> Any:
    """The layer as a function of its weight and input."""
    model = Outer(Body(func, value))

    def call(w: Any, x: Any) -> Any:
        made, _ = model.stateless_call([w], [], x)
        return jnp.sum(made.astype(jnp.float32))

    return call


def _low(func: Callable[..., Any]) -> tuple[int, int]:
    found = _jax.dots(jax.grad(called(func, _jax.W)), _jax.W, _jax.X)
    return sum("32" not in dtype for dtype in found), len(found)


def products() -> _probe.Found:
    dense = keras.layers.Dense(4)
    dense.build((2, 4))
    weights = [v.value for v in dense.trainable_variables]
    model = Outer(dense)
    layer = _jax.dots(lambda ws, x: model.stateless_call(ws, [], x)[0], weights, _jax.X)
    plain = _jax.dots(lambda w, x: keras.ops.matmul(x, w), _jax.W, _jax.X)
    return _probe.count(
        (layer == ["float16"]) + (plain == ["float16"]),
        2,
        f"The product of `Dense` is in {layer[0]}, that of a function which is not a layer in "
        f"{plain[0]}.",
    )


def carry() -> _probe.Found:
    low, every = _low(_jax._rnn)
    error = _probe.error_of(lambda: jax.grad(called(_jax._filled, _jax.W))(_jax.W, _jax.X))
    rnn = keras.layers.SimpleRNN(4)
    own = str(rnn(jnp.ones((1, 3, 4))).dtype)
    return _probe.count(
        (low == every) + (error is None) + (own == "float16"),
        3,
        f"A recurrent network in a layer: {low} of {every} products in low precision. A carry that "
        f"is filled by a product: {error or 'runs'}. Its own `SimpleRNN` computes in {own}.",
    )


def branches() -> _probe.Found:
    def func(w: Any, x: Any) -> Any:
        return keras.ops.cond(
            x[0, 0] > 0, lambda: keras.ops.matmul(x, w), lambda: jnp.zeros((2, 4))
        )

    error = _probe.error_of(lambda: jax.jit(called(func, _jax.W))(_jax.W, _jax.X))
    return _probe.decide(error is None, f"`ops.cond` in a layer: {error or 'runs'}.")


def sums() -> _probe.Found:
    ops, one = keras.ops, jnp.ones(())
    cases: dict[str, tuple[Callable[..., Any], Any, float]] = {
        "a sum of 4,096 times 256": (
            lambda w, x: ops.sum(w * x),
            jnp.full(4096, 256.0),
            4096 * 256.0,
        ),
        "a mean of squares of 400": (
            lambda w, x: ops.mean(ops.square(w * x)),
            jnp.full(64, 400.0),
            160000.0,
        ),
        "a cross-entropy over 128,256 classes": (
            lambda w, x: ops.logsumexp(w * x) - (w * x)[0],
            jnp.zeros(128256),
            math.log(128256),
        ),
    }
    values = {name: float(called(func, one)(one, x)) for name, (func, x, _) in cases.items()}
    good = sum(abs(values[name] / cases[name][2] - 1) < 0.01 for name in cases)
    shown = ", ".join(f"{k} is {values[k]:.6g} (exactly {cases[k][2]:.6g})" for k in cases)
    return _probe.count(good, len(cases), f"In a layer {shown}.")


def shared() -> _probe.Found:
    def func(w: Any, x: Any) -> Any:
        def turn(c: Any, x: Any) -> Any:
            return c + (w * x).astype(jnp.float32), None

        return jax.lax.scan(turn, jnp.zeros((), jnp.float32), x)[0]

    got = float(jax.grad(called(func, jnp.ones(())))(jnp.ones(()), jnp.ones(4096)))
    return _probe.decide(got == 4096, f"It is {got:g}, exactly 4096.")


def leaves() -> _probe.Found:
    layer = Body(lambda w, x: x, jnp.ones(()))
    given = {"ids": jnp.array([2049]), "phase": jnp.array([1 + 3j]), "key": jax.random.key(0)}
    seen = {}
    for name, leaf in given.items():
        made: list[Any] = []
        error = _probe.error_of(lambda leaf=leaf, made=made: made.append(layer(leaf)))
        seen[name] = error or str(made[0].dtype)
    good = sum(seen[name] == str(leaf.dtype) for name, leaf in given.items())
    shown = ", ".join(f"{name}: {what}" for name, what in seen.items())
    return _probe.count(good, len(given), f"A layer receives {shown}.")


def statistics() -> _probe.Found:
    norm = keras.layers.BatchNormalization(momentum=0.0)
    norm(jnp.array([[-400.0], [400.0]] * 32), training=True)
    var = norm.moving_variance
    value = float(var.value[0])
    return _probe.decide(
        var.dtype == "float32" and abs(value / 160000 - 1) < 0.05,
        f"`BatchNormalization.moving_variance` is {value:g} in {var.dtype}.",
    )


# The scale of the loss.


def made(scale: float, interval: int = 2000, inner: Any = None, size: int = 1) -> tuple[Any, Any]:
    """An optimizer and its variable."""
    inner = keras.optimizers.SGD(1.0) if inner is None else inner
    optimizer = keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=scale, dynamic_growth_steps=interval
    )
    w = keras.Variable(jnp.zeros(size), dtype="float32")
    optimizer.build([w])
    return optimizer, w


def stepper(optimizer: Any) -> Any:
    """A step with gradients that are those of the scaled loss, in float16."""

    @jax.jit
    def step(w: Any, state: Any, x: Any) -> Any:
        scale = state[INDEX["dynamic_scale"]]
        grads = (scale * x).astype(jnp.float16).astype(jnp.float32)
        (w,), state = optimizer.stateless_apply(state, [grads], [w])
        return w, state

    names = [v.name for v in optimizer.variables]
    INDEX["dynamic_scale"] = names.index("dynamic_scale")
    return step


INDEX: dict[str, int] = {}


def scale_of(state: Any) -> float:
    return float(state[INDEX["dynamic_scale"]])


def begin(optimizer: Any, w: Any) -> tuple[Any, Any]:
    return w.value, [v.value for v in optimizer.variables]


def float32_loss() -> _probe.Found:
    optimizer, _ = made(2.0**15)
    prediction = jnp.full(1024, math.sqrt(2.21), jnp.float16)
    loss = keras.losses.MeanSquaredError()(jnp.zeros(1024), prediction)
    scaled = optimizer.scale_loss(loss)
    return _probe.decide(
        bool(jnp.isfinite(scaled)),
        f"A loss of {float(loss):.4g} in {loss.dtype}, at a scale of 32,768, is {float(scaled):g}.",
    )


def growth() -> _probe.Found:
    optimizer, w = made(2.0**10, 3)
    step, (w, state), seen = stepper(optimizer), begin(optimizer, w), []
    for _ in range(6):
        new, state = step(w, state, jnp.full(1, 0.5))
        seen.append(float((w - new)[0]))
        w = new
    assert scale_of(state) > 2.0**10
    return _probe.decide(set(seen) == {0.5}, f"Updates of 0.5 are {', '.join(map(str, seen))}.")


def bounds() -> _probe.Found:
    parts, good = [], 0
    for name, x, interval in (("bad steps", math.nan, 2000), ("steps that could grow", 0.0, 1)):
        optimizer, variable = made(2.0**15, interval)
        step, (w, state) = stepper(optimizer), begin(optimizer, variable)
        for _ in range(400):
            w, state = step(w, state, jnp.full(1, x))
        end, after = scale_of(state), []
        for _ in range(150):
            new, state = step(w, state, jnp.full(1, 0.125))
            after.append(float((w - new)[0]))
            w = new
        right = 0.125 in after[-2:]
        good += right and 0 < end < math.inf
        then = "right" if right else f"{after[-1]:g} instead of 0.125"
        parts.append(f"After 400 {name} the scale is {end:g}, and updates later are {then}")
    return _probe.count(good, 2, f"{'. '.join(parts)}.")


def skip() -> _probe.Found:
    optimizer, variable = made(2.0**10, inner=keras.optimizers.AdamW(1e-2), size=8)
    step, (w, state) = stepper(optimizer), begin(optimizer, variable)
    w, state = step(w, state, jnp.full(8, 0.5))
    new, after = step(w, state, jnp.full(8, 0.5).at[3].set(jnp.inf))
    mine = [i for i, v in enumerate(optimizer.variables) if v.path.count("adam")]
    same = [bool(jnp.array_equal(new, w)), *(bool((state[i] == after[i]).all()) for i in mine)]
    return _probe.decide(
        all(same) and len(same) > 2,
        f"After a bad batch {sum(same)} of {len(same)} arrays of parameters and AdamW's state are "
        "as before.",
    )


def metric() -> _probe.Found:
    optimizer, variable = made(2.0**10)
    step, (w, state) = stepper(optimizer), begin(optimizer, variable)
    _, state = step(w, state, jnp.ones(1))
    return _probe.decide(
        scale_of(state) == 1024,
        f"It is given gradients only; the scale of 1024 is {scale_of(state):g} afterwards.",
    )


def names_leaf() -> _probe.Found:
    optimizer, w = made(2.0**10)
    state = [v.value for v in optimizer.variables]
    said = optimizer.stateless_apply(state, [jnp.full(1, jnp.inf)], [w.value])
    names = ", ".join(f"`{v.name}`" for v in optimizer.variables)
    assert len(said) == 2, said
    return _probe.Found("no", f"A step returns parameters and state, which is {names}.")


def shards() -> _probe.Found:
    """Gradients that lie on four devices, one of which is bad."""
    optimizer, variable = made(2.0**10, size=4)
    step, (w, state) = stepper(optimizer), begin(optimizer, variable)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = jnp.ones(4).at[2].set(jnp.inf)
    new, state = step(w, state, jax.device_put(x, NamedSharding(mesh, P("data"))))
    same = bool(jnp.array_equal(new, w))
    return _probe.decide(
        same and scale_of(state) == 512,
        f"One of four devices is bad: the step is skipped on all ({same}), and the scale is "
        f"{scale_of(state):g} instead of 1024.",
    )


# The rest.


def checkpoint() -> _probe.Found:
    optimizer, variable = made(2.0**12, 5)
    step, (w, state) = stepper(optimizer), begin(optimizer, variable)
    for x in (0.5, 0.5, math.nan, 0.5, 0.5, 0.5):
        w, state = step(w, state, jnp.full(1, x))
    for variable, value in zip(optimizer.variables, state, strict=True):
        variable.assign(value)
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    other, _ = made(2.0**12, 5)
    other.load_own_variables(store)
    pairs = zip(optimizer.variables, other.variables, strict=True)
    same = [bool((a.value == b.value).all()) for a, b in pairs]
    return _probe.count(
        sum(same), len(same), f"`save_own_variables`: {sum(same)} of {len(same)} come back."
    )


def rules() -> _probe.Found:
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_float16")
    policies["head"] = keras.dtype_policies.DTypePolicy("float32")
    head = keras.layers.Dense(4, name="head", dtype=policies)
    body = keras.layers.Dense(4, name="body", dtype=policies)
    seen = [str(layer(jnp.ones((2, 4))).dtype) for layer in (body, head)]
    return _probe.Found(
        "partly" if seen == ["float16", "float32"] else "no",
        f"A `DTypePolicyMap` for `head`: layers compute in {seen[0]} and {seen[1]}. It is for "
        "layers, and each has to be given it.",
    )


def microbatches() -> _probe.Found:
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer, variable = made(2.0**10, inner=inner)
    step, (w, state) = stepper(optimizer), begin(optimizer, variable)
    seen = []
    for x in (0.5, math.inf, 0.5, 0.5):
        w, state = step(w, state, jnp.full(1, x))
        seen.append(float(w[0]))
    # Two microbatches are one step: that with the bad one is to be left out as a whole.
    return _probe.decide(
        seen == [0.0, 0.0, 0.0, -0.5],
        "Microbatches of 0.5, infinity, 0.5 and 0.5, two a step: the parameter is "
        f"{', '.join(f'{v:g}' for v in seen)}, and 0, 0, 0, -0.5 if the bad step is left out.",
    )


def eight() -> _probe.Found:
    """What `quantize` makes of a layer and its gradient."""
    layer = keras.layers.Dense(32, use_bias=False, dtype="float32")
    layer.build((16, 32))
    layer.quantize("float8")
    model = Outer(layer)
    weights = [v.value for v in model.trainable_variables]
    rest = [v.value for v in model.non_trainable_variables]

    def loss(ws: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(model.stateless_call(ws, rest, x, training=True)[0]))

    func, args = jax.grad(loss, argnums=(0, 1), allow_int=True), (weights, jnp.ones((16, 32)))
    low, _ = _jax.in_8_bits(func, *args)
    text = str(jax.make_jaxpr(func)(*args))
    casts = [name for name in ("f8_e4m3fn", "f8_e5m2") if name in text]
    assert low.answer == "no", low
    assert len(casts) == 2, casts
    return _probe.Found(
        "partly",
        f"Operands are rounded to {' and '.join(casts)} and back, forward and backward; the "
        "products themselves are in float32, for a compiler to change.",
    )


def stored_bytes() -> _probe.Found:
    w = keras.Variable(jnp.zeros((1024, 1024)))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(1e-3))
    optimizer.build([w])
    return _jax.stored([w.value, *(v.value for v in optimizer.variables)], 1024**2)


def newest() -> _probe.Found:
    error = _probe.error_of(lambda: keras.layers.Dense(4)(_jax.X))
    return _probe.decide(error is None, f"A layer on JAX {jax.__version__}: {error or 'runs'}.")


PROBES = {
    **{
        probe.__name__: probe
        for probe in (
            products,
            carry,
            branches,
            sums,
            shared,
            leaves,
            statistics,
            rules,
            float32_loss,
            growth,
            bounds,
            skip,
            metric,
            names_leaf,
            shards,
            checkpoint,
            microbatches,
            stored_bytes,
            newest,
        )
    },
    **_probe.absences(PARTS, "why", "limit", "release", "memory", "bisect"),
    "fp8": eight,
    "fp8_backward": eight,
    "no_device": lambda: _probe.imports_without_a_device("keras"),
}

if __name__ == "__main__":
    _probe.report(PROBES, "keras", "jax")
