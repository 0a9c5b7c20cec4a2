"""What an optimizer's step takes on hardware that is not there: `python -m benchmarks.optimizers`.

One matrix of 4096 x 12288 parameters with bfloat16 gradients; parameters and state are donated.
XLA's own compilers make the programs; nothing is run. Needs
`halfstep[cuda-preflight,tpu-preflight]`. flashoptim-jax is compiled beside them where it is
installed. And how long it takes to compile `init` for a billion parameters.
"""

import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Before JAX is imported: the GPU plugin would otherwise look for a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import halfstep
from benchmarks._report import parser, report, table, write
from halfstep import optim
from halfstep._preflight.preflight_errors import RefusedError

MODULE = "benchmarks.optimizers"
SHAPE = (4096, 12288)
TARGETS = ("h100", "v5e", "v5p", "v6e", "tpu7x")
BILLION = {f"layer{i}": (4096, 4096) for i in range(60)}
"""Sixty matrices, 1.007 B parameters."""
Step = Callable[[Any, Any, Any], Any]


def steps() -> dict[str, tuple[Step, Callable[[Any], Any]]]:
    """Each optimizer: its step, and what makes parameters and state."""
    found: dict[str, tuple[Step, Callable[[Any], Any]]] = {
        "optax.adamw, float32": _optax(optax.adamw(1e-3)),
    }
    made = {
        "flash_adamw": optim.flash_adamw(1e-3),
        "flash_adamw, 32 bits": optim.flash_adamw(1e-3, master_bits=32),
        "flash_lion": optim.flash_lion(1e-4),
        "flash_sgd, momentum": optim.flash_sgd(1e-2, 0.9),
        "master(compress(optax.adamw))": optim.master(optim.compress(optax.adamw(1e-3)), "split8"),
    }
    found |= {name: (tx.step, tx.prepare) for name, tx in made.items()}
    if importlib.util.find_spec("flashoptim_jax"):
        import flashoptim_jax  # pyright: ignore[reportMissingImports]

        tx = flashoptim_jax.flash_adamw(1e-3)
        found["flashoptim-jax"] = (tx.step, lambda params: _theirs(tx, params))
    return found


def _theirs(tx: Any, params: Any) -> Any:
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return low, tx.init(low)


def _optax(tx: optax.GradientTransformation) -> tuple[Step, Callable[[Any], Any]]:
    def step(params: Any, state: Any, grads: Any) -> Any:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, lambda params: (params, tx.init(params))


def compile_row(
    name: str, step: Step, make: Callable[[Any], Any], target: str, shape: tuple[int, int]
) -> dict[str, Any]:
    """One program."""
    params, state = jax.eval_shape(make, {"w": jax.ShapeDtypeStruct(shape, jnp.float32)})
    grads = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    row: dict[str, Any] = {"optimizer": name, "target": target}
    try:
        (entry,) = halfstep.preflight(
            lambda *args: step(*args),
            (params, state, grads),
            targets=target,
            donate_argnums=(0, 1),
            progress=False,
        ).entries
    except (RefusedError, halfstep.PreflightError) as error:
        return {**row, "refused": str(error).splitlines()[-1].strip()}
    count = shape[0] * shape[1]
    return {
        **row,
        "peak": round(entry.peak_bytes / count, 4) if entry.peak_bytes else None,
        "temporaries": round((entry.temp_bytes or 0) / count, 4),
        "traffic": round(entry.traffic_bytes / count, 3) if entry.traffic_bytes else None,
    }


def init_seconds() -> float:
    """Seconds to trace, lower and compile `init` for a billion parameters."""
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in BILLION.items()}
    begun = time.perf_counter()
    jax.jit(optim.flash_adamw(1e-3).init).lower(shapes).compile()
    return time.perf_counter() - begun


def measure(targets: Sequence[str], shape: tuple[int, int]) -> dict[str, Any]:
    """All rows, with what is needed to make them again."""
    jobs = [(name, *pair, target) for name, pair in steps().items() for target in targets]
    rows = []
    bar = tqdm(jobs, desc="compile", unit="step")
    for name, step, make, target in bar:
        bar.set_postfix_str(f"{name}, {target}")
        rows.append(compile_row(name, step, make, target, shape))
    results = {
        "shape": list(shape),
        "rows": rows,
        "init_of_a_billion_seconds": round(init_seconds(), 2),
    }
    return report(
        MODULE,
        results,
        packages=("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "libtpu", "flashoptim-jax"),
    )


COLUMNS = {
    "optimizer": "optimizer",
    "target": "target",
    "peak": "peak",
    "temporaries": "of it temporaries",
    "traffic": "traffic",
}


def lines(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows as they are shown."""
    return [{**row, "peak": row.get("peak") or "refused"} for row in made["rows"]]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--quick", action="store_true", help="a small matrix, two targets")
    parsed = options.parse_args(argv)
    made = measure(TARGETS[:2], (256, 256)) if parsed.quick else measure(TARGETS, SHAPE)
    write(made, parsed.json)
    if parsed.json != "-":
        print(table(lines(made), COLUMNS))
        print(f"init of a billion parameters: {made['init_of_a_billion_seconds']} s")
    return made


if __name__ == "__main__":
    main()
