"""What autocast costs: tracing, instructions and steps on a CPU, and the error of gradients.

    python -m benchmarks.autocast --json FILE

Every figure is beside a function that is cast by hand or not cast at all, in the same process and
in turns with it. Times of steps compare ways to write bfloat16 for a CPU, which computes it in
float32; they say nothing about the speed of 16 bits.
"""

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import halfstep
from benchmarks import _traced
from benchmarks._models import DESKTOP, GPT, Model, gpt, vit
from benchmarks._report import parser, report, table, write
from benchmarks._steps import OPTIMIZER, cast_inside, float32
from benchmarks.overhead import instructions
from tests.models import gpt as _gpt

MODULE = "benchmarks.autocast"
BARE, HAND, PLAIN, ISLANDS = "float32", "by hand", "autocast, all stored", "autocast"
WAYS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        BARE: lambda loss: loss,
        HAND: cast_inside,
        PLAIN: lambda loss: halfstep.autocast(loss, "bf16,store:op:*=keep"),
        ISLANDS: lambda loss: halfstep.autocast(loss, "bf16"),
    }
)
"""A loss as it is written, and in bfloat16."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    traced: Model
    deep: Model
    """With many layers, in a scan."""
    stepped: tuple[Model, ...]
    batch: int
    """Of the steps."""
    differentiated: tuple[tuple[Model, int], ...]
    """Models and their batches."""
    seeds: int
    traces: int
    rounds: int
    programs: Callable[[], tuple[_traced.Program, ...]]
    """Whose gradient is traced by `filter_value_and_grad`, and which are explained."""


SMALL_VIT = vit(
    "small ViT", image=32, patch=4, width=128, hidden=384, heads=4, blocks=2, classes=100
)
SMALL_GPT = gpt("small GPT", vocabulary=512, tokens=64, width=128, layers=2, heads=4)
FULL = Plan(
    traced=GPT,
    deep=gpt("100 layers", vocabulary=256, tokens=64, width=64, layers=100, heads=4),
    stepped=(SMALL_VIT, SMALL_GPT),
    batch=16,
    differentiated=(
        (DESKTOP, 16),
        (
            vit(
                "ViT-Base, 4 blocks",
                image=224,
                patch=16,
                width=768,
                hidden=3072,
                heads=12,
                blocks=4,
                classes=1000,
            ),
            4,
        ),
        (gpt("GPT, 4 layers", vocabulary=4096, tokens=256, width=384, layers=4, heads=6), 4),
    ),
    seeds=3,
    traces=7,
    rounds=200,
    programs=_traced.full,
)
TINY_VIT = vit("tiny ViT", image=8, patch=4, width=16, hidden=16, heads=2, blocks=1, classes=10)
TINY_GPT = gpt("tiny GPT", vocabulary=16, tokens=8, width=16, layers=2, heads=2)
QUICK = Plan(
    traced=TINY_GPT,
    deep=gpt("8 layers", vocabulary=16, tokens=8, width=16, layers=8, heads=2),
    stepped=(TINY_VIT,),
    batch=2,
    differentiated=((TINY_GPT, 2),),
    seeds=1,
    traces=1,
    rounds=2,
    programs=_traced.quick,
)


# Tracing.


def trace_seconds(loss: Any, args: Sequence[Any]) -> tuple[float, float]:
    """CPU time of tracing and of lowering a loss with its gradient, nothing of which is cached."""
    return stage_seconds(jax.value_and_grad(loss), args)


def stage_seconds(func: Callable[..., Any], args: Sequence[Any]) -> tuple[float, float]:
    """CPU time of tracing and of lowering a function, nothing of which is cached.

    It is of this thread, which does both, so that other work on the machine does not count.
    """
    jax.clear_caches()
    gc.collect()
    start = time.thread_time()
    traced = jax.jit(func).trace(*args)
    middle = time.thread_time()
    traced.lower()
    return middle - start, time.thread_time() - middle


def trace_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row for each way and form of the layers, with ratios to the bare function."""
    heads = plan.traced.sizes["heads"]
    args = (plan.traced.shape(), *plan.traced.batch(8))
    rows = []
    for form, scan in (("scanned", True), ("written out", False)):
        # New function objects each time: JAX keeps what it has traced by the function.
        def once(way: str, scan: bool = scan) -> tuple[float, float]:
            loss = functools.partial(_gpt.loss, heads=heads, scan=scan)
            return trace_seconds(WAYS[way](loss), args)

        # The first run also imports and initializes.
        times = in_turns({way: functools.partial(once, way) for way in WAYS}, plan.traces + 1)
        for way, found in times.items():
            pairs = list(zip(found[1:], times[BARE][1:], strict=True))
            rows.append(
                {
                    "layers": form,
                    "way": way,
                    "trace_seconds": round(statistics.median(mine[0] for mine, _ in pairs), 3),
                    "lower_seconds": round(statistics.median(mine[1] for mine, _ in pairs), 3),
                    "ratio": round(
                        statistics.median(sum(mine) / sum(bare) for mine, bare in pairs), 3
                    ),
                }
            )
    return rows


