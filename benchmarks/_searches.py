"""How long `debug.first_nonfinite` takes until its answer, compared with one run of the step."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array
from tqdm import tqdm

from benchmarks._models import DESKTOP, Model, gpt
from benchmarks._steps import OPTIMIZER
from halfstep import autocast, debug
from tests.models import gpt as written

STAGES = ("forward", "backward")
_LAYERS = 3
_HEADS = 8

Loss = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss, its parameters and a batch."""

    name: str
    loss: Loss
    params: Any
    batch: tuple[Array, ...]


def programs(batch: int = 4) -> list[Program]:
    """One convolution, a CNN, a ViT, and a GPT as a loop and written out."""
    name = "GPT, a scan over its layers"
    loop = gpt(name, vocabulary=256, tokens=128, width=256, layers=4, heads=_HEADS)
    loss = functools.partial(written.loss, heads=_HEADS, remat=False, scan=False)
    out = dataclasses.replace(loop, name="GPT, layers written out", loss=loss)
    return [_convolution(), _cnn(), *(_of(model, batch) for model in (DESKTOP, loop, out))]


def small() -> list[Program]:
    """One that compiles fast, for tests."""
    return [_convolution()]


def _of(model: Model, batch: int) -> Program:
    params, static = eqx.partition(model.init(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params: Any, *data: Any) -> Any:
        return model.loss(eqx.combine(params, static), *data)

    return Program(model.name, loss, params, tuple(map(example, model.batch(batch))))


def example(aval: jax.ShapeDtypeStruct) -> jax.Array:
    """A batch of a shape."""
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return jnp.arange(aval.size, dtype=aval.dtype).reshape(aval.shape) % 10
    return jax.random.normal(jax.random.key(1), aval.shape, aval.dtype)


def _conv(x: Array, kernel: Array) -> Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


def _convolution() -> Program:
    kernel = 0.1 * jax.random.normal(jax.random.key(0), (3, 3, 8, 16))
    x = jax.random.normal(jax.random.key(1), (8, 32, 32, 8))

    def loss(params: Any, x: Array) -> Array:
        return jnp.mean(jax.nn.relu(_conv(x, params["kernel"])))

    return Program("one convolution", loss, {"kernel": kernel}, (x,))


def _cnn() -> Program:
    keys = jax.random.split(jax.random.key(0), _LAYERS + 2)
    widths = (3, 16, 32, 32)
    layers = [
        {
            "kernel": 0.1 * jax.random.normal(keys[at], (3, 3, *widths[at : at + 2])),
            "scale": jnp.ones(widths[at + 1]),
            "bias": jnp.zeros(widths[at + 1]),
        }
        for at in range(_LAYERS)
    ]
    params = {"layers": layers, "head": 0.1 * jax.random.normal(keys[-2], (widths[-1], 10))}
    x = jax.random.normal(keys[-1], (16, 16, 16, 3))

    def loss(params: Any, x: Array, labels: Array) -> Array:
        for layer in params["layers"]:
            x = _conv(x, layer["kernel"])
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
            x = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["bias"]
            x = jax.nn.relu(x)
        logits = x.mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return Program("CNN with BatchNorm", loss, params, (x, jnp.arange(16) % 10))


def planted(program: Program, stage: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step in bfloat16 that goes wrong in a pass, and its arguments."""
    leaves, tree = jax.tree.flatten(program.params)
    middle = len(leaves) // 2
    if stage == "forward":
        # Finite, and too large for everything that is computed with it.
        leaves[middle] = jnp.full_like(leaves[middle], 3e38)
    params = jax.tree.unflatten(tree, leaves)

    def loss(params: Any, *batch: Any) -> Any:
        value = program.loss(params, *batch)
        if stage == "backward":
            # The norm of zeros is zero, and its derivative is zero over zero.
            value += jnp.linalg.norm(0 * jax.tree.leaves(params)[middle].ravel())
        return value

    mixed = autocast(loss, "bf16")

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(mixed)(params, *batch)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, OPTIMIZER.init(params), *program.batch)


def searches(chosen: Sequence[Program], *, rounds: int) -> list[dict[str, Any]]:
    """One row for each program and pass in which it goes wrong."""
    rows = []
    cases = [(program, stage) for program in chosen for stage in STAGES]
    for program, stage in tqdm(cases, desc="search", unit="step"):
        step, args = planted(program, stage)
        times: dict[str, list[float]] = {"run": [], "search": []}
        found = None
        for _ in range(rounds):
            jax.clear_caches()
            start = time.perf_counter()
            jax.block_until_ready(jax.jit(step)(*args))
            middle = time.perf_counter()
            jax.clear_caches()
            again = time.perf_counter()
            found = debug.first_nonfinite(step, *args)
            times["search"].append(time.perf_counter() - again)
            times["run"].append(middle - start)
        ratios = [a / b for a, b in zip(times["search"], times["run"], strict=True)]
        rows.append(
            {
                "program": program.name,
                "pass": stage,
                "found": "" if found is None else found.site.op,
                "found_pass": "" if found is None else found.site.stage,
                "run_seconds": round(statistics.median(times["run"]), 2),
                "search_seconds": round(statistics.median(times["search"]), 2),
                "ratio": round(statistics.median(ratios), 2),
            }
        )
    return rows
