"""Which implementation updates a parameter on each accelerator: `python -m benchmarks.kernels`.

`flash_adamw` on one matrix of 4096 x 12288 with bfloat16 gradients; parameters and state are
donated. XLA's own compilers make the programs; nothing is run. Needs
`halfstep[cuda-preflight,tpu-preflight]`. The rows of another version of JAX are taken from an
earlier report: `--with FILE`.
"""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

# Before JAX is imported: the GPU plugin would otherwise look for a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from tqdm import tqdm

import halfstep
from benchmarks._report import parser, report, table, write
from halfstep import optim
from halfstep._preflight.target.accelerators import ACCELERATORS

MODULE = "benchmarks.kernels"
SHAPE = (4096, 12288)
TARGETS = tuple(ACCELERATORS)
# What a kernel is called in a program, and by what it was made.
KERNELS = {"mosaic_gpu": "Mosaic GPU kernel", "tpu_custom_call": "Mosaic TPU kernel"}


def compile_row(target: str, shape: tuple[int, int]) -> dict[str, Any]:
    """One program."""
    tx = optim.flash_adamw(1e-3)
    args = jax.eval_shape(tx.prepare, {"w": jax.ShapeDtypeStruct(shape, jnp.float32)})
    grads = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    (entry,) = halfstep.preflight(
        tx.step, (*args, grads), targets=target, donate_argnums=(0, 1), progress=False
    ).entries
    called = " ".join(name for name, _ in entry.uncounted)
    made = [text for name, text in KERNELS.items() if name in called]
    count = shape[0] * shape[1]
    return {
        "jax": jax.__version__,
        "target": target,
        "implementation": made[0] if made else "XLA, two passes",
        "peak": round((entry.peak_bytes or 0) / count, 4),
        "temporaries": round((entry.temp_bytes or 0) / count, 4),
        "traffic": round((entry.traffic_bytes or 0) / count, 3),
    }


def measure(
    targets: Sequence[str], shape: tuple[int, int], kept: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """All rows, with what is needed to make them again."""
    rows = [compile_row(target, shape) for target in tqdm(targets, desc="compile", unit="target")]
    others = [dict(row) for row in kept if row["jax"] != jax.__version__]
    return report(
        MODULE,
        {"shape": list(shape), "rows": [*rows, *others]},
        packages=("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "libtpu"),
    )


COLUMNS = {
    "jax": "JAX",
    "targets": "accelerators",
    "implementation": "implementation",
    "peak": "peak",
    "temporaries": "temporaries",
    "traffic": "traffic",
}


def lines(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows as they are shown: accelerators with the same figures share one."""
    shown: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in made["rows"]:
        figures = {name: row[name] for name in COLUMNS if name in row}
        line = shown.setdefault(tuple(figures.values()), {**figures, "targets": []})
        line["targets"].append(row["target"])
    return [{**line, "targets": ", ".join(line["targets"])} for line in shown.values()]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--quick", action="store_true", help="a small matrix, three targets")
    options.add_argument("--with", dest="kept", metavar="FILE", help="a report of another JAX")
    parsed = options.parse_args(argv)
    kept = json.loads(pathlib.Path(parsed.kept).read_text())["rows"] if parsed.kept else ()
    if parsed.quick:
        made = measure(("h100", "l4", "v5e"), (256, 256), kept)
    else:
        made = measure(TARGETS, SHAPE, kept)
    write(made, parsed.json)
    if parsed.json != "-":
        print(table(lines(made), COLUMNS))
    return made


if __name__ == "__main__":
    main()
