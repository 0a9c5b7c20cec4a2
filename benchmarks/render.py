"""Write the tables in the docs from the results: `python -m benchmarks.render [--check]`.

A page says `<!-- numbers: NAME -->` where the table of `benchmarks/results/NAME.json` goes; it ends
at `<!-- end of numbers -->`. Nobody writes a measured number into a page by hand.
"""

import argparse
import json
import pathlib
import re
import sys
from typing import Any

from benchmarks._report import RESULTS, table

DOCS = pathlib.Path(__file__).parents[1] / "docs"
END = "<!-- end of numbers -->"
MARK = re.compile(rf"<!-- numbers: (\w+) -->\n(?:.*?{END}\n)?", re.DOTALL)


def made_by(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"Printed by `{result['command']}` with {versions}."


def overhead(result: dict[str, Any]) -> str:
    columns = {
        "step": "step",
        "time": "time",
        "gated": "time, to by hand with select",
        "instructions": "instructions",
        "temporaries": "temporary memory",
    }
    rows = [
        {
            "step": row["step"],
            "time": f"{row['time_ratio']:.3f}",
            "gated": f"{row['time_ratio_to_gated']:.3f}",
            "instructions": f"{row['instruction_ratio']:.3f} ({row['instructions']:,})",
            "temporaries": f"{row['temporary_ratio']:.3f} ({row['temporaries'] / 2**20:.1f} MiB)",
        }
        for row in result["rows"]
    ]
    model = result["model"]
    text = (
        f"Ratios to the float16 step written by hand without a gate: a {model['kind']} of "
        f"{model['blocks']} blocks and width {model['width']}, batch {model['batch']}, AdamW, on a "
        f"CPU. Instructions and memory are exact, from XLA's optimized program. The times are "
        f"medians over {result['rounds']} interleaved rounds, and vary by about a hundredth from "
        "run to run. They compare wrappers of one program, and say nothing about the speed of 16 "
        "bits. What a gate costs beside none is reading all gradients once more for the verdict."
    )
    return f"{table(rows, columns)}\n\n{text}"


def fashion_mnist(result: dict[str, Any]) -> str:
    columns = {"policy": "policy", "mean": "mean", "seeds": "seeds", "difference": "to f32"}
    rows = [
        {
            "policy": f"`{policy}`",
            "mean": f"{row['mean']:.2f} %",
            "seeds": ", ".join(f"{value:.2f}" for value in row["test_accuracy_percent"]),
            "difference": f"{row['difference_to_f32_points']:+.2f}" if policy != "f32" else "",
        }
        for policy, row in result["policies"].items()
    ]
    forced, settings = result["forced"], result["settings"]
    text = (
        f"Accuracy on the {result['test_images']:,} test images after {settings['steps']} steps of "
        f"batch {settings['batch']}. One more float16 run began at a loss scale of "
        f"{forced['initial_loss_scale']:,.0f}, far too high: it skipped {forced['skipped']} steps "
        f"and reached {forced['test_accuracy_percent']:.2f} %."
    )
    image = "![Loss, accuracy and loss scale of the three policies](images/fashion_mnist.png)"
    return f"{table(rows, columns)}\n\n{text}\n\n{image}"


RENDERERS = (overhead, fashion_mnist)


def render(page: str) -> str:
    """A page with every marked table written anew."""
    renderers = {renderer.__name__: renderer for renderer in RENDERERS}

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        result = json.loads((RESULTS / f"{name}.json").read_text())
        body = f"{renderers[name](result)}\n\n{made_by(result)}"
        return f"<!-- numbers: {name} -->\n\n{body}\n\n{END}\n"

    return MARK.sub(replace, page)


def main(argv: list[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.render", description=__doc__)
    arguments.add_argument("--check", action="store_true", help="fail if a page would change")
    check = arguments.parse_args(argv).check
    stale = []
    for path in sorted(DOCS.rglob("*.md")):
        old = path.read_text()
        new = render(old)
        if new != old:
            stale.append(path)
            if not check:
                path.write_text(new)
    for path in stale:
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(DOCS.parent)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
