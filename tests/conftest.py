"""Strictness for every test: strict promotion, no rank promotion, four CPU devices, fresh seeds."""

import os

# Before JAX is imported. XLA:CPU otherwise computes 16-bit arithmetic in float32 and may leave the
# rounding in between out, and tests of numerics would pass for the wrong reason.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=4",
        "--xla_allow_excess_precision=false",
    ]
)
os.environ["JAX_PLATFORMS"] = "cpu"
# JAX writes a compiled program to its place little by little: a process that shares the folder may
# read half of it. So each of pytest's processes has a folder of its own.
if "JAX_COMPILATION_CACHE_DIR" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] += "-" + os.environ["PYTEST_XDIST_WORKER"]

import collections
import gc
import pathlib
import random
import re
from collections.abc import Callable, Iterator

import jax
import pytest

from tests._rows import spread

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Thousands of tests leave millions of objects behind: to look through them as often as Python does
# by itself takes a sixth of the time of all.
gc.freeze()
gc.set_threshold(50_000, 10, 20)

# The source distribution holds the package and these tests. Tests whose subject is another part of
# the repository are left out where that part is missing; all other tests must not need it.
SUBJECTS = {
    "benchmarks": "benchmarks",
    "docs": "docs",
    "examples": "examples",
    "test_common_errors.py": "docs",
    "test_release.py": ".ci",
}
collect_ignore = [
    tests
    for tests, subject in SUBJECTS.items()
    if not (pathlib.Path(__file__).parents[1] / subject).exists()
]


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Import only files that have the marker which `-m` asks for.

    Without this `-m wheel` would import every test, also those that need packages that are not
    installed beside a wheel.
    """
    asked = config.option.markexpr
    names = re.findall(r"(?<!\bnot )\b(?:bits|core|types|wheel)\b", asked)
    if not names or re.search(r"\bor\b|\(", asked) or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text() if collection_path.is_file() else ""
    # `None` leaves the decision to others; `False` would collect what they leave out.
    return None if all(f"pytest.mark.{name}" in text for name in names) else True


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rows 2`: of every parametrized test only two rows, for a run of another JAX."""
    parser.addoption("--rows", type=int, help="of each parametrized test, run this many rows")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark rows `slow` beyond those that a test's marker `rows` or the option `--rows` asks for.

    A matrix of rows says most with a few of them, spread over it: a fault in one mechanism fails
    more than one. The others run every night and before a release.
    """
    tests: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for rows in tests.values():
        marker = rows[0].get_closest_marker("rows")
        limits = [*(marker.args if marker else ()), config.option.rows or len(rows)]
        for item in set(rows) - set(spread(rows, min(limits))):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def getkey(request: pytest.FixtureRequest) -> Callable[[], jax.Array]:
    """Fresh PRNG keys: a new seed each run, shown on failure, replayed by HALFSTEP_SEED."""
    seed = int(os.environ.get("HALFSTEP_SEED", random.randrange(2**31)))
    request.node.add_report_section("setup", "seed", f"replay with HALFSTEP_SEED={seed}")
    state = {"key": jax.random.key(seed)}

    def fresh() -> jax.Array:
        state["key"], key = jax.random.split(state["key"])
        return key

    return fresh


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """For tests that run other libraries' code, which relies on implicit promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    """Four devices on one axis, `data`."""
    return jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
