"""How much memory do 8 bits save, and how much of the gradient do they cost?

    python -m benchmarks.fp8_memory --json FILE

The step of ViT-Base is compiled for an H100, on a machine that has none, under several policies:
with products in 8 bits, and with what is kept for the backward pass in 8 bits. Beside the memory
that each saves stands how far its gradient is from float32's, of a small ViT on the CPU. The exit
status is 1 if the bar is missed: 2.8 times less than float32. Needs
`halfstep[cuda-preflight,examples]`.
"""

import dataclasses
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Before JAX is imported. The GPU plugin, which brings the compiler, would look for a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import jax.numpy as jnp
from tqdm import tqdm

import halfstep
from benchmarks._models import BASE, Model, vit
from benchmarks._report import parser, report, table, write
from benchmarks._steps import DONATED, VARIANTS, Variant, arguments, with_halfstep
from benchmarks.autocast import values

MODULE = "benchmarks.fp8_memory"
REFERENCE = "f32"
POLICIES = (REFERENCE, "bf16", "bf16,residuals=e4m3", "f8", "f8,residuals=e4m3")
BAR = 2.8
"""How many times less than float32 the best takes."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled, and of what the gradient is looked at."""

    compiled: Model
    batch: int
    differentiated: Model
    images: int
    seeds: int


FULL = Plan(
    BASE,
    128,
    vit("small ViT", image=32, patch=4, width=128, hidden=512, heads=4, blocks=4, classes=100),
    images=8,
    seeds=3,
)
QUICK = Plan(
    vit("one block", image=32, patch=4, width=64, hidden=128, heads=4, blocks=1, classes=100),
    32,
    vit("one block", image=16, patch=4, width=32, hidden=64, heads=2, blocks=1, classes=16),
    images=4,
    seeds=1,
)


def memory_row(plan: Plan, policy: str) -> dict[str, Any]:
    """What the compiled step takes, and what its trace keeps for the backward pass."""
    model = plan.compiled
    plain = policy == REFERENCE
    variant = (
        VARIANTS[REFERENCE] if plain else Variant(with_halfstep(policy), halfstep.NoLossScaling)
    )
    (entry,) = halfstep.preflight(
        variant.of(model.loss),
        arguments(variant, model, plan.batch),
        targets="h100",
        donate_argnums=DONATED,
        gemm="library",
        progress=False,
    ).entries
    kept = halfstep.explain(model.loss, policy)(model.shape(), *model.batch(plan.batch))
    return {
        "peak_bytes": entry.peak_bytes,
        "argument_bytes": entry.argument_bytes,
        "kept_bytes": dict(kept.totals.stored or {}),
    }


def gradient_of(plan: Plan, policy: str, seed: int) -> jax.Array:
    """The gradient of the small model, as one vector."""
    model = plan.differentiated
    params, static = eqx.partition(model.init(jax.random.key(seed)), eqx.is_inexact_array)

    def loss(params: Any, *batch: Any) -> Any:
        return model.loss(eqx.combine(params, static), *batch)

    # XLA:CPU computes 16-bit arithmetic in float32, and may leave out the rounding in between.
    gradient = jax.jit(
        jax.grad(halfstep.autocast(loss, policy)),
        compiler_options={"xla_allow_excess_precision": False},
    )
    made = gradient(params, *values(model, plan.images, seed=seed))
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(made)])


def gradient_row(found: Sequence[jax.Array], exact: Sequence[jax.Array]) -> dict[str, Any]:
    """Means over the seeds of how far gradients are from the exact ones."""
    pairs = list(zip(found, exact, strict=True))
    norm = jnp.linalg.norm
    cosines = [float(jnp.vdot(a, b) / (norm(a) * norm(b))) for a, b in pairs]
    errors = [float(norm(a - b) / norm(b)) for a, b in pairs]
    return {
        "cosine": round(statistics.fmean(cosines), 5),
        "relative_error": round(statistics.fmean(errors), 5),
    }


def measure(plan: Plan) -> dict[str, Any]:
    """A row for each policy, and whether the best meets the bar."""
    rows: list[dict[str, Any]] = []
    exact: list[jax.Array] = []
    bar = tqdm(POLICIES, unit="policy")
    for policy in bar:
        bar.set_postfix_str(policy)
        found = [gradient_of(plan, policy, seed) for seed in range(plan.seeds)]
        exact = exact or found
        rows.append({"policy": policy, **memory_row(plan, policy), **gradient_row(found, exact)})
    return report(
        MODULE,
        {
            "model": plan.compiled.name,
            "batch": plan.batch,
            "target": "h100",
            "differentiated": dict(plan.differentiated.sizes),
            "images": plan.images,
            "seeds": plan.seeds,
            **summarize(rows),
        },
        packages=("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"),
    )


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows with their ratios to float32, and whether the bar is met."""
    base = next(row["peak_bytes"] for row in rows if row["policy"] == REFERENCE)
    made = [{**row, "ratio": round(base / row["peak_bytes"], 3)} for row in rows]
    return {"rows": made, "bar": BAR, "passed": max(row["ratio"] for row in made) >= BAR}


COLUMNS = {
    "policy": "policy",
    "peak": "peak MiB",
    "ratio": "f32 / this",
    "kept": "kept for the backward pass, MiB",
    "cosine": "cosine of the gradient",
    "error": "its relative error",
}


def lines(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table, for people."""
    return [
        {
            "policy": f"`{row['policy']}`",
            "peak": f"{row['peak_bytes'] / 2**20:,.0f}",
            "ratio": f"{row['ratio']:.2f}" if row["policy"] != REFERENCE else "",
            "kept": f"{sum(row['kept_bytes'].values()) / 2**20:,.0f}",
            "cosine": f"{row['cosine']:.5f}",
            "error": f"{100 * row['relative_error']:.2f} %",
        }
        for row in made["rows"]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, "Memory and gradients with 8 bits.")
    options.add_argument("--quick", action="store_true", help="one block: half a minute")
    parsed = options.parse_args(argv)
    made = measure(QUICK if parsed.quick else FULL)
    write(made, parsed.json)
    if parsed.json != "-":
        print(table(lines(made), COLUMNS))
        print(f"{'met   ' if made['passed'] else 'MISSED'}  {BAR} times less than {REFERENCE}")
    # One block says nothing of a large model.
    return 0 if made["passed"] or parsed.quick else 1


if __name__ == "__main__":
    sys.exit(main())
