"""The memory benchmark: its results agree with themselves, and its command runs."""

import collections
import dataclasses
import importlib.metadata
import itertools
import json
import os
import types
from typing import Any

import jax
import pytest

import halfstep
from benchmarks import memory, render
from benchmarks._steps import VARIANTS, arguments
from halfstep._preflight._errors import RefusedError

RESULT = json.loads((render.RESULTS / "memory.json").read_text())
ROWS: list[dict[str, Any]] = RESULT["rows"]
WHERE = ("model", "gemm", "target", "batch")


@pytest.fixture
def gpu_compiler() -> None:
    """XLA's GPU compiler: without it a test is skipped, or fails where it is required."""
    try:
        importlib.metadata.version("jax-cuda12-plugin")
    except importlib.metadata.PackageNotFoundError:
        message = 'needs XLA\'s GPU compiler: pip install "halfstep[cuda-preflight]"'
        if os.environ.get("HALFSTEP_REQUIRE_COMPILERS"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture
def peer() -> None:
    pytest.importorskip("mpx")


def where(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in WHERE)


def check(result: dict[str, Any], plan: memory.Plan) -> None:
    """Every row is there once, and what follows from other figures does."""
    rows = result["rows"]
    assert [(*where(row), row["step"]) for row in rows] == [
        (model.name, gemm, target, batch, step) for model, gemm, target, batch, step in plan.jobs()
    ]
    base = {where(row): row for row in rows if row["step"] == memory.REFERENCE}
    for row in rows:
        assert "refused" not in row
        reference = base[where(row)]
        for what in ("peak", "traffic"):
            ratio = reference[f"{what}_bytes"] / row[f"{what}_bytes"]
            assert row[f"{what}_ratio"] == round(ratio, 3)
        assert row["fits"] == (row["peak_bytes"] <= row["usable_bytes"])
    assert [row["step"] for row in result["largest_batch"]] == list(memory.SEARCHED)
    for row in result["largest_batch"]:
        tried = {int(batch): peak for batch, peak in row["tried"].items()}
        assert row["batch"] % memory.STRIDE == 0
        assert tried[row["batch"]] == row["peak_bytes"] <= row["usable_bytes"]
        following = row["batch"] + memory.STRIDE
        assert following > plan.maximum or tried[following] > row["usable_bytes"]


def test_results_are_complete_and_consistent():
    check(RESULT, memory.FULL)


def test_an_inconsistent_result_is_noticed():
    for key, value in (("peak_bytes", 1), ("traffic_ratio", 9.0), ("fits", False)):
        rows = [{**row, key: value} if row["step"] == "mpx, f16" else row for row in ROWS]
        with pytest.raises(AssertionError):
            check({**RESULT, "rows": rows}, memory.FULL)
    with pytest.raises(AssertionError):
        check({**RESULT, "rows": ROWS[:-1]}, memory.FULL)


def test_memory_and_traffic_grow_with_the_batch():
    lines = collections.defaultdict(list)
    for row in ROWS:
        key = (row["model"], row["gemm"], row["target"], row["step"])
        lines[key].append((row["batch"], row["peak_bytes"], row["traffic_bytes"]))
    for line in lines.values():
        for smaller, larger in itertools.pairwise(sorted(line)):
            assert all(a < b for a, b in zip(smaller, larger, strict=True))


def test_sixteen_bits_take_less():
    for row in ROWS:
        if row["step"] != memory.REFERENCE:
            assert row["peak_ratio"] > 1
            assert row["traffic_ratio"] > 1


def test_the_largest_batch_agrees_with_the_rows():
    found = {row["step"]: row for row in RESULT["largest_batch"]}
    for row in ROWS:
        largest = found.get(row["step"])
        if largest is not None and all(row[k] == largest[k] for k in ("model", "gemm", "target")):
            assert row["fits"] == (row["batch"] <= largest["batch"])


def test_the_page_has_the_figures():
    page = (render.DOCS / "memory.md").read_text()
    for row in ROWS:
        if row["target"] == "h100" and row["gemm"] == "library":
            assert f"| {row['peak_bytes'] / 2**20:,.0f} " in page
            assert f"| {row['traffic_bytes'] / 2**30:,.2f} " in page
    assert (render.DOCS / "images" / "memory.png").stat().st_size > 0


def test_only_what_nearly_fills_a_card_is_rematerialized():
    for row in ROWS:
        if row["rematerialized"]:
            assert row["peak_bytes"] > row["usable_bytes"] / 2
        elif not row["fits"]:
            raise AssertionError(f"nothing was done to make it fit: {row}")


def test_rematerialized_instructions_are_counted():
    program = "ENTRY %main {\n  %a.remat = f32[2] negate(%x)\n  %b = f32[2] add(%a.remat, %x)\n"
    assert memory.rematerialized(program + "  ROOT %c.remat2.1 = f32[2] negate(%b)\n}\n") == 2


def arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape")]


@pytest.mark.usefixtures("peer", "standard_promotion")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_returns_what_it_was_given(name: str):
    """And the loss. So every donated argument finds its place, and float32 stays float32."""
    variant = VARIANTS[name]
    given = arguments(variant, {**memory.SMALL.sizes, "width": 16, "hidden": 16}, 2)
    leaves, treedef = jax.tree.flatten(given)

    def flat(*values: Any) -> list[Any]:
        rest = iter(values)
        filled = [next(rest) if hasattr(leaf, "shape") else leaf for leaf in leaves]
        return arrays(variant.step(*jax.tree.unflatten(treedef, filled)))

    returned = jax.eval_shape(flat, *arrays(given))
    expected = [*arrays(given[:3]), jax.ShapeDtypeStruct((), "float32")]
    assert [(x.shape, x.dtype) for x in returned] == [(x.shape, x.dtype) for x in expected]


@dataclasses.dataclass
class Entry:
    """What the benchmark reads of a preflight's entry."""

    peak_bytes: int
    traffic_bytes: int = 2**30
    usable_bytes: int = 2**30
    fits: bool = True
    hlo: str = ""


class Compiler:
    """Answers at once, with less for each step than for the one before; may refuse one."""

    def __init__(self, refused: str | None = None):
        self.refused = refused

    def __call__(self, step: Any, args: Any, **options: Any) -> Any:
        (name,) = (name for name, variant in VARIANTS.items() if variant.step is step)
        if name == self.refused:
            raise RefusedError("the compiler refused the step. It says:\nINTERNAL: no\nand more")
        entry = Entry(2**20 * (9 - list(VARIANTS).index(name)))
        return types.SimpleNamespace(entries=(entry,))

    def largest_batch(self, step_for_batch: Any, **options: Any) -> Any:
        (entry,) = self(*step_for_batch(32)).entries
        return types.SimpleNamespace(batch=32, entry=entry, tried={32: entry})


@pytest.mark.usefixtures("peer")
def test_json_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(halfstep, "preflight", Compiler())
    monkeypatch.setattr("sys.argv", ["memory", "--quick", "--json", "out.json"])
    memory.main(["--quick", "--json", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    check(written, memory.QUICK)
    assert written["command"] == "python -m benchmarks.memory --quick --json out.json"
    assert [row["peak_ratio"] for row in written["rows"]] == [1, 1.125, 1.286, 1.5, 1.8]
    shown = capsys.readouterr().out
    assert "| halfstep, f16  | 5        | 1.8 " in shown
    assert "largest batch of the desktop ViT on h100, mpx, f16: 32" in shown
    monkeypatch.setattr(halfstep, "preflight", None)
    assert memory.main(["--from", str(tmp_path / "out.json")]) == written
    assert capsys.readouterr().out == shown


@pytest.mark.usefixtures("peer")
def test_a_refused_step_is_said_and_the_others_go_on(monkeypatch, capsys):
    monkeypatch.setattr(halfstep, "preflight", Compiler(refused="mpx, f16"))
    made = memory.main(["--quick"])
    rows = {row["step"]: row for row in made["rows"]}
    assert rows.pop("mpx, f16")["refused"] == "INTERNAL: no"
    assert all(row["peak_ratio"] >= 1 for row in rows.values())
    assert "mpx, f16: refused: INTERNAL: no" in capsys.readouterr().out


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    memory.main(["--from", str(render.RESULTS / "memory.json"), "--plot", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler", "peer", "standard_promotion")
def test_the_command(tmp_path):
    """One block, for real: and what 16 bits save there."""
    made = memory.main(["--quick", "--json", str(tmp_path / "out.json")])
    check(json.loads((tmp_path / "out.json").read_text()), memory.QUICK)
    rows = {row["step"]: row for row in made["rows"]}
    # The same casts make the same program, whoever writes them.
    assert rows["halfstep, bf16"]["peak_bytes"] == rows["by hand, bf16"]["peak_bytes"]
    assert rows["halfstep, bf16"]["traffic_bytes"] == rows["by hand, bf16"]["traffic_bytes"]
    # Products and what is saved for the backward pass are half as large; AdamW is not.
    assert 1.5 < rows["halfstep, bf16"]["traffic_ratio"] < 2
