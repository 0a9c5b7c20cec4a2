"""Ten changes are planted in programs that real compilers compile; the comparison names each."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

import halfstep
from halfstep import PreflightReport
from tests._rows import slow_unless
from tests.preflight._compilers import need
from tests.preflight._planted import BATCH, HIDDEN, WIDTH, Step, in_policy, momentum, over_four

WEIGHTS = 2 * WIDTH * HIDDEN
MESH = "h100:1x4"
FLAG = "--xla_gpu_enable_latency_hiding_scheduler"


class Program(NamedTuple):
    make: Callable[[], Step]
    target: str = "h100"
    donate: tuple[int, ...] = (0, 1)
    options: tuple[tuple[str, Any], ...] = ()


# What is compiled: the steps as they were, and each with a change.
PROGRAMS: dict[str, Program] = {
    "momentum": Program(momentum),
    "again": Program(momentum, options=(("cache", False),)),
    "product": Program(lambda: momentum(second=jnp.float32)),
    "donation": Program(momentum, donate=(0,)),
    "batch": Program(lambda: momentum(batch=2 * BATCH)),
    "state": Program(lambda: momentum(state=jnp.bfloat16)),
    "remat": Program(lambda: momentum(remat=False)),
    "flag": Program(momentum, options=(("flags", [f"{FLAG}=true"]),)),
    "bias": Program(lambda: momentum(bias=True)),
    "f8": Program(lambda: in_policy("f8")),
    "no f8": Program(lambda: in_policy("bf16")),
    "wire": Program(over_four, MESH, ()),
    "wider": Program(lambda: over_four(wire=jnp.float32, gathers=2), MESH, ()),
    "tpu": Program(momentum, "v5e"),
    "tpu state": Program(lambda: momentum(state=jnp.bfloat16), "v5e"),
}


class Planted(NamedTuple):
    before: str
    after: str
    changes: dict[str, tuple[Any, Any]]
    """By name: before and after."""
    cause: str


PRODUCTS = "contractions bfloat16 x bfloat16 -> float32"
PLANTED: dict[str, Planted] = {
    "a product in another dtype": Planted(
        "momentum",
        "product",
        {"contractions float32 x float32 -> float32": (0, 4)},
        "the step, its arguments or what it donates have changed",
    ),
    "a lost donation": Planted(
        "momentum",
        "donation",
        {
            "outputs in place of arguments": (8 * WEIGHTS, 4 * WEIGHTS),
            "optimizer state: opt_state/down and 1 more": ("float32, donated", "float32"),
        },
        "A donation was lost: opt_state/down, opt_state/up may not be reused any more, and outputs "
        "take the place of 1.00 MiB fewer arguments",
    ),
    "a larger batch": Planted(
        "momentum",
        "batch",
        {
            "batch: x": (f"float32[{BATCH},{WIDTH}]", f"float32[{2 * BATCH},{WIDTH}]"),
            "memory: batch": (4 * BATCH * WIDTH, 8 * BATCH * WIDTH),
            "FLOPs in bfloat16": (14 * BATCH * WIDTH * HIDDEN, 28 * BATCH * WIDTH * HIDDEN),
        },
        "the largest part is temporaries",
    ),
    "optimizer state in another dtype": Planted(
        "momentum",
        "state",
        {
            "optimizer state: opt_state/down and 1 more": (
                "float32, donated",
                "bfloat16, donated",
            ),
            "memory: optimizer state": (4 * WEIGHTS, 2 * WEIGHTS),
        },
        "the largest part is optimizer state, -512.0 KiB",
    ),
    "recomputation removed": Planted(
        "momentum",
        "remat",
        {"contractions recomputed by jax.checkpoint": (2, 0), PRODUCTS: (5, 3)},
        "jax.checkpoint recomputed 2 contractions and now recomputes 0",
    ),
    "another flag": Planted(
        "momentum", "flag", {f"flag {FLAG}": (None, "true")}, f"flag {FLAG} - -> true"
    ),
    "another parameter": Planted(
        "momentum",
        "bias",
        {
            "parameters: params/bias": (None, f"float32[{WIDTH}], donated"),
            "memory: parameters": (4 * WEIGHTS, 4 * WEIGHTS + 4 * WIDTH),
        },
        "the step, its arguments or what it donates have changed",
    ),
    "fp8 off": Planted(
        "f8",
        "no f8",
        {"contractions in fp8": (2, 0), "FLOPs in bfloat16": (0, 4 * BATCH * WIDTH * WIDTH)},
        "No contraction of an fp8 recipe is left",
    ),
    "one more all-gather": Planted(
        "wire",
        "wider",
        {"all-gather bfloat16, count": (1, 2), "all-gather bfloat16": (2048, 4096)},
        "",
    ),
    "a sum over devices in another dtype": Planted(
        "wire",
        "wider",
        {"all-reduce bfloat16": (512, 0), "all-reduce float32": (0, 1024)},
        "1 all-reduce in float32 instead of bfloat16",
    ),
    "optimizer state in another dtype on a TPU": Planted(
        "tpu",
        "tpu state",
        {"memory: optimizer state": (4 * WEIGHTS, 2 * WEIGHTS)},
        "the largest part is optimizer state, -512.0 KiB",
    ),
}


class Reports(dict[str, PreflightReport]):
    """Programs by name, each compiled when it is first asked for."""

    def __missing__(self, name: str) -> PreflightReport:
        program = PROGRAMS[name]
        need("tpu" if program.target.startswith("v") else "cuda")
        self[name] = halfstep.preflight(
            *program.make(),
            targets=program.target,
            donate_argnums=program.donate,
            progress=False,
            **dict(program.options),
        )
        return self[name]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reports]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALFSTEP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield Reports()


# Steps of their own, which take a third of the time.
SLOW = ("f8", "no f8", "wire", "wider", "tpu", "tpu state")


@pytest.mark.parametrize("name", slow_unless(PLANTED, lambda name: PLANTED[name].after not in SLOW))
def test_a_planted_change_is_named(name: str, reports: dict[str, PreflightReport]):
    planted = PLANTED[name]
    comparison = reports[planted.after].compare(reports[planted.before])
    (entry,) = comparison.entries
    found = {change.what: (change.before, change.after) for change in entry.changes}
    assert planted.changes.items() <= found.items(), str(comparison)
    assert planted.cause in str(comparison)
    assert comparison.changed
    assert entry.not_compared == ()


def test_a_product_in_another_dtype_is_named_by_its_line(reports: dict[str, PreflightReport]):
    (entry,) = reports["product"].compare(reports["momentum"]).entries
    products = [change for change in entry.changes if change.what.startswith("product ")]
    # Of the first layer, whose dtype is as it was, none.
    assert {change.what.rpartition(" at ")[2] for change in products} == {_line("second)")}
    assert all("bfloat16 x bfloat16" in str(change.before) for change in products)
    assert {str(change.after) for change in products} <= {
        "float32 x float32 -> float32", "2 float32 x float32 -> float32"
    }  # fmt: skip


def _line(text: str) -> str:
    path = pathlib.Path(__file__).with_name("_planted.py")
    number = next(i for i, line in enumerate(path.read_text().splitlines(), 1) if text in line)
    return f"_planted.py:{number}"


def test_another_jax(reports: dict[str, PreflightReport], tmp_path: pathlib.Path):
    """As an older JAX would have saved it: another version, and another peak."""
    saved = json.loads(reports["momentum"].to_json())
    (entry,) = saved["entries"]
    new = entry["versions"]["jaxlib"]
    entry["versions"]["jaxlib"] = "0.8.0"
    entry["temp_bytes"] -= 2**19
    entry["peak_bytes"] -= 2**19
    entry["memory"]["temporaries"] -= 2**19
    path = tmp_path / "before.json"
    path.write_text(json.dumps(saved))
    comparison = reports["momentum"].compare(path)
    assert f"differ: jaxlib 0.8.0 -> {new}." in str(comparison)
    assert "The compiler was given the same program, so the step itself" in str(comparison)
    assert "The peak rose by 512.0 KiB; the largest part is temporaries" in str(comparison)
    # If the step differs as well, nobody can tell which it was.
    assert "Compile the old step with the new versions" in str(reports["batch"].compare(path))


@pytest.mark.parametrize(
    "name", slow_unless(["momentum", "f8", "wire", "tpu"], lambda name: name not in SLOW)
)
def test_nothing_changed(name: str, reports: dict[str, PreflightReport], tmp_path: pathlib.Path):
    report = reports[name]
    report.to_json(tmp_path / "same.json")
    for before in (report, tmp_path / "same.json"):
        comparison = report.compare(before)
        assert not comparison.changed
        assert str(comparison) == f"{report.targets[0]}, step: nothing changed."
        comparison.check(peak=0)


def test_nothing_changes_in_another_compile(reports: dict[str, PreflightReport]):
    comparison = reports["again"].compare(reports["momentum"])
    assert str(comparison) == "h100, step: nothing changed."
    assert comparison.to_dict()["entries"][0]["changes"] == []


def test_what_is_saved_is_what_is_loaded(
    reports: dict[str, PreflightReport], tmp_path: pathlib.Path
):
    for name, report in reports.items():
        path = tmp_path / "report.json"
        report.to_json(path)
        assert PreflightReport.load(path).entries == report.entries, name
        assert PreflightReport.load(path).to_json() == report.to_json()


def test_it_got_worse(reports: dict[str, PreflightReport]):
    comparison = reports["batch"].compare(reports["momentum"])
    growth = comparison.entries[0].peak_growth
    assert growth is not None
    comparison.check(peak=growth)
    with pytest.raises(halfstep.LintError, match=r"h100, step: the peak grew by more than 5 %: 3"):
        comparison.check(peak=0.05)
    # The other way round it became smaller.
    reports["momentum"].compare(reports["batch"]).check(peak=0)


def test_steps_by_their_names(reports: dict[str, PreflightReport]):
    (entry,) = reports["momentum"].entries
    f32, bf16 = (dataclasses.replace(entry, variant=name) for name in ("f32", "bf16"))
    both = PreflightReport((f32, bf16))
    assert "name of the step" in str(PreflightReport((f32,)).compare(PreflightReport((bf16,))))
    fewer = PreflightReport((f32,)).compare(both)
    assert fewer.only_before == (("h100", "bf16"),)
    assert "h100, bf16: only in the earlier report." in str(fewer)
    assert both.compare(PreflightReport((f32,))).only_after == (("h100", "bf16"),)
    with pytest.raises(halfstep.LintError, match="h100, bf16 is not in the later report"):
        fewer.check(peak=1)
