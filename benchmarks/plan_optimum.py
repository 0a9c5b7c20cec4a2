"""How far a plan's selection is from the best one: small graphs, solved exactly.

    python -m benchmarks.plan_optimum --json FILE

A plan decides about results of contractions, as far as rules can name them. The exact optimum of
the same graph may store every value by itself: an integer program that is solved without any gap.
Both get the same bytes, and the times are compared that recomputing and storing take by the model
of the target. The graphs have at most 60 residuals; nothing is compiled or run.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Before JAX is imported: steps are only traced.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from tqdm import tqdm

import halfstep
from benchmarks._plan_tables import BAR, excess, optimum_text
from benchmarks._report import parser, report, write
from examples import _moe
from halfstep._autocast import collected_plans
from halfstep._policy import Policy
from halfstep._preflight.planning.candidates import EVERYTHING, Tape, tape
from halfstep._preflight.planning.choices import choices
from halfstep._preflight.planning.selection import Form, Problem, Selection, select
from halfstep._preflight.target.accelerators import ACCELERATORS
from tests.models import convolutions, gpt

MODULE = "benchmarks.plan_optimum"
TARGET = ACCELERATORS["h100"]
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where between the fewest bytes and those of no recomputed contraction the budgets are."""
MOST = 60
"""Residuals of a small graph."""


@dataclasses.dataclass(frozen=True, eq=False)
class Small:
    """A function that is differentiated, and the shapes of its arguments."""

    name: str
    loss: Callable[..., Any]
    args: tuple[Any, ...]


def graphs() -> list[Small]:
    """Small graphs of several kinds."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    image = shape((32, 64, 64, 3))
    ids = jax.ShapeDtypeStruct((8, 1025), jnp.int32)
    decoder = functools.partial(gpt.init, vocabulary=512)
    resnet = functools.partial(convolutions.init_resnet, blocks=(1,), classes=10)
    experts = functools.partial(_moe.init, tokens=1024, width=512, layers=2, experts=8)
    return [
        Small("perceptron of 6 widths", _perceptron, (_widths(), shape((8192, 256)))),
        Small("layers in scopes", _scoped, (_widths(), shape((8192, 256)))),
        Small("recurrent cell", _recurrent, (shape((1024, 2048)), shape((64, 32, 512)))),
        Small("GPT by scan", gpt.loss, (_of(decoder, layers=4), ids)),
        Small(
            "GPT written out",
            functools.partial(gpt.loss, scan=False),
            (_of(decoder, layers=1), ids),
        ),
        Small(
            "ResNet",
            functools.partial(convolutions.resnet_loss, blocks=(1,)),
            (_of(resnet), image, jax.ShapeDtypeStruct((32,), jnp.int32)),
        ),
        Small(
            "U-Net",
            convolutions.unet_loss,
            (_of(functools.partial(convolutions.init_unet, levels=1)), image, image),
        ),
        Small(
            "mixture of experts",
            lambda params, text: _moe.scores(params, text, heads=8).loss,
            (_of(experts), jax.ShapeDtypeStruct((8, 1025), jnp.uint8)),
        ),
    ]


def _of(init: Callable[..., Any], **sizes: int) -> Any:
    return jax.eval_shape(lambda key: init(**sizes, key=key), jax.random.key(0))


SIZES = (256, 2048, 512, 4096, 256, 1024, 128)


def _widths() -> list[Any]:
    return [jax.ShapeDtypeStruct(pair, jnp.float32) for pair in itertools.pairwise(SIZES)]


def _perceptron(weights: Sequence[Any], x: Any) -> Any:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def _scoped(weights: Sequence[Any], x: Any) -> Any:
    for number, weight in enumerate(weights):
        with jax.named_scope(f"layer_{number}"):
            x = jax.nn.gelu(x @ weight)
    return jnp.mean(x**2)


def _recurrent(weights: Any, steps: Any) -> Any:
    """A cell with four gates, over a sequence."""
    zeros = jnp.zeros((steps.shape[1], weights.shape[1] // 4))

    def cell(carry: Any, x: Any) -> Any:
        hidden, memory = carry
        gates = jnp.concatenate([x, hidden], axis=-1) @ weights
        new, forget, give, out = jnp.split(gates, 4, axis=-1)
        memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(give) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(out) * jnp.tanh(memory)
        return (hidden, memory), hidden

    return jnp.mean(jax.lax.scan(cell, (zeros, zeros), steps)[1] ** 2)


def traced(graph: Small) -> Tape:
    """Everything that the derivative of a function could recompute."""
    policy = dataclasses.replace(Policy.parse("bf16"), stores=(EVERYTHING,))
    with collected_plans() as found:
        jax.eval_shape(jax.grad(halfstep.autocast(graph.loss, policy)), *graph.args)
    return tape(found, TARGET)


def recomputing(problem: Problem) -> Problem:
    """The same without the host: what is not stored is recomputed."""
    kept = tuple(tuple(form for form in forms if form.name == "keep") for forms in problem.groups)
    return dataclasses.replace(problem, groups=kept)


def alone(problem: Problem, made: Tape) -> Problem:
    """The same graph where every value may be stored by itself.

    The ends of parts that are recomputed apart stay stored: they bound what is there at once while
    the backward pass runs, of which a selection knows nothing.
    """
    groups = tuple(
        (
            Form(
                "keep",
                place.bytes,
                seconds=0.0 if place.is_dear else 2 * place.bytes / TARGET.bandwidth,
            ),
        )
        for place in made.places
    )
    makes = [operation.makes for operation in problem.operations]
    group_of = [number for number, results in enumerate(makes) for _ in results]
    required = frozenset(number for number, place in enumerate(made.places) if place.is_anchor)
    return Problem(problem.operations, groups, tuple(group_of), problem.needed, required)


def compare(graph: Small) -> list[dict[str, Any]]:
    """A row for each budget: what a plan recomputes, and what the optimum does."""
    made = traced(graph)
    planned = recomputing(choices(made, TARGET).problem)
    exact = alone(planned, made)
    least = _solved(planned, smallest=True)
    most = _solved(planned)
    rows = []
    for share in SHARES:
        memory = least.bytes + share * (most.bytes - least.bytes)
        ours = _solved(planned, memory=memory)
        best = _solved(exact, memory=memory, gap=0.0)
        rows.append(
            {
                "graph": graph.name,
                "residuals": len(made.needed),
                "operations": len(made.places),
                "choices": len(planned.groups),
                "share": share,
                "budget_bytes": int(memory),
                "stored_bytes": ours.bytes,
                "seconds": ours.seconds,
                "least_seconds": best.seconds,
                "most_seconds": least.seconds,
                "recomputed_flops": ours.flops,
                "least_flops": best.flops,
            }
        )
    return rows


def _solved(problem: Problem, **options: Any) -> Selection:
    found = select(problem, **options)
    if found is None:
        raise SystemExit(f"no selection is within {options}: the budgets are wrong")
    return found


def bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all rows together show."""
    return {
        "selections": len(rows),
        "within_5_percent": sum(excess(row) <= BAR for row in rows),
        "most_residuals": max((row["residuals"] for row in rows), default=0),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Trace, solve, print, write."""
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--quick", action="store_true", help="two graphs")
    given = options.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for graph in tqdm(graphs()[: 2 if given.quick else None], unit="graph"):
        rows += compare(graph)
    made = report(MODULE, {"rows": rows, "bars": bars(rows)}, packages=("scipy",))
    print(optimum_text(made))
    write(made, given.json)


if __name__ == "__main__":
    main()
