"""Plans for six models and four memory budgets each.

    python -m benchmarks.plan --json FILE --plot PNG
    python -m benchmarks.plan --resume --models "U-Net" --json FILE

Each model is compiled for an H100 and for a TPU v5e by XLA's own compilers, without either. The
budgets lie between the peak with nothing stored and that with everything stored. A plan is good if
its compiled peak is within the budget, and if it uses 95 % of it or nothing faster would fit.
Nothing is run. FILE is written after every model.
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

# Before JAX is imported: steps are traced here and compiled elsewhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import halfstep
from benchmarks._images import markdown
from benchmarks._models import BASE, GPT
from benchmarks._report import parser, report, table, write
from examples import _moe
from tests.models import convolutions, gpt

MODULE = "benchmarks.plan"
SHARES = (0.15, 0.4, 0.65, 0.9)
"""Where between nothing stored and everything stored the budgets are."""
TARGETS = ("h100", "v5e")
OPTIMIZER = optax.adamw(1e-3)
ENOUGH = 0.95
# A plan is for products by the library, as the anchors of the remat policies are.
GEMM: Mapping[str, Any] = MappingProxyType({"h100": "library", "v5e": "auto"})
Loss = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    """A model of a size for which a plan is made."""

    name: str
    params: Any
    batch: tuple[jax.ShapeDtypeStruct, ...]
    loss: Loss


def models(*, quick: bool) -> list[Planned]:
    """The six models; small ones in a quick run."""
    if quick:
        shape = functools.partial(gpt.init, vocabulary=512, tokens=128, width=64, layers=3)
        ids = jax.ShapeDtypeStruct((8, 129), jnp.int32)
        small = functools.partial(gpt.loss, heads=4)
        return [Planned("GPT by scan", _shapes(shape), (ids,), small)]
    images = jax.ShapeDtypeStruct((64, 224, 224, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    noisy = jax.ShapeDtypeStruct((64, 64, 64, 3), jnp.float32)
    text = jax.ShapeDtypeStruct((16, 1025), jnp.uint8)
    mixture = functools.partial(_moe.init, tokens=1024, width=512, layers=8, experts=8)
    six = functools.partial(gpt.init, layers=6)
    return [
        Planned("GPT by scan", GPT.shape(), GPT.batch(8), GPT.loss),
        Planned(
            "GPT written out", _shapes(six), GPT.batch(8), functools.partial(gpt.loss, scan=False)
        ),
        Planned("ViT-Base", BASE.shape(), BASE.batch(64), BASE.loss),
        Planned(
            "ResNet-50",
            _shapes(convolutions.init_resnet),
            (images, labels),
            convolutions.resnet_loss,
        ),
        Planned("U-Net", _shapes(convolutions.init_unet), (noisy, noisy), convolutions.unet_loss),
        Planned(
            "mixture of experts",
            _shapes(mixture),
            (text,),
            lambda params, text: _moe.scores(params, text, heads=8).loss,
        ),
    ]


def _shapes(init: Callable[..., Any]) -> Any:
    return jax.eval_shape(lambda key: init(key=key), jax.random.key(0))


def make_step(loss: Loss) -> Callable[[Any], Callable[..., Any]]:
    """A step with AdamW for a policy."""

    def of_policy(policy: Any) -> Callable[..., Any]:
        return step_of(halfstep.autocast(loss, policy))

    return of_policy


def step_of(loss: Loss) -> Callable[..., Any]:
    """A step with AdamW of a loss as it is."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, grads = eqx.filter_value_and_grad(loss)(params, *batch)
        arrays = eqx.filter(params, eqx.is_inexact_array)
        updates, state = OPTIMIZER.update(grads, state, arrays)
        return eqx.apply_updates(params, updates), state, value

    return step


