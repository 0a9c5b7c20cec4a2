"""The tables of what plans cost, beyond those of six models: optimum, training, largest batches."""

from collections.abc import Mapping
from typing import Any

from benchmarks._images import markdown
from benchmarks._report import table

_TRAINED = (
    "Loss curves of bf16 and of both plans lie on one another; below, the differences to bf16 stay "
    "within the dashed lines of the bar"
)

BAR = 0.05
"""How much more than the optimum a selection may recompute, as a share of it."""


def excess(row: Mapping[str, Any]) -> float:
    """How much longer than the optimum a selection takes, as a share of it."""
    ours, best = row["seconds"], row["least_seconds"]
    if ours <= best:
        return 0.0
    return ours / best - 1 if best else float("inf")


def optimum_text(result: Mapping[str, Any]) -> str:
    """A row for each graph, a column for each budget."""
    shares = list(dict.fromkeys(row["share"] for row in result["rows"]))
    columns = {"graph": "graph", "residuals": "residuals", "choices": "choices"}
    columns |= {f"{share}": f"{share:.0%}" for share in shares}
    lines: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        line = lines.setdefault(row["graph"], {name: row.get(name) for name in columns})
        line[f"{row['share']}"] = _recomputed(row)
    made = result["bars"]
    return (
        f"{table(list(lines.values()), columns)}\n\n"
        "The time that recomputing takes by the model, of that with the fewest bytes stored, and "
        "in parentheses how much more that is than the exact optimum, which may store every value "
        "by itself. The columns are budgets between these bytes and those with which no "
        f"contraction is recomputed. {made['within_5_percent']} of {made['selections']} are within "
        f"{BAR:.0%} of the optimum."
    )


def _recomputed(row: Mapping[str, Any]) -> str:
    return f"{row['seconds'] / (row['most_seconds'] or 1):.1%} ({excess(row):+.1%})"


def training_text(result: Mapping[str, Any]) -> str:
    """A row for each task and policy: what its plan takes, and the losses it ends with."""
    plans = {(plan["task"], plan["policy"]): plan for plan in result["plans"]}
    lines = []
    for row in result["results"]:
        plan = plans.get((row["task"], row["policy"]))
        line = {
            "task": row["task"],
            "policy": row["policy"],
            "final": f"{row['final_loss']:.4f}",
            "held_out": f"{row['held_out_loss']:.4f}",
        }
        if plan is not None:
            share = plan["peak_bytes"] / plan["peak_without_bytes"]
            error = plan["gradient_error"]
            line |= {
                "peak": f"{plan['peak_bytes'] / 2**20:,.0f} MiB, {share:.0%}",
                "error": "no bound" if error is None else f"{error:.3f}",
                "final": f"{line['final']} ({row['final_percent']:+.2f} %)",
                "held_out": f"{line['held_out']} ({row['held_out_percent']:+.2f} %)",
            }
        lines.append(line)
    columns = {
        "task": "model and data",
        "policy": "policy",
        "peak": "peak, of that without a plan",
        "error": "gradient error",
        "final": "final loss",
        "held_out": "held-out loss",
    }
    met = sum(result["bars"].values())
    return (
        f"{markdown(_TRAINED, 'plan_training')}\n\n{table(lines, columns)}\n\n"
        f"Means of three seeds. Peaks are compiled for an H100. {met} of {len(result['bars'])} "
        f"bars are met: each loss within {result['bar_percent']} % of that without a plan, and "
        "every model learns."
    )


def batches_text(result: Mapping[str, Any]) -> str:
    """A row for each way to train, on each target."""
    lines = [
        {
            "target": row["target"],
            "way": row["way"],
            "batch": row["batch"],
            "peak": f"{row['peak_bytes'] / 2**30:,.1f} GiB",
            "again": f"{max(row['recomputed'], 0):+.1%}",
        }
        for row in result["rows"]
    ]
    columns = {
        "target": "target",
        "way": "7 B decoder, bf16",
        "batch": "largest batch",
        "peak": "peak of a device",
        "again": "recomputed FLOPs, of a step's",
    }
    return table(lines, columns)
