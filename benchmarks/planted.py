"""Bugs that are planted in the package: does a test see each of them?

    python -m benchmarks.planted
    python -m benchmarks.planted --only verdict --only totals

Each bug changes one line of a copy of the package: a condition is negated, a comparison moved by
one, a term, a factor or a dtype left out. Then the tests that must catch it run on that copy, and
stop at the first one that fails. The same tests must pass on the copy as it is. The exit status is
1 if a bug is not caught. A line that is no longer in its file is an error: the bugs below are of
decisions that somebody has rewritten, and belong to what they have become.
"""

import dataclasses
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks._report import parser, report, table, write

MODULE = "benchmarks.planted"
ROOT = pathlib.Path(__file__).parents[1]
COPIED = ("halfstep", "tests", "pyproject.toml")
CAUGHT, NOT_CAUGHT = "caught", "NOT CAUGHT"
# As CI runs them: on small programs, what LLVM would optimize takes longer than it saves.
UNOPTIMIZED = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"


class PlantingError(RuntimeError):
    """A bug cannot be planted, or the tests say nothing about it."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the package, and the bugs that are planted in it, one at a time."""

    file: str
    """Below `halfstep/`."""
    text: str
    """The line, without its indentation; the file has it once."""
    bugs: tuple[str, ...]
    """Other lines instead of it."""
    tests: tuple[str, ...]
    """Below `tests/`: files, or single tests in them."""

    @property
    def name(self) -> str:
        """The name of the module."""
        return pathlib.Path(self.file).stem


