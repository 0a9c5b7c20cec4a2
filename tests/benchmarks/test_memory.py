"""The memory benchmark: its results agree with themselves, and its command runs."""

import collections
import dataclasses
import itertools
import json
import types
from collections.abc import Mapping
from typing import Any

import jax
import pytest

import halfstep
from benchmarks import _figure, _memory_tables, memory, render
from benchmarks._models import Model, gpt, vit
from benchmarks._steps import VARIANTS, arguments
from halfstep._preflight.preflight_errors import RefusedError
from tests._jaxprs import contractions
from tests.preflight._compilers import need

RESULT = json.loads((render.RESULTS / "memory.json").read_text())
ROWS: list[dict[str, Any]] = RESULT["rows"]
ON_GPU = [row for row in ROWS if row["gemm"] is not None]
MODELS = (
    vit("ViT", image=32, patch=4, width=16, hidden=16, heads=8, blocks=1, classes=10),
    gpt("GPT", vocabulary=16, tokens=8, width=16, layers=2, heads=2),
    gpt("GPT, remat", vocabulary=16, tokens=8, width=16, layers=2, heads=2, remat=True),
)


@pytest.fixture
def gpu_compiler() -> None:
    """XLA's GPU compiler: without it a test is skipped, or fails where it is required."""
    need("cuda")


@pytest.fixture
def tpu_compiler() -> None:
    """XLA's TPU compiler, in the same way."""
    need("tpu")


@pytest.fixture
def peer() -> None:
    pytest.importorskip("mpx")


def check(result: dict[str, Any], plan: memory.Plan) -> None:
    """Every row is there once, and what follows from other figures does."""
    rows = result["rows"]
    only = result["only"]
    assert [(*memory.place(row), row["step"]) for row in rows] == [
        (runs.model.name, runs.gemm, runs.target, batch, step)
        for runs, batch, step in plan.jobs()
        if memory.is_chosen((runs, batch, step), only)
    ]
    base = {memory.place(row): row for row in rows if row["step"] == memory.REFERENCE}
    for row in rows:
        assert "refused" not in row
        reference = base[memory.place(row)]
        for what in ("peak", "traffic", "accessed"):
            mine, other = row[f"{what}_bytes"], reference[f"{what}_bytes"]
            ratio = None if mine is None or other is None else round(other / mine, 3)
            assert row.get(f"{what}_ratio") == ratio
        # A TPU's compiler may give up, with or without a figure of what it would take.
        assert row["fits"] or row["peak_bytes"] is None or row["peak_bytes"] > row["usable_bytes"]
        assert not row["fits"] or row["peak_bytes"] <= row["usable_bytes"]
        if "floor_bytes" in row:
            given = reference["argument_bytes"] or row["argument_bytes"]
            assert row["floor_bytes"] == (given + reference["peak_bytes"]) // 2
            assert row["floor_ratio"] == round(row["peak_bytes"] / row["floor_bytes"], 3)
        elif row["gemm"] is not None:
            raise AssertionError(f"no floor: {row}")
    searched = () if only else (*memory.SEARCHED, *memory.PLANNED)
    assert [row["step"] for row in result["largest_batch"]] == list(searched)
    for row in result["largest_batch"]:
        tried = {int(batch): peak for batch, peak in row["tried"].items()}
        assert row["batch"] % memory.STRIDE == 0
        assert tried[row["batch"]] == row["peak_bytes"] <= row["usable_bytes"]
        following = row["batch"] + memory.STRIDE
        assert following > plan.search.maximum or tried[following] > row["usable_bytes"]


def test_results_are_complete_and_consistent():
    check(RESULT, memory.FULL)


def test_an_inconsistent_result_is_noticed():
    for key, value in (("peak_bytes", 1), ("traffic_ratio", 9.0), ("floor_ratio", 9.0)):
        rows = [{**row, key: value} if row["step"] == "mpx, f16" else row for row in ROWS]
        with pytest.raises(AssertionError):
            check({**RESULT, "rows": rows}, memory.FULL)
    with pytest.raises(AssertionError):
        check({**RESULT, "rows": ROWS[:-1]}, memory.FULL)


def test_memory_and_traffic_grow_with_the_batch():
    lines = collections.defaultdict(list)
    for row in ON_GPU:
        key = (row["model"], row["gemm"], row["target"], row["step"])
        lines[key].append((row["batch"], row["peak_bytes"], row["traffic_bytes"]))
    for line in lines.values():
        for smaller, larger in itertools.pairwise(sorted(line)):
            assert all(a < b for a, b in zip(smaller, larger, strict=True))


def test_our_sixteen_bits_take_less():
    # What is cast by hand need not: with remat it takes more than float32 on TPU.
    for row in ROWS:
        if row["step"].startswith("halfstep, "):
            assert row.get("peak_ratio", 2) > 1
            assert row.get("traffic_ratio" if row["gemm"] else "accessed_ratio", 2) > 1


