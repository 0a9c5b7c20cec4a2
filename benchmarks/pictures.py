"""Draw the pictures of the docs: `python -m benchmarks.pictures [NAME ...] [--check]`.

Each is drawn from its result, for light pages and for dark ones, and holds the digest of it: with
`--check`, pictures that are of another result fail, and those that belong to none. Pictures that
the package's own functions have drawn get a dark one, made of their pixels.
"""

import argparse
import importlib
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks._images import dark_path, digest, digest_of_file, source_of
from benchmarks._report import RESULTS

IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images"
DRAWN: Mapping[str, str] = MappingProxyType(
    {
        "memory": "benchmarks._figure",
        "overview": "benchmarks._overview",
        "scale": "benchmarks._scale_figure",
        "fashion_mnist": "benchmarks.fashion_mnist",
        "plan": "benchmarks.plan",
        "preflight_roles": "benchmarks.preflight_roles",
        "loss_scaling": "benchmarks.loss_scaling",
        **dict.fromkeys(
            ("training", "optim_training", "plan_training", "fp8_training", "fp8_outliers"),
            "benchmarks._curves",
        ),
    }
)
"""Of each picture of a result, the module whose `plot` draws it."""
RESULT_OF: Mapping[str, str] = MappingProxyType({"overview": "memory"})
"""The results of pictures that are not named like them."""
SHOWN: Mapping[str, str] = MappingProxyType(
    {
        "debug-map": "`python -m docs.generators.shown`",
        "debug-live": "`python -m docs.generators.shown`",
        "debug-compare": "`python -m docs.generators.shown`",
        "example-cnn": "`python -m examples.cnn_batchnorm`",
        "example-moe": "`python -m examples.moe_fp8`",
        "example-plain": "`python -m examples.plain_jax`",
        "notebook-fit": "`python -m docs.generators.shown`, of `will_it_fit.ipynb`",
        "notebook-nan": "`python -m docs.generators.shown`, of `hunt_a_nan.ipynb`",
    }
)
"""Pictures that show what the package draws, and what has drawn them."""


def result(name: str) -> dict[str, Any]:
    """What a picture is drawn from."""
    return json.loads((RESULTS / f"{RESULT_OF.get(name, name)}.json").read_text())


def draw(name: str) -> None:
    """Both pictures of a name."""
    path = IMAGES / f"{name}.png"
    if name in SHOWN:
        from benchmarks._pictures import darken_file

        darken_file(path)
        return
    plot: Callable[..., None] = importlib.import_module(DRAWN[name]).plot
    plot(result(name), path)


def stale() -> list[str]:
    """What is wrong with the pictures that are there, a line each."""
    wrong = []
    for name in (*DRAWN, *SHOWN):
        light = IMAGES / f"{name}.png"
        dark = dark_path(light)
        for path in (light, dark):
            if not path.exists():
                wrong.append(f"{path.name} is missing")
        if light.exists() and dark.exists():
            wanted = digest(result(name)) if name in DRAWN else digest_of_file(light)
            for path in (light, dark) if name in DRAWN else (dark,):
                if source_of(path) != wanted:
                    wrong.append(f"{path.name} was drawn from something else than it shows now")
    known = {f"{name}{end}.png" for name in (*DRAWN, *SHOWN) for end in ("", "-dark")}
    found = {path.name for path in IMAGES.glob("*.png")}
    return wrong + [f"{name} belongs to no result" for name in sorted(found - known)]


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    options.add_argument("names", nargs="*", metavar="NAME", help="only these")
    options.add_argument("--check", action="store_true", help="draw nothing; fail if one is old")
    parsed = options.parse_args(argv)
    if not parsed.check:
        for name in parsed.names or (*DRAWN, *SHOWN):
            draw(name)
            print(f"drew: {name}")
    wrong = stale()
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