MICROBATCH = tuple(
    f"test_microbatch.py::{name}"
    for name in (
        "test_sums_are_float32_also_for_narrower_parameters",
        "test_sums_are_float64_for_parameters_that_are",
    )
)
CUSTOM_RULES = tuple(
    f"autocast/test_custom_rules.py::{name}"
    for name in (
        "test_an_activation_with_its_own_derivative_is_recomputed_with_its_neighbors",
        "test_a_product_within_an_activation_is_not_computed_again",
        "test_a_kernel_with_its_own_backward_pass_is_not_run_again",
    )
)
ISLANDS = tuple(
    f"autocast/test_islands.py::{name}"
    for name in (
        "test_what_is_made_of_a_reduced_value_is_recomputed_too",
        "test_float32_of_a_parameter_that_is_stored_low_is_recomputed",
        "test_float32_of_float32_before_the_first_contraction_stays_as_it_is",
    )
)
ONE_VALUE = tuple(
    f"autocast/test_one_value.py::{name}"
    for name in (
        "test_8_bits_are_made_of_a_rounded_sum",
        "test_8_bits_for_the_backward_pass_are_those_of_what_the_forward_pass_saw",
    )
)
FLOPS = (
    "preflight/test_flops.py::test_scales_are_no_factors_however_large",
    "preflight/test_flops.py::test_a_product_of_two_factors_has_no_scales",
)
TURNS = ("preflight/test_hlo.py::test_a_loop_that_ends_at_one_number",)
TOTALS = tuple(
    f"explain/test_totals.py::{name}"
    for name in (
        "test_flops_of_all_else",
        "test_flops_of_all_else_count_as_often_as_a_loop_turns",
        "test_contractions_of_a_solver_count_as_they_run",
        "test_what_is_in_such_functions_counts_as_often_as_a_loop_turns",
    )
)
LINES = (
    # Gradients of microbatches are summed in float32, also those of narrower parameters.
    Line(
        "_training/microbatch.py",
        "wide = jnp.zeros_like(param, dtype=at_least_float32(param.dtype))",
        (
            "wide = jnp.zeros_like(param)",
            "wide = jnp.zeros_like(param, dtype=jnp.float32)",
        ),
        MICROBATCH,
    ),
    Line(
        "_training/microbatch.py",
        "total = jtu.tree_map(lambda a, g: a + g.astype(a.dtype), total, grads)",
        (
            "total = jtu.tree_map(lambda a, g: a + g, total, grads)",
            "total = jtu.tree_map(lambda a, g: g.astype(a.dtype), total, grads)",
            "total = jtu.tree_map(lambda a, g: (a.astype(g.dtype) + g).astype(a.dtype), total, "
            "grads)",
        ),
        MICROBATCH,
    ),
    # A division by a number belongs to the product before it.
    Line(
        "_autocast/decide.py",
        'if node.name == "div" and is_scalar_literal(node.ins[1]):',
        (
            'if not (node.name == "div" and is_scalar_literal(node.ins[1])):',
            'if node.name != "div" and is_scalar_literal(node.ins[1]):',
            'if node.name == "div" and not is_scalar_literal(node.ins[1]):',
            'if node.name == "div":',
            "if len(node.ins) > 1 and is_scalar_literal(node.ins[1]):",
            'if node.name == "div" and is_scalar_literal(node.ins[0]):',
            "if False:",
        ),
        ("autocast/test_numerics.py::test_a_product_over_a_number_stays_in_the_compute_dtype",),
    ),
    # Functions with derivatives of their own may be part of an island, unless they are dear.
    Line(
        "_autocast/custom_rules.py",
        "barrier = inner.has_barrier or not isinstance(custom, CustomJvp)",
        (
            "barrier = not inner.has_barrier or not isinstance(custom, CustomJvp)",
            "barrier = inner.has_barrier or isinstance(custom, CustomJvp)",
            "barrier = inner.has_barrier and not isinstance(custom, CustomJvp)",
            "barrier = inner.has_barrier",
            "barrier = not isinstance(custom, CustomJvp)",
            "barrier = False",
            "barrier = True",
        ),
        CUSTOM_RULES,
    ),
    # Which float32 is worth recomputing.
    Line(
        "_autocast/again/islands.py",
        "return plan.depths[index] > 0 or any(_depends_on_low(plan, operand) for operand in "
        "operands)",
        (
            "return plan.depths[index] > 1 or any(_depends_on_low(plan, operand) for operand in "
            "operands)",
            "return plan.depths[index] >= 0 or any(_depends_on_low(plan, operand) for operand in "
            "operands)",
            "return plan.depths[index] <= 0 or any(_depends_on_low(plan, operand) for operand in "
            "operands)",
            "return plan.depths[index] > 0 or not any(_depends_on_low(plan, operand) for operand "
            "in operands)",
            "return plan.depths[index] > 0 and any(_depends_on_low(plan, operand) for operand in "
            "operands)",
            "return plan.depths[index] > 0",
            "return any(_depends_on_low(plan, operand) for operand in operands)",
            "return True",
        ),
        ISLANDS,
    ),
    Line(
        "_autocast/again/islands.py",
        "plan.kinds[operand].is_low or operand in plan.rounded or operand in plan.too_large",
        (
            "operand in plan.rounded or operand in plan.too_large",
            "plan.kinds[operand].is_low or operand in plan.too_large",
            "plan.kinds[operand].is_low or operand in plan.rounded",
        ),
        ISLANDS,
    ),
    # What is kept in 8 bits is a value that every reader sees.
    Line(
        "_autocast/stored/names.py",
        "value = cast(value, compute) if is_wide else settled(value)",
        (
            "value = cast(value, compute) if is_wide else value",
            "value = cast(value, compute)",
            "value = cast(value, compute) if not is_wide else settled(value)",
            "value = settled(value)",
        ),
        ONE_VALUE,
    ),
    # The leaf of the only verdict among the parts.
    Line(
        "_training/verdict.py",
        "leaf = leaves[0] if len(leaves) == 1 else jnp.full_like(finite, -1, jnp.int32)",
        (
            "leaf = leaves[0] if len(leaves) != 1 else jnp.full_like(finite, -1, jnp.int32)",
            "leaf = leaves[0] if len(leaves) == 2 else jnp.full_like(finite, -1, jnp.int32)",
            "leaf = leaves[0] if len(leaves) >= 1 else jnp.full_like(finite, -1, jnp.int32)",
            "leaf = leaves[0] if len(leaves) == 1 else jnp.full_like(finite, 0, jnp.int32)",
            "leaf = leaves[0] if len(leaves) == 1 else jnp.full_like(finite, -2, jnp.int32)",
            "leaf = leaves[0] if len(leaves) == 1 else jnp.full_like(finite, -1)",
            "leaf = leaves[0]",
        ),
        ("test_verdict.py::test_two_verdicts_know_their_own_trees",),
    ),
    # Sums of reports.
    Line(
        "_explain/totals.py",
        "low += sum(entry.inside_flops.get(compute, 0) * entry.count for entry in entries)",
        (
            "low += sum(entry.inside_flops.get(compute, 0) for entry in entries)",
            "low += sum(entry.inside_flops.get(compute, 1) * entry.count for entry in entries)",
            "low += sum(entry.count for entry in entries)",
            "low = sum(entry.inside_flops.get(compute, 0) * entry.count for entry in entries)",
            "",
        ),
        TOTALS,
    ),
    Line(
        "_explain/totals.py",
        "total[name] += count * entry.count",
        ("total[name] += count", "total[name] += entry.count", "total[name] = count * entry.count"),
        TOTALS,
    ),
    Line(
        "_explain/totals.py",
        "entry.flops * entry.count\n        for entry in entries\n        if not entry",
        (
            "entry.flops\n        for entry in entries\n        if not entry",
            "entry.count\n        for entry in entries\n        if not entry",
            "entry.flops * entry.count\n        for entry in entries\n        if entry",
        ),
        TOTALS,
    ),
    Line(
        "_preflight/report/peak.py",
        "dataclasses.replace(same[0], bytes=sum(one.bytes for one in same), count=len(same))",
        (
            "dataclasses.replace(same[0], count=len(same))",
            "dataclasses.replace(same[0], bytes=sum(one.bytes for one in same))",
            "dataclasses.replace(same[0], bytes=len(same), count=len(same))",
            "dataclasses.replace(same[0], bytes=sum(one.bytes for one in same[1:]), "
            "count=len(same))",
            "dataclasses.replace(same[0], bytes=sum(one.bytes for one in same), "
            "count=len(same) - 1)",
            "same[0]",
        ),
        ("preflight/test_peak.py::test_buffers_of_one_line_are_one_row",),
    ),
    # A product with scales: where its second factor is.
    Line(
        "_preflight/hlo/contraction_flops.py",
        "if len(arrays) >= 4 and _sizes(instruction, rhs, own) < contracted:",
        (
            "if not (len(arrays) >= 4 and _sizes(instruction, rhs, own) < contracted):",
            "if len(arrays) >= 4 and _sizes(instruction, rhs, own) >= contracted:",
            "if len(arrays) >= 4 and _sizes(instruction, rhs, own) <= contracted:",
            "if len(arrays) > 4 and _sizes(instruction, rhs, own) < contracted:",
            "if len(arrays) >= 4:",
            "if _sizes(instruction, rhs, own) < contracted:",
        ),
        FLOPS,
    ),
    # A loop that ends when a counter meets a number.
    Line(
        "_preflight/hlo/trip_counts.py",
        "return count if count > 0 and not rest else None",
        (
            "return None if count > 0 and not rest else count",
            "return count if count > 1 and not rest else None",
            "return count if count <= 0 and not rest else None",
            "return count if count > 0 and rest else None",
            "return count if not rest else None",
            "return count if count > 0 else None",
            "return count",
        ),
        TURNS,
    ),
)
"""Only lines whose bugs once went unseen, and their neighbors in the same decision."""