EXPLAIN = "explain"


def program_seconds(program: _traced.Program, way: str) -> tuple[float, float]:
    """CPU time of tracing and of lowering a program's gradient, or of explaining the program.

    `explain` lowers nothing, and is compared with tracing the gradient by halfstep.
    """
    loss, args = program.make()
    if way == EXPLAIN:
        jax.clear_caches()
        gc.collect()
        start = time.thread_time()
        halfstep.explain(loss, "bf16")(*args)
        return time.thread_time() - start, 0.0
    gradient = eqx.filter_value_and_grad(loss)
    if way == ISLANDS:
        gradient = halfstep.filter_value_and_grad(loss, halfstep.NoLossScaling(), policy="bf16")
    arrays, static = eqx.partition(args, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def taken(arrays: Any) -> Any:
        return eqx.filter(gradient(*eqx.combine(arrays, static)), eqx.is_array)

    return stage_seconds(taken, (arrays,))


def program_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row for each program: its gradient by halfstep beside the bare one, and `explain`."""
    rows = []
    for program in plan.programs():
        ways = {
            way: functools.partial(program_seconds, program, way)
            for way in (BARE, ISLANDS, EXPLAIN)
        }
        # The first run also imports and initializes.
        found = {way: times[1:] for way, times in in_turns(ways, plan.traces + 1).items()}
        whole = {way: [sum(pair) for pair in times] for way, times in found.items()}
        traced = [trace for trace, _ in found[ISLANDS]]
        rows.append(
            {
                "program": program.name,
                "float32_seconds": round(statistics.median(whole[BARE]), 3),
                "seconds": round(statistics.median(whole[ISLANDS]), 3),
                "ratio": _ratio(whole[ISLANDS], whole[BARE]),
                "explain_seconds": round(statistics.median(whole[EXPLAIN]), 3),
                "explain_ratio": _ratio(whole[EXPLAIN], traced),
            }
        )
    return rows


def _ratio(mine: Sequence[float], others: Sequence[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(mine, others, strict=True)), 3)


def deep_seconds(plan: Plan) -> float:
    """CPU time of tracing and lowering the deep model by autocast."""
    args = (plan.deep.shape(), *plan.deep.batch(8))
    found = [
        trace_seconds(
            WAYS[ISLANDS](functools.partial(_gpt.loss, heads=plan.deep.sizes["heads"])), args
        )
        for _ in range(max(3, plan.traces) if plan.traces > 1 else 1)
    ]
    return round(statistics.median(map(sum, found)), 3)


def in_turns(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """What each returns, run in a new order each round, so that none always follows another."""
    found: dict[str, list[Any]] = {name: [] for name in runs}
    rng = np.random.default_rng(0)
    for _ in tqdm(range(rounds), unit="round"):
        for name in rng.permutation(list(runs)):
            found[name].append(runs[name]())
    return found


# Steps.


def step_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row for each model and way: its program, and its time beside the one cast by hand."""
    rows = []
    for model in plan.stepped:
        programs, carried = {}, {}
        params = model.init(jax.random.key(0))
        state = OPTIMIZER.init(eqx.filter(params, eqx.is_inexact_array))
        batch = values(model, plan.batch, seed=0)
        leaves, static = eqx.partition((params, state), eqx.is_array)
        for way in (HAND, PLAIN, ISLANDS):
            made = float32(WAYS[way](model.loss))

            def step(leaves: Any, *batch: Any, made: Any = made, static: Any = static) -> Any:
                params, state, _, value = made(*eqx.combine(leaves, static), (), *batch)
                return eqx.filter((params, state), eqx.is_array), value

            lowered = jax.jit(step, donate_argnums=0).lower(leaves, *batch)
            programs[way] = lowered.compile()
            carried[way] = jax.tree.map(jnp.copy, leaves)

        def run(way: str, programs: Any = programs, carried: Any = carried, batch: Any = batch):
            start = time.perf_counter()
            carried[way], _ = jax.block_until_ready(programs[way](carried[way], *batch))
            return time.perf_counter() - start

        times = in_turns({way: functools.partial(run, way) for way in programs}, plan.rounds)
        base = instructions(programs[HAND].as_text())
        for way, program in programs.items():
            pairs = zip(times[way], times[HAND], strict=True)
            ratios = [mine / theirs for mine, theirs in pairs][plan.rounds // 10 :]
            count = instructions(program.as_text())
            rows.append(
                {
                    "model": model.name,
                    "way": way,
                    "time_ratio": round(statistics.median(ratios), 3),
                    "instructions": count,
                    "instruction_ratio": round(count / base, 3),
                }
            )
    return rows


def values(model: Model, batch: int, *, seed: int) -> tuple[jax.Array, ...]:
    """A random batch; integers are labels or tokens."""
    keys = jax.random.split(jax.random.key(1000 + seed), 2)
    most = model.sizes.get("classes") or model.sizes["vocabulary"]
    return tuple(
        jax.random.randint(key, shape.shape, 0, most)
        if jnp.issubdtype(shape.dtype, jnp.integer)
        else jax.random.normal(key, shape.shape)
        for key, shape in zip(keys, model.batch(batch), strict=False)
    )


# Gradients.


def gradient_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row for each model and way: how far its gradients are from those of float32."""
    rows = []
    for model, size in tqdm(plan.differentiated, desc="gradients", unit="model"):
        errors: dict[str, list[float]] = {way: [] for way in WAYS if way != BARE}
        functions = {way: gradients(WAYS[way](model.loss), model) for way in WAYS}
        for seed in range(plan.seeds):
            params = eqx.filter(model.init(jax.random.key(seed)), eqx.is_array)
            batch = values(model, size, seed=seed)
            exact = functions[BARE](params, *batch)
            for way, found in errors.items():
                found.append(distance(functions[way](params, *batch), exact))
        for way, found in errors.items():
            rows.append(
                {
                    "model": model.name,
                    "batch": size,
                    "way": way,
                    "errors": [round(error, 6) for error in found],
                    "ratio": round(
                        max(mine / hand for mine, hand in zip(found, errors[HAND], strict=True)), 3
                    ),
                }
            )
    return rows


def gradients(loss: Any, model: Model) -> Callable[..., Any]:
    """The gradient as a compiled function that rounds wherever it is written."""
    static = eqx.filter(model.shape(), lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))
    return jax.jit(
        jax.grad(lambda params, *batch: loss(eqx.combine(params, static), *batch)),
        # XLA:CPU otherwise leaves out roundings to bfloat16 between two operations.
        compiler_options={"xla_allow_excess_precision": False},
    )


def distance(found: Any, exact: Any) -> float:
    """The norm of the difference of two trees beside the norm of the second."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    squares = np.sum(
        [
            [np.sum((np.float64(a) - np.float64(b)) ** 2), np.sum(np.float64(b) ** 2)]
            for a, b in pairs
        ],
        axis=0,
    )
    return float(np.sqrt(squares[0] / squares[1]))


def measure(plan: Plan) -> dict[str, Any]:
    """All rows, with what is needed to make them again."""
    return report(
        MODULE,
        {
            "policy": "bf16",
            "traced": {"name": plan.traced.name, **plan.traced.sizes},
            "deep": {"name": plan.deep.name, **plan.deep.sizes},
            "traces": plan.traces,
            "rounds": plan.rounds,
            "batch": plan.batch,
            "seeds": plan.seeds,
            "models": {
                model.name: dict(model.sizes)
                for model in (*plan.stepped, *(model for model, _ in plan.differentiated))
            },
            "trace": trace_rows(plan),
            "deep_seconds": deep_seconds(plan),
            "programs": program_rows(plan),
            "step": step_rows(plan),
            "gradient": gradient_rows(plan),
        },
        packages=(),
    )


def show(made: Mapping[str, Any]) -> str:
    """The figures, for people."""
    trace = {
        "layers": "layers",
        "way": "loss",
        "trace_seconds": "trace s",
        "lower_seconds": "lower s",
        "ratio": "to float32",
    }
    step = {
        "model": "model",
        "way": "loss",
        "time_ratio": "time to by hand",
        "instruction_ratio": "instructions to by hand",
        "instructions": "instructions",
    }
    gradient = {"model": "model", "way": "loss", "errors": "errors", "ratio": "to by hand, at most"}
    programs = {
        "program": "program",
        "float32_seconds": "float32 s",
        "seconds": "bf16 s",
        "ratio": "to float32",
        "explain_seconds": "explain s",
        "explain_ratio": "explain to tracing",
    }
    return "\n\n".join(
        [
            table(made["trace"], trace),
            table(made["programs"], programs),
            f"{made['deep']['name']} in a scan: {made['deep_seconds']} s",
            table(made["step"], step),
            table(made["gradient"], gradient),
        ]
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--quick", action="store_true", help="tiny models, few rounds")
    parsed = options.parse_args(argv)
    made = measure(QUICK if parsed.quick else FULL)
    if parsed.json != "-":
        print(show(made))
    write(made, parsed.json)
    return made


if __name__ == "__main__":
    main()
