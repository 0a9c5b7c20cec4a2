"""The peak of the step of `docs/preflight.md` by role: two targets, in float32 and in bfloat16.

    python -m benchmarks.preflight_roles --json FILE --plot PNG
    python -m benchmarks.preflight_roles --from FILE --plot PNG

The step is the one that the page's first block defines, compiled by XLA's own compilers for an H100
and for a TPU v5e, without either. Nothing is run.
"""

import functools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

# Before JAX is imported: steps are traced here and compiled elsewhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import halfstep
from benchmarks._report import add_sources, parser, read_or_make, report, write

MODULE = "benchmarks.preflight_roles"
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "preflight.md"
TARGETS, POLICIES = ("h100", "v5e"), ("f32", "bf16")
QUICK_TARGETS, QUICK_EXAMPLES = ("h100",), 64
ROLES: Mapping[str, str] = MappingProxyType(
    {
        "parameters": "blue",
        "optimizer state": "green",
        "batch": "gray",
        "temporaries": "orange",
    }
)
"""The roles that can be seen, and their colors in a theme; the others are drawn as one."""


def step_of_the_page() -> dict[str, Any]:
    """The names that the page's first block defines, without its call of preflight."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    code = blocks[0].partition("report = halfstep.preflight(")[0]
    namespace: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), namespace)
    return namespace


def measure(targets: Sequence[str], examples: int | None) -> list[dict[str, Any]]:
    """A row for each target and policy."""
    page = step_of_the_page()
    x, y = page["x"], page["y"]
    if examples is not None:
        x = y = jax.ShapeDtypeStruct((examples, *x.shape[1:]), jnp.float32)
    found = halfstep.preflight(
        None,
        (page["model"], page["opt_state"], x, y),
        variants={name: functools.partial(page["step"], policy=name) for name in POLICIES},
        targets=targets,
        donate_argnums=(0, 1),
    )
    return [
        {
            "target": entry.target,
            "policy": entry.variant,
            "examples": x.shape[0],
            "peak_bytes": entry.peak_bytes,
            "usable_bytes": entry.usable_bytes,
            "memory": dict(entry.memory),
        }
        for entry in found.entries
    ]


def plot(made: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw a bar per target and policy, made of its roles."""
    from benchmarks._pictures import LIGHT, save, sheet

    rows = made["rows"]
    figure = sheet(1.7 + 0.55 * len(rows))
    axes = figure.subplots()
    ends = [0.0] * len(rows)
    others = {role for row in rows for role in row["memory"]} - set(ROLES)
    for role, color in (*((role, getattr(LIGHT, name)) for role, name in ROLES.items()), OTHERS):
        names = others if role == OTHERS[0] else {role}
        sizes = [sum(row["memory"].get(name, 0) for name in names) / 2**30 for row in rows]
        # Less than a hundredth of the widest bar would be an entry of the legend without a bar.
        if max(sizes) > 0.01 * max(row["peak_bytes"] for row in rows) / 2**30:
            axes.barh(range(len(rows)), sizes, left=ends, color=color, label=role, height=0.66)
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    for place, (row, end) in enumerate(zip(rows, ends, strict=True)):
        size = f"{row['peak_bytes'] / 2**30:.2f} GiB"
        axes.text(end + 0.02 * max(ends), place, size, va="center")
    axes.set_yticks(range(len(rows)), [f"{row['target']}, {row['policy']}" for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.28 * max(ends))
    axes.set_xlabel("peak memory (GiB), compiled, not run")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    save(figure, path, made)


OTHERS = ("other", "#57606a")


def text(result: Mapping[str, Any]) -> str:
    """The picture, and what it is of."""
    from benchmarks._images import markdown

    targets = list(dict.fromkeys(row["target"] for row in result["rows"]))
    alt = (
        "Stacked bars of the peak by role, for an H100 and a TPU v5e, in float32 and bfloat16. "
        "Parameters and optimizer state take the same everywhere; temporaries shrink in bfloat16"
    )
    return (
        f"The same step for {' and '.join(f'`{target}`' for target in targets)}, each in float32 "
        f"and in bfloat16, by role:\n\n{markdown(alt, 'preflight_roles')}\n\n"
        "`python -m benchmarks.pictures preflight_roles` draws it from the last saved run."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, or read an earlier report; write and draw it."""
    options = parser(MODULE, __doc__ or "")
    add_sources(options, drawn="the roles", quick="a small batch, and one target")
    given = options.parse_args(argv)
    size = (QUICK_TARGETS, QUICK_EXAMPLES) if given.quick else (TARGETS, None)
    packages = ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "libtpu")
    made = read_or_make(given, lambda: report(MODULE, {"rows": measure(*size)}, packages=packages))
    write(made, given.json)
    if given.plot:
        plot(made, given.plot)
    if given.json != "-":
        for row in made["rows"]:
            print(f"{row['target']}, {row['policy']}: {row['peak_bytes'] / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