class Copy:
    """A copy of the package and its tests, in which bugs are planted and removed again."""

    def __init__(self, folder: pathlib.Path, root: pathlib.Path = ROOT):
        self.folder = folder
        for name in COPIED:
            if (root / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(root / name, folder / name, ignore=ignored)
            else:
                shutil.copy(root / name, folder / name)

    def original(self, line: Line) -> str:
        """The text of a line's file.

        Raises:
            PlantingError: The line is not in it, or more than once.
        """
        path = self.folder / "halfstep" / line.file
        content = path.read_text() if path.exists() else ""
        if content.count(line.text) != 1:
            found = f"{content.count(line.text)} times" if path.exists() else "no such file"
            raise PlantingError(
                f"halfstep/{line.file} must have this line once, to plant bugs in it: "
                f"{line.text!r}; found: {found}. If it was rewritten, rewrite its bugs in "
                "benchmarks/planted.py, too."
            )
        return content

    def write(self, line: Line, content: str) -> None:
        """Write a line's file."""
        path = self.folder / "halfstep" / line.file
        path.write_text(content)
        # Python compares the time in seconds and the size: both may be the same.
        pathlib.Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def failed(self, tests: Sequence[str]) -> str | None:
        """Run tests, and return the first one that fails, `None` if all pass.

        Raises:
            PlantingError: They cannot be run.
        """
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-o", "addopts=--strict-config --strict-markers", "-m", "not slow and not bits"]
        # Before the package that is installed, and before that of the working directory.
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        # Of pytest's plugins none is needed, and some import JAX.
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        environment.setdefault("XLA_FLAGS", UNOPTIMIZED)
        # Without kept bytecode, each run would compile the whole package again.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        ran = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode == 0:
            return None
        named = [line for line in ran.stdout.splitlines() if line.startswith("FAILED ")]
        # Another status is of tests that were not found or not imported.
        if ran.returncode != 1 or not named:
            raise PlantingError(f"{' '.join(tests)} did not run:\n{ran.stdout}{ran.stderr}")
        return named[0].removeprefix("FAILED ").partition(" - ")[0].removeprefix("tests/")


def measure(lines: Sequence[Line], folder: pathlib.Path, root: pathlib.Path = ROOT) -> list[Any]:
    """Plant the bugs of these lines, one at a time, and run their tests.

    Raises:
        PlantingError: A line is gone, or its tests fail without a bug.
    """
    copy = Copy(folder, root)
    originals = [copy.original(line) for line in lines]
    every = list(dict.fromkeys(test for line in lines for test in line.tests))
    if (failed := copy.failed(every)) is not None:
        raise PlantingError(f"{failed} fails without a bug, so it says nothing about bugs.")
    rows: list[Any] = []
    for line, content in zip(lines, originals, strict=True):
        for bug in line.bugs:
            begun = time.monotonic()
            copy.write(line, content.replace(line.text, bug))
            failed = copy.failed(line.tests)
            copy.write(line, content)
            rows.append(
                {
                    "file": line.file,
                    "line": line.text,
                    "bug": bug,
                    "outcome": NOT_CAUGHT if failed is None else CAUGHT,
                    "by": failed,
                    "seconds": round(time.monotonic() - begun, 1),
                }
            )
            print(f"{rows[-1]['outcome']}: {line.name}: {bug}", file=sys.stderr, flush=True)
    return rows


def text(result: dict[str, Any]) -> str:
    """The table."""
    rows = [
        {**row, "file": f"`{row['file']}`", "bug": f"`{_short(row['bug'])}`"}
        for row in result["rows"]
    ]
    columns = {"file": "file", "bug": "the line with a bug", "outcome": "", "by": "by"}
    caught = sum(row["outcome"] == CAUGHT for row in rows)
    return f"{table(rows, columns)}\n\n{caught} of {len(rows)} bugs are caught."


def _short(bug: str) -> str:
    """One line, or that there is none."""
    return " ".join(bug.split()).replace("|", "\\|") or "(left out)"


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    names = list(dict.fromkeys(line.name for line in LINES))
    options.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    given = options.parse_args(argv)
    chosen = [line for line in LINES if not given.only or line.name in given.only]
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = measure(chosen, pathlib.Path(folder))
        except PlantingError as error:
            print(error, file=sys.stderr)
            return 1
    is_caught = all(row["outcome"] == CAUGHT for row in rows)
    made = report(MODULE, {"rows": rows, "bars": {"every bug is caught": is_caught}}, packages=())
    print(text(made))
    write(made, given.json)
    return 0 if is_caught else 1


if __name__ == "__main__":
    sys.exit(main())
