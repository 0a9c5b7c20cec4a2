"""Write the table of accelerators in the docs: `python -m benchmarks.accelerators [--check]`.

The page `docs/api/preflight.md` has it between two marks. It is made of the table that
`halfstep.preflight` reads, so that the page cannot say anything else.
"""

import argparse
import pathlib
import re
import sys

from benchmarks._report import table
from halfstep._preflight import ACCELERATORS, Accelerator

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "api" / "preflight.md"
BEGIN, END = "<!-- accelerators -->", "<!-- end of accelerators -->"
MARKED = re.compile(rf"{BEGIN}\n.*?{END}\n", re.DOTALL)
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
    arguments = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerators", description=__doc__
    )
    arguments.add_argument("--check", action="store_true", help="fail if the page would change")
    check = arguments.parse_args(argv).check
    old = PAGE.read_text()
    if not MARKED.search(old):
        print(f"{PAGE.name} has no {BEGIN} ... {END}")
        return 1
    new = MARKED.sub(lambda _: f"{BEGIN}\n\n{render()}\n\n{END}\n", old)
    if new == old:
        return 0
    print(f"{'stale' if check else 'wrote'}: {PAGE.name}")
    if not check:
        PAGE.write_text(new)
    return 1 if check else 0


if __name__ == "__main__":
    sys.exit(main())
