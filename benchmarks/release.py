"""Peak memory with and without gradient release: `python -m benchmarks.release --json`.

Steps are compiled by XLA's own compilers for hardware that is not there. Needs
`halfstep[cuda-preflight,tpu-preflight]`. Nothing is run or timed.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Before JAX is imported. Steps are traced here and compiled elsewhere; the GPU plugin, which brings
# the compiler, would otherwise look for a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from tqdm import tqdm

import halfstep
from benchmarks import _llama
from benchmarks._report import add_sources, parser, read_or_make, report, table, write
from halfstep import optim
from halfstep._preflight.preflight_errors import RefusedError
from tests.models.stack import Stack as Model, gradients_first, mlp

MODULE = "benchmarks.release"
PLAIN, RELEASED = "gradients first", "release"
CLIPPED, SCALED = "release, clip", "release, loss scaling"


def llama(
    *,
    layers: int = 32,
    width: int = 4096,
    hidden: int = 11008,
    vocabulary: int = 32000,
    tokens: int = 2048,
) -> Model:
    """LLaMA's 7 B shape."""
    sizes = {"layers": layers, "width": width, "hidden": hidden, "vocabulary": vocabulary}
    return Model(
        "LLaMA",
        _llama.shapes(**sizes),
        {"layer": _llama.layer, "first": _llama.first, "last": _llama.last},
        lambda examples: jax.ShapeDtypeStruct((examples, tokens + 1), jnp.int32),
        {**sizes, "tokens": tokens},
    )


@dataclasses.dataclass(frozen=True)
class Runs:
    """A model for one target, with so many examples on each device."""

    model: Model
    target: str
    devices: int
    examples: int
    steps: tuple[str, ...]


BOTH = (PLAIN, RELEASED)
ALL = (*BOTH, CLIPPED, SCALED)
FULL = (
    Runs(mlp(), "h100", 1, 64, ALL),
    Runs(mlp(), "v5e", 1, 64, ALL),
    Runs(llama(), "h100", 1, 1, BOTH),
    Runs(llama(), "v5p:2x2x1", 4, 1, BOTH),
)
SMALL = mlp(layers=4, width=256, hidden=512)
QUICK = (Runs(SMALL, "h100", 1, 16, BOTH), Runs(SMALL, "v5e", 1, 16, BOTH))


def step_of(name: str, model: Model, tx: Any) -> Callable[..., Any]:
    """A step by its name."""
    if name == PLAIN:
        return gradients_first(model, tx)
    return optim.release(tx=tx, clip=1.0 if name == CLIPPED else None, **model.functions)


def divided(args: tuple[Any, ...], devices: int) -> tuple[Any, ...]:
    """Arguments on devices: matrices and their state by their rows, the batch by its examples."""
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))

    def of(path: Any, leaf: Any) -> Any:
        number, names = path[0].idx, [getattr(p, "key", getattr(p, "name", "")) for p in path[1:]]
        stacked = "layers" in names
        spec = P()
        if number == 2:
            spec = P("data")
        elif leaf.ndim == 2 + stacked:
            spec = P(None, "data") if stacked else P("data")
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(of, args)


def compile_row(runs: Runs, name: str) -> dict[str, Any]:
    """What a compiler says about one step."""
    model, tx = runs.model, optim.flash_adamw(1e-3)
    step = step_of(name, model, tx)
    state = jax.eval_shape(optim.release(tx=tx, **model.functions).init, model.params)
    args: tuple[Any, ...] = (model.params, state, model.batch(runs.examples * runs.devices))
    if name == SCALED:
        args = (*args, jax.eval_shape(halfstep.DynamicLossScaling))
    if runs.devices > 1:
        args = divided(args, runs.devices)
    row: dict[str, Any] = {
        "model": model.name,
        "parameters": model.count,
        "target": runs.target,
        "devices": runs.devices,
        "examples": runs.examples,
        "step": name,
    }
    try:
        (entry,) = halfstep.preflight(
            lambda *args: step(*args),
            args,
            targets=runs.target,
            donate_argnums=(0, 1),
            progress=False,
        ).entries
    except RefusedError as error:
        return {**row, "refused": str(error).splitlines()[-1].strip()}
    peak = entry.peak_bytes
    return {
        **row,
        "peak_bytes": peak,
        "argument_bytes": entry.argument_bytes,
        "temp_bytes": entry.temp_bytes,
        "traffic_bytes": entry.traffic_bytes,
        "usable_bytes": entry.usable_bytes,
        "fits": entry.fits,
        "gemm": entry.gemm,
        # All devices together.
        "bytes_per_parameter": None if peak is None else peak * runs.devices / model.count,
    }


def measure(plan: Sequence[Runs]) -> dict[str, Any]:
    """All rows, with what is needed to make them again."""
    jobs = [(runs, name) for runs in plan for name in runs.steps]
    rows = []
    bar = tqdm(jobs, desc="compile", unit="step")
    for runs, name in bar:
        bar.set_postfix_str(f"{runs.model.name}, {runs.target}, {name}")
        rows.append(compile_row(runs, name))
    models = {runs.model.name: dict(runs.model.sizes) for runs in plan}
    return report(
        MODULE,
        {"models": models, "optimizer": "flash_adamw, 24 bits", "rows": rows},
        packages=("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "libtpu"),
    )


def lines(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows as they are shown."""
    shown = []
    for row in made["rows"]:
        line = {
            "model": f"{row['model']}, {row['parameters'] / 1e9:.2f} B",
            "target": row["target"],
            "step": row["step"],
        }
        if row.get("peak_bytes") is None:
            shown.append({**line, "peak": "refused" if "refused" in row else "does not fit"})
            continue
        shown.append(
            {
                **line,
                "peak": f"{row['peak_bytes'] / 2**20:,.0f}",
                "temporaries": f"{row['temp_bytes'] / 2**20:,.0f}",
                "each": f"{row['bytes_per_parameter']:.2f}",
                "fits": "yes" if row["fits"] else "no",
            }
        )
    return shown


COLUMNS = {
    "model": "model",
    "target": "target",
    "step": "step",
    "peak": "peak MiB a device",
    "temporaries": "of it temporaries",
    "each": "bytes a parameter",
    "fits": "fits",
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(MODULE, __doc__ or "")
    add_sources(options, quick="a small model, two targets")
    parsed = options.parse_args(argv)
    made = read_or_make(parsed, lambda: measure(QUICK if parsed.quick else FULL))
    write(made, parsed.json)
    if parsed.json != "-":
        print(table(lines(made), COLUMNS))
    return made


if __name__ == "__main__":
    main()
