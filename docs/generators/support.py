"""Write the support matrix: `python -m docs.generators.support [--check]`.

The page `docs/support.md` has three tables between marks. Which hardware multiplies what is read
from the table of accelerators that `halfstep.preflight` uses and from `halfstep.RECIPES`; which
frameworks are covered from the rows of the tests; versions from the packaging files.
"""

import importlib
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterable
from typing import NamedTuple

import halfstep
from benchmarks._page import update_all
from benchmarks._report import table
from halfstep._autocast.f8.blocks import generations
from halfstep._preflight import ACCELERATORS, Accelerator

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support.md"

# By the name of the rate in the table of accelerators.
RATES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def products(format_: str, accelerator: Accelerator) -> str:
    """How matrix products of a format that a policy can name are multiplied."""
    if RATES[format_] in accelerator.peak_flops:
        return "native"
    return "emulated"


def recipe_products(recipe: halfstep.Recipe, accelerator: Accelerator) -> str:
    """The same for the matrix products of a recipe.

    Scales of blocks cannot be taken out of a sum: without units or a kernel for them, factors are
    multiplied in 16 bits.
    """
    native = "float8" in accelerator.peak_flops
    if any(factor.is_blocked for leg in recipe.legs for factor in leg):
        native = generation(accelerator) in generations(*recipe.forward)
    return "native" if native else "emulated"


def generation(accelerator: Accelerator) -> str:
    """The name of a GPU's generation, if it has one for the multiplication of blocks."""
    major = (accelerator.capability or (0, 0))[0]
    return "Blackwell" if accelerator.has_block_units else {9: "Hopper"}.get(major, "")


def hardware() -> str:
    """Formats and recipes by accelerator."""
    rows = []
    for accelerator in ACCELERATORS.values():
        row = {"device": accelerator.description, "target": f"`{accelerator.name}`"}
        row |= {name: products(name, accelerator) for name in RATES}
        row |= {r.name: recipe_products(r, accelerator) for r in halfstep.RECIPES.values()}
        rows.append(row)
    cpu = {name: "native" if name == "f32" else "emulated" for name in (*RATES, *halfstep.RECIPES)}
    rows.append({"device": "any CPU", "target": "", **cpu})
    # Recipes that are alike on every device share a column.
    columns: dict[tuple[str, ...], list[str]] = {}
    for name in halfstep.RECIPES:
        columns.setdefault(tuple(row[name] for row in rows), []).append(name)
    headings = {"device": "device", "target": "target", **{name: f"`{name}`" for name in RATES}}
    for names in columns.values():
        headings[names[0]] = ", ".join(f"`{name}`" for name in names)
    return table(rows, headings)


class Feature(NamedTuple):
    """Something that is tested in every framework."""

    name: str
    test: str
    rows: str
    """Where the frameworks are listed: a module and a name in it."""


FEATURES = (
    Feature(
        "gradients, loss scaling, update or skip, BatchNorm's state",
        "tests/conformance/test_frameworks.py",
        "tests.conformance._frameworks:BY_NAME",
    ),
    Feature(
        "autocast of an MLP, a CNN, a transformer and an LSTM",
        "tests/autocast/test_frameworks.py",
        "tests.autocast._frameworks:FRAMEWORKS",
    ),
    Feature(
        "products in 8 and 4 bits",
        "tests/f8/test_frameworks.py",
        "tests.models.transformers:CASES",
    ),
    Feature(
        "`debug.first_nonfinite` of planted faults",
        "tests/debug/test_faults.py",
        "tests._faults:FAULTS",
    ),
)
FRAMEWORKS = {"equinox": "Equinox", "linen": "Linen", "nnx": "NNX", "haiku": "Haiku"}


def frameworks_of(feature: Feature) -> set[str]:
    """The frameworks in which a feature is tested, in lower case."""
    module, _, name = feature.rows.partition(":")
    rows = getattr(importlib.import_module(module), name)
    names: Iterable[str] = rows if isinstance(rows, dict) else [row.framework for row in rows]
    # Some have several rows: `nnx-functional`, `nnx-in-place`.
    return {re.split(r"\W", name.lower())[0] for name in names}


def on_oldest(test: str) -> bool:
    """Whether CI also runs a file of tests with the oldest JAX."""
    return "pytest.mark.core" in (ROOT / test).read_text()


def pinned(file: str, package: str) -> str:
    """The version of a package in a file of requirements."""
    text = (ROOT / "requirements" / file).read_text()
    (version,) = re.findall(rf"^{package}==([\w.]+)", text, re.MULTILINE)
    return version


def features() -> str:
    newest, oldest = pinned("test.txt", "jax"), pinned("test-oldest.txt", "jax")
    rows = []
    for feature in FEATURES:
        covered = frameworks_of(feature)
        versions = [newest, oldest] if on_oldest(feature.test) else [newest]
        rows.append(
            {
                "feature": feature.name,
                **{key: "tested" if key in covered else "" for key in FRAMEWORKS},
                "jax": ", ".join(versions),
                "test": f"`{feature.test}`",
            }
        )
    return table(rows, {"feature": "feature", **FRAMEWORKS, "jax": "on JAX", "test": "by"})


def versions() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [need for needs in project["optional-dependencies"].values() for need in needs]
    least = {
        found[1]: found[2]
        for need in (*project["dependencies"], *extras)
        if (found := re.fullmatch(r"([\w-]+)>=([\w.]+)", need))
    }
    names = ("jax", "equinox", "optax", "flax", "dm-haiku", "orbax-checkpoint")
    rows = [
        {
            "package": f"`{name}`",
            "least": least[name],
            "oldest": pinned("test-oldest.txt", name),
            "newest": pinned("test.txt", name),
        }
        for name in names
    ]
    return table(
        rows,
        {
            "package": "package",
            "least": "required",
            "oldest": "tested with the oldest JAX",
            "newest": "tested with the newest",
        },
    )


PARTS = {"hardware": hardware, "features": features, "versions": versions}


def main(argv: list[str] | None = None) -> int:
    module = "docs.generators.support"
    return update_all(argv, module=module, about=__doc__, page=PAGE, parts=PARTS)


if __name__ == "__main__":
    sys.exit(main())