def arguments(model: Planned) -> tuple[Any, ...]:
    """What a step is given, as shapes."""
    arrays = eqx.filter(model.params, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return model.params, eqx.filter_eval_shape(OPTIMIZER.init, arrays), *model.batch


def plans_of(model: Planned, target: str) -> list[dict[str, Any]]:
    """A row for each budget of a model on a target."""
    make = functools.partial(
        halfstep.plan,
        make_step(model.loss),
        arguments(model),
        target=target,
        donate_argnums=(0, 1),
        gemm=GEMM[target],
        progress=False,
    )
    # What does not fit on the target at all has no compiled peak to go by on a TPU: its own memory.
    ends = make(budget=None, memory_fraction=1.0)
    if len(ends.front) == 1:
        ends = make(budget=(ends.front[0].peak_bytes or 0) - 1, memory_fraction=1.0)
    peaks = [found.peak_bytes for found in ends.front if found.peak_bytes is not None]
    least, most = min(peaks), min(max(peaks), ends.budget_bytes)
    rows = []
    for share in SHARES:
        plan = make(budget=int(least + share * (most - least)), memory_fraction=1.0)
        rows.append(
            {
                "model": model.name,
                "target": target,
                "share": share,
                "nothing_stored_bytes": least,
                "all_stored_bytes": most,
                "budget_bytes": plan.budget_bytes,
                "peak_bytes": plan.peak_bytes,
                "next_bytes": plan.next_bytes,
                "recomputed_flops": plan.recomputed_flops,
                "most_recomputed_flops": max(found.recomputed_flops for found in plan.front),
                "offloaded_bytes": plan.offloaded_bytes,
                "compiles": len(plan.front),
                "estimates": [
                    [found.estimated_bytes, found.peak_bytes]
                    for found in plan.front
                    if found.estimated_bytes is not None
                ],
                "rules": [str(rule) for rule in plan.policy.stores],
            }
        )
    return rows


def is_good(row: Mapping[str, Any]) -> bool:
    """Whether a plan is within its budget, and uses it or has nothing faster within it."""
    budget = row["budget_bytes"]
    is_used = row["peak_bytes"] >= ENOUGH * budget
    nothing_faster = row["next_bytes"] is None or row["next_bytes"] > budget
    return row["peak_bytes"] <= budget and (is_used or nothing_faster)


def bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all rows together show."""
    # The last one of each plan: after the correction by what was compiled before it.
    last = [row["estimates"][-1] for row in rows if row["estimates"]]
    errors = [abs(guess / peak - 1) for guess, peak in last if peak]
    return {
        "plans": len(rows),
        "within": sum(row["peak_bytes"] <= row["budget_bytes"] for row in rows),
        "good": sum(map(is_good, rows)),
        "most_compiles": max((row["compiles"] for row in rows), default=0),
        "estimates": len(errors),
        "estimates_within_3_percent": sum(error <= 0.03 for error in errors),
        "largest_estimate_error": max(errors, default=0.0),
    }


COLUMNS = {
    "model": "model",
    "target": "target",
    "budget": "budget",
    "peak": "compiled peak",
    "used": "used",
    "next": "next faster one",
    "again": "recomputed",
    "most": "with nothing stored",
    "compiles": "compiles",
}


def lines(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """The rows of the table."""
    return [
        {
            "model": row["model"],
            "target": row["target"],
            "budget": _mib(row["budget_bytes"]),
            "peak": _mib(row["peak_bytes"]),
            "used": f"{row['peak_bytes'] / row['budget_bytes']:.0%}",
            "next": "none" if row["next_bytes"] is None else _mib(row["next_bytes"]),
            "again": f"{row['recomputed_flops'] / 1e12:.2f} TFLOP",
            "most": f"{row['most_recomputed_flops'] / 1e12:.2f} TFLOP",
            "compiles": str(row["compiles"]),
        }
        for row in result["rows"]
    ]


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def text(result: Mapping[str, Any]) -> str:
    """The table, and what it shows."""
    made = result["bars"]
    image = markdown(
        "A panel per model: plans with a lower compiled peak mostly recompute more, and those "
        "with the largest budgets next to nothing",
        "plan",
    )
    return (
        f"{image}\n\n{table(lines(result), COLUMNS)}\n\n"
        f"{made['within']} of {made['plans']} plans are within their budgets. {made['good']} use "
        f"{ENOUGH:.0%} of it, or nothing faster is expected to fit; none took more than "
        f"{made['most_compiles']} compiles. The last estimate of each plan is corrected by what "
        f"was compiled before: {made['estimates_within_3_percent']} of {made['estimates']} were "
        "within 3 % of the compiled peak; the largest error was "
        f"{made['largest_estimate_error']:.0%}."
    )


def plot(made: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw what each plan recomputes, by its peak, for every model and target."""
    from matplotlib.ticker import PercentFormatter

    from benchmarks._pictures import LIGHT, save, sheet

    names = list(dict.fromkeys(row["model"] for row in made["rows"]))
    rows = -(-len(names) // 2)
    figure = sheet(2.1 * rows + 0.5)
    axes = figure.subplots(rows, 2, squeeze=False, sharey=True).ravel()
    looks = zip(TARGETS, (LIGHT.blue, LIGHT.orange), "os", strict=True)
    looks = {target: (color, mark) for target, color, mark in looks}
    for axis, name in zip(axes, names, strict=False):
        for target, (color, mark) in looks.items():
            own = [r for r in made["rows"] if (r["model"], r["target"]) == (name, target)]
            axis.plot(
                [row["peak_bytes"] / 2**30 for row in own],
                [100 * row["recomputed_flops"] / row["most_recomputed_flops"] for row in own],
                marker=mark,
                color=color,
                label=target,
            )
        axis.set_title(name, fontsize=11)
        axis.set_ylim(-4, 100)
        axis.yaxis.set_major_formatter(PercentFormatter(decimals=0))
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    figure.supxlabel("compiled peak (GiB)", fontsize=10)
    figure.supylabel("recomputed, of what storing nothing recomputes", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    save(figure, path, made)


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, print, write."""
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--plot", type=pathlib.Path, metavar="PNG", help="draw the plans")
    options.add_argument("--quick", action="store_true", help="one small model")
    options.add_argument("--resume", action="store_true", help="go on with the run of FILE")
    options.add_argument("--models", nargs="+", metavar="NAME", help="these only")
    given = options.parse_args(argv)
    rows: list[dict[str, Any]] = []
    if given.resume and given.json and pathlib.Path(given.json).exists():
        rows = json.loads(pathlib.Path(given.json).read_text())["rows"]
    done = {(row["model"], row["target"]) for row in rows}

    def result() -> dict[str, Any]:
        return report(MODULE, {"rows": rows, "bars": bars(rows)}, packages=("scipy",))

    # All for the H100 first: XLA's TPU compiler takes minutes for a model whose layers are written
    # out.
    made_for = models(quick=given.quick)
    chosen = [model for model in made_for if model.name in (given.models or [model.name])]
    jobs = [(model, target) for target in TARGETS for model in chosen]
    order = {
        (m.name, target): at for at, (m, target) in enumerate(itertools.product(made_for, TARGETS))
    }
    bar = tqdm([job for job in jobs if (job[0].name, job[1]) not in done], unit="model")
    for model, target in bar:
        bar.set_postfix_str(f"{model.name}, {target}")
        rows += plans_of(model, target)
        rows.sort(key=lambda row: (order[row["model"], row["target"]], row["share"]))
        if given.json and given.json != "-":
            write(result(), given.json)
    made = result()
    print(text(made))
    write(made, given.json)
    if given.plot:
        plot(made, given.plot)
    if made["bars"]["good"] < len(rows):
        raise SystemExit("a plan leaves memory unused in which a faster one would fit")


if __name__ == "__main__":
    main()