def test_the_largest_batch_agrees_with_the_rows():
    found = {row["step"]: row for row in RESULT["largest_batch"]}
    for row in ROWS:
        largest = found.get(row["step"])
        if largest is not None and all(row[k] == largest[k] for k in ("model", "gemm", "target")):
            assert row["fits"] == (row["batch"] <= largest["batch"])


def test_the_page_has_the_figures():
    page = (render.DOCS / "memory.md").read_text()
    for row in ROWS:
        shown = row["gemm"] is None or (row["target"], row["gemm"]) == ("h100", "library")
        if shown and row["peak_bytes"] is not None:
            assert f"| {row['peak_bytes'] / 2**20:,.0f} " in page
            if "floor_bytes" in row:
                assert f"| {row['floor_bytes'] / 2**20:,.0f} " in page
        moved = row.get("accessed_bytes") if row["gemm"] is None else row["traffic_bytes"]
        if shown and moved is not None:
            assert f"| {moved / 2**30:,.2f} " in page
    assert (render.DOCS / "images" / "memory.png").stat().st_size > 0


def test_the_page_says_what_every_step_is():
    page = (render.DOCS / "memory.md").read_text()
    for name in VARIANTS:
        assert f"\n| {name} | " in page


def test_only_what_nearly_fills_a_card_is_rematerialized():
    for row in ON_GPU:
        if row["rematerialized"]:
            assert row["peak_bytes"] > row["usable_bytes"] / 2
        elif not row["fits"]:
            raise AssertionError(f"nothing was done to make it fit: {row}")


def test_rematerialized_instructions_are_counted():
    program = "ENTRY %main {\n  %a.remat = f32[2] negate(%x)\n  %b = f32[2] add(%a.remat, %x)\n"
    assert memory.rematerialized(program + "  ROOT %c.remat2.1 = f32[2] negate(%b)\n}\n") == 2


def arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape")]


@pytest.mark.rows(5)
@pytest.mark.usefixtures("peer", "standard_promotion")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_returns_what_it_was_given(name: str, model: Model):
    """And the loss. So every donated argument finds its place, and float32 stays float32."""
    variant = VARIANTS[name]
    given = arguments(variant, model, 2)
    leaves, treedef = jax.tree.flatten(given)
    step = variant.of(model.loss)

    def flat(*values: Any) -> list[Any]:
        rest = iter(values)
        filled = [next(rest) if hasattr(leaf, "shape") else leaf for leaf in leaves]
        return arrays(step(*jax.tree.unflatten(treedef, filled)))

    traced = jax.make_jaxpr(flat)(*arrays(given))
    expected = [*arrays(given[:3]), jax.ShapeDtypeStruct((), "float32")]
    made: Any = traced.out_avals
    assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in expected]
    low = halfstep.FORMATS[name.split()[-1]].dtype
    assert set(contractions(flat, *arrays(given))) == {str(low)}


@dataclasses.dataclass
class Entry:
    """What the benchmark reads of a preflight's entry."""

    peak_bytes: int
    argument_bytes: int = 2**20
    traffic_bytes: int = 2**30
    usable_bytes: int = 2**30
    fits: bool = True
    hlo: str = ""
    estimates: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Compiler:
    """Answers at once, with less for each step than for the one before; may refuse one."""

    def __init__(self, plan: memory.Plan, refused: str | None = None):
        planned = [f"halfstep, {policy}" for policy in memory.PLANNED.values()]
        steps = [step for _, _, step in plan.jobs()]
        self.names = iter([*steps, *memory.SEARCHED, *planned])
        self.refused = refused

    def __call__(self, step: Any, args: Any, *, targets: str = "h100", **options: Any) -> Any:
        name = next(self.names)
        if name == self.refused:
            raise RefusedError("the compiler refused the step. It says:\nINTERNAL: no\nand more")
        entry = Entry(2**20 * (9 - list(VARIANTS).index(name)))
        if targets == "v5e":
            entry.estimates = {"bytes accessed": 2.0**31}
        return types.SimpleNamespace(entries=(entry,))

    def largest_batch(self, step_for_batch: Any, **options: Any) -> Any:
        (entry,) = self(*step_for_batch(32)).entries
        return types.SimpleNamespace(batch=32, entry=entry, tried={32: entry})


def plan(make_step: Any, args: Any, *, policy: str, **options: Any) -> Any:
    """A plan that changes nothing, for the batch after the largest one."""
    assert args[-1].shape[0] == 32 + memory.STRIDE
    return types.SimpleNamespace(policy=halfstep.Policy.parse(policy))


