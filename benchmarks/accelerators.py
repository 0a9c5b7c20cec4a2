"""Write the table of accelerators in the docs: `python -m benchmarks.accelerators [--check]`.

The page `docs/api/preflight.md` has it between two marks. It is made of the table that
`halfstep.preflight` reads, so that the page cannot say anything else.
"""

import pathlib
import sys

from benchmarks._page import update
from benchmarks._report import table
from halfstep._preflight import ACCELERATORS, Accelerator

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "api" / "preflight.md"
BEGIN, END = "<!-- accelerators -->", "<!-- end of accelerators -->"
RATES = ("float32", "tf32", "bfloat16", "float16", "float8", "int8")


def row(accelerator: Accelerator) -> dict[str, str]:
    usable = accelerator.memory_bytes * accelerator.memory_fraction
    rates = {name: accelerator.peak_flops.get(name) for name in RATES}
    return {
        "name": f"`{accelerator.name}`",
        "description": accelerator.description,
        "memory": f"{accelerator.memory_bytes / 2**30:.2f}",
        "usable": f"{usable / 2**30:.2f}",
        "bandwidth": f"{accelerator.bandwidth / 1e9:,.0f}",
        **{name: f"{rate / 1e12:,.1f}" if rate else "" for name, rate in rates.items()},
    }


def sources() -> str:
    """Where the figures are from; what every GPU shares is said once."""
    found = {accelerator.name: accelerator.sources for accelerator in ACCELERATORS.values()}
    gpus = [row.sources for row in ACCELERATORS.values() if row.platform == "cuda"]
    shared = [source for source in gpus[0] if all(source in other for other in gpus)]
    lines = []
    for name, texts in found.items():
        own = [text for text in texts if text not in shared]
        lines += [f"- `{name}`", *(f"    - {text}." for text in own)]
    return "\n".join([*lines, "- Every GPU", *(f"    - {text}." for text in shared)])


def render() -> str:
    """The table and its sources."""
    columns = {
        "name": "target",
        "description": "device",
        "memory": "memory, GiB",
        "usable": "usable, GiB",
        "bandwidth": "bandwidth, GB/s",
        **{name: name for name in RATES},
    }
    rows = [row(accelerator) for accelerator in ACCELERATORS.values()]
    return "\n\n".join([table(rows, columns), "### Sources", sources()])


def main(argv: list[str] | None = None) -> int:
    return update(
        argv,
        module="benchmarks.accelerators",
        about=__doc__,
        page=PAGE,
        name="accelerators",
        text=render(),
    )


if __name__ == "__main__":
    sys.exit(main())
