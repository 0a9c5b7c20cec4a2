"""What JAX's remat policies cost: the peak and the FLOPs of one GPT, compiled with each of them.

    python -m benchmarks.remat --json FILE

The GPT is the one of `benchmarks.memory`, one step of AdamW with a batch of 8, compiled for an H100
by XLA's own compiler, without one. Each policy is around each layer. Below them are plans for the
peaks that the policies reach by hand. Nothing is run.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

# Before JAX is imported: steps are traced here and compiled elsewhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from tqdm import tqdm

import halfstep
from benchmarks._models import GPT
from benchmarks._report import parser, report, table, write
from benchmarks.plan import Planned, arguments, make_step, models, step_of

MODULE = "benchmarks.remat"
POLICIES: Mapping[str, Any] = MappingProxyType(
    {
        "none: all saved": None,
        "dots_saveable": jax.checkpoint_policies.dots_saveable,
        "dots_with_no_batch_dims_saveable": (
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        ),
        "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    }
)
"""JAX's policies, around each layer."""


def measure(model: Planned) -> list[dict[str, Any]]:
    """A row for each policy: by hand in bfloat16, under autocast, and with residuals in 8 bits."""
    rows = []
    for name, policy in tqdm(POLICIES.items(), desc="remat policies"):
        of_layers: Any = functools.partial(model.loss, remat=policy is not None, saved=policy)

        def by_hand(params: Any, ids: Any, loss: Any = of_layers) -> Any:
            return loss(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), ids)

        found = halfstep.preflight(
            None,
            arguments(model),
            variants={
                "by_hand": step_of(by_hand),
                "autocast": make_step(of_layers)("bf16"),
                "e4m3": make_step(of_layers)("bf16,residuals=e4m3"),
            },
            targets="h100",
            donate_argnums=(0, 1),
            gemm="library",
            progress=False,
        )
        row: dict[str, Any] = {"policy": name}
        for entry in found.entries:
            flops = entry.contraction_flops() or {}
            row[entry.variant] = {"peak_bytes": entry.peak_bytes, "flops": sum(flops.values())}
        rows.append(row)
    return rows


def planned(model: Planned, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A plan for the peak that each policy reaches by hand, if it saves anything."""
    found = []
    for row in tqdm(rows, desc="plans"):
        budget = row["by_hand"]["peak_bytes"]
        plan = halfstep.plan(
            make_step(model.loss),
            arguments(model),
            target="h100",
            budget=budget,
            donate_argnums=(0, 1),
            gemm="library",
            progress=False,
        )
        found.append(
            {
                "policy": row["policy"],
                "budget_bytes": budget,
                "peak_bytes": plan.peak_bytes,
                "recomputed_flops": plan.recomputed_flops,
                "compiles": len(plan.front),
                "rules": [str(rule) for rule in plan.policy.stores],
            }
        )
    return found


COLUMNS = {
    "policy": "policy around each layer",
    "by_hand": "bf16 by hand",
    "autocast": "autocast, bf16",
    "e4m3": "autocast, bf16, residuals in e4m3",
    "plan": "plan for the peak by hand",
}


def text(result: Mapping[str, Any]) -> str:
    """The table: peak and recomputed FLOPs."""
    least = min(row[kind]["flops"] for row in result["rows"] for kind in ("by_hand", "autocast"))
    lines = []
    for row, plan in zip(result["rows"], result["plans"], strict=True):
        cells = {
            kind: _cell(row[kind]["peak_bytes"], row[kind]["flops"] - least)
            for kind in ("by_hand", "autocast", "e4m3")
        }
        made = _cell(plan["peak_bytes"], plan["recomputed_flops"])
        lines.append({"policy": f"`{row['policy']}`", **cells, "plan": made})
    return table(lines, COLUMNS)


def _cell(peak: int, flops: int) -> str:
    return f"{peak / 2**20:,.0f} MiB, +{max(flops, 0) / 1e12:.2f} TFLOP"


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, print, write."""
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--quick", action="store_true", help="a small model")
    given = options.parse_args(argv)
    gpt = Planned("GPT", GPT.shape(), GPT.batch(8), GPT.loss)
    model = models(quick=True)[0] if given.quick else gpt
    rows = measure(model)
    made = report(MODULE, {"rows": rows, "plans": planned(model, rows)}, packages=("scipy",))
    print(text(made))
    write(made, given.json)


if __name__ == "__main__":
    main()