@pytest.mark.usefixtures("peer")
def test_json_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(halfstep, "preflight", Compiler(memory.QUICK))
    monkeypatch.setattr(halfstep, "plan", plan)
    monkeypatch.setattr("sys.argv", ["memory", "--quick", "--json", "out.json"])
    memory.main(["--quick", "--json", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    check(written, memory.QUICK)
    assert written["command"] == "python -m benchmarks.memory --quick --json out.json"
    on_gpu = [1, 1.125, 1.286, 1.5, 1.8, 2.25]
    assert [row["peak_ratio"] for row in written["rows"]] == [*on_gpu, 1, 1.8]
    # Of 9 MiB one is arguments, so that 5 is the floor.
    assert {row["floor_bytes"] for row in written["rows"]} == {5 * 2**20}
    shown = capsys.readouterr().out
    assert "| halfstep, f16         | 4        | 2.25  | 0.8 " in shown
    assert "| 2.00         | 1.0 " in shown
    assert "largest batch of the one block on h100, mpx, f16: 32" in shown
    monkeypatch.setattr(halfstep, "preflight", None)
    assert memory.main(["--from", str(tmp_path / "out.json")]) == written
    assert capsys.readouterr().out == shown
    # Nothing is compiled again where every row is there.
    again = memory.main(["--quick", "--resume", "--json", str(tmp_path / "out.json")])
    assert {**again, "command": written["command"]} == written
    with pytest.raises(SystemExit):
        memory.main(["--quick", "--resume"])
    assert "--resume keeps the rows of a file" in capsys.readouterr().err


def test_rows_can_be_chosen():
    def chosen(*only: str) -> list[tuple[str, str | None, str, int, str]]:
        return [
            (runs.model.name, runs.gemm, runs.target, batch, step)
            for runs, batch, step in memory.FULL.jobs()
            if memory.is_chosen((runs, batch, step), only)
        ]

    assert len(chosen()) == len(list(memory.FULL.jobs()))
    assert {row[0] for row in chosen("GPT")} == {"GPT"}
    assert chosen("desktop ViT", "h100", "library", "batch 64", "mpx, f16") == [
        ("desktop ViT", "library", "h100", 64, step) for step in ("f32", "mpx, f16")
    ]


def test_what_a_compiler_does_not_say_is_left_out():
    row = {"model": "m", "gemm": None, "target": "v5e", "batch": 8, "traffic_bytes": None}
    gave_up = {**row, "step": "f32", "peak_bytes": None, "argument_bytes": None}
    fits = {**row, "step": "halfstep, bf16", "peak_bytes": 2**20, "argument_bytes": 2**10}
    made = memory.with_ratios([gave_up, fits])
    assert made == [gave_up, fits]
    assert _memory_tables.by_batch(made, "peak", ("v5e",)) == [
        {"model": "m", "batch": 8, "halfstep, bf16": "1"}
    ]
    # With a figure of what it would take, there is a floor, of the arguments of the other.
    gave_up["peak_bytes"] = 3 * 2**20
    assert memory.with_ratios([gave_up, fits])[1]["floor_bytes"] == (2**10 + 3 * 2**20) // 2


@pytest.mark.usefixtures("peer")
def test_a_refused_step_is_said_and_the_others_go_on(monkeypatch, capsys):
    monkeypatch.setattr(halfstep, "preflight", Compiler(memory.QUICK, refused="mpx, f16"))
    monkeypatch.setattr(halfstep, "plan", plan)
    made = memory.main(["--quick"])
    rows = {(row["target"], row["step"]): row for row in made["rows"]}
    assert rows.pop(("h100", "mpx, f16"))["refused"] == "INTERNAL: no"
    assert all(row["peak_ratio"] >= 1 for row in rows.values())
    assert "mpx, f16: refused: INTERNAL: no" in capsys.readouterr().out


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    memory.main(["--from", str(render.RESULTS / "memory.json"), "--plot", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_at_one_batch_is_not_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(_figure, "lines", lambda axes, rows, key: drawn.extend(rows))
    rows = [row for row in ROWS if row["model"] == "desktop ViT" or row["batch"] == 128]
    _figure.plot({**RESULT, "rows": rows}, tmp_path / "a.png")
    assert {row["model"] for row in drawn} == {"desktop ViT"}


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler", "tpu_compiler", "peer", "standard_promotion")
def test_the_command(tmp_path):
    """One block, for real: and what 16 bits save there."""
    made = memory.main(["--quick", "--json", str(tmp_path / "out.json")])
    check(json.loads((tmp_path / "out.json").read_text()), memory.QUICK)
    rows = {row["step"]: row for row in made["rows"] if row["target"] == "h100"}
    # The same casts make the same program, whoever writes them.
    for what in ("peak_bytes", "traffic_bytes"):
        assert rows["halfstep inputs, bf16"][what] == rows["by hand, bf16"][what]
    # Products and what is saved for the backward pass are half as large; AdamW is not.
    assert 1.5 < rows["halfstep, bf16"]["traffic_ratio"] < 2
    assert rows["halfstep, bf16"]["peak_ratio"] > rows["halfstep inputs, bf16"]["peak_ratio"]
