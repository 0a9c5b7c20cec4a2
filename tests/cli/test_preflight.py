"""The whole command. All but one test have a compiler that is made up, and so is what it says."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import pytest

import halfstep
from halfstep._preflight import Target, steps as _steps_of_preflight
from halfstep._preflight.compile.compiler import CompilerAnswer
from halfstep._preflight.compile.lowering import Program
from halfstep.cli import main
from tests.cli import _steps
from tests.preflight._compilers import need
from tests.preflight._entries import entry, peak
from tests.preflight._programs import dump

ROOT = pathlib.Path(__file__).parents[2]
STEPS = "tests.cli._steps"
GIB = 2**30

# One contraction in float32; what the figures are made of does not matter here.
HLO = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (w: f32[32,32], x: f32[4,32]) -> f32[4,32] {
  %w = f32[32,32]{1,0} parameter(0)
  %x = f32[4,32]{1,0} parameter(1)
  ROOT %dot = f32[4,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def made_up(program: Program, target: Target, **settings: Any) -> CompilerAnswer:
    """Each example takes 1 GiB in float32 and half of that in 16 bits."""
    x = next(leaf for leaf in program.leaves if leaf.name == "x")
    temporaries = x.shape[0] * (GIB if x.dtype == "float32" else GIB // 2)
    arguments = sum(leaf.bytes for leaf in program.leaves)
    outputs = sum(leaf.bytes for leaf in program.leaves if leaf.donated)
    gemm, flags = settings["gemm"], tuple(settings["flags"])
    if target.accelerator.platform == "tpu":
        gemm = None
        if temporaries > target.memory_bytes:
            return CompilerAnswer({}, {}, "", flags, gemm, {}, exceeded="RESOURCE_EXHAUSTED: hbm")
    memory = {
        "argument_size_in_bytes": arguments,
        "output_size_in_bytes": outputs,
        "alias_size_in_bytes": outputs,
        "temp_size_in_bytes": temporaries,
        "peak_memory_in_bytes": arguments + temporaries,
    }
    return CompilerAnswer(memory, {}, HLO, flags, gemm, {"jax": jax.__version__}, dump(HLO))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the made-up compiler was asked, call by call."""
    asked: list[dict[str, Any]] = []

    def compile_program(program: Program, target: Target, **settings: Any) -> CompilerAnswer:
        asked.append({"target": target.name, **settings})
        return made_up(program, target, **settings)

    monkeypatch.setattr(_steps_of_preflight, "compile_program", compile_program)
    monkeypatch.setattr(_steps_of_preflight, "compiler_versions", lambda platform: {})
    # Needs the package flatbuffers, which is not everywhere.
    monkeypatch.setattr(jax.export.Exported, "serialize", lambda exported: b"")
    return asked


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command adds to the path and to the modules; here it does so for one test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("my_train", "my_script", "my_sibling"):
        sys.modules.pop(name, None)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `halfstep preflight MAKE_STEP ...`; returns exit status, standard output and error."""

    def command(make_step: str, *options: str) -> tuple[int, str, str]:
        try:
            status = main(["preflight", make_step, *options])
        except SystemExit as exit_:
            status = exit_.code
        out, err = capsys.readouterr()
        assert isinstance(status, int)
        return status, out, err

    return command


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def rows(out: str) -> list[list[str]]:
    """The cells of the table's lines, heading first."""
    return [cells(line) for line in out.split("\n\n")[0].splitlines()]


# Answers.


def test_a_sweep_over_targets_policies_and_batches(run: Run, compiles: list):
    status, out, err = run(
        f"{STEPS}:make_step",
        *("--target", "h100", "--target", "v5e"),
        *("--policy", "f32,bf16", "--batch", "8,32"),
    )
    assert (status, err) == (0, "")
    heading, *lines = rows(out)
    assert heading[:4] == ["target", "step", "fits", "peak"]
    assert [line[:4] for line in lines] == [
        ["h100", "f32, batch 8", "yes", "8.00 GiB"],
        ["h100", "f32, batch 32", "yes", "32.00 GiB"],
        ["h100", "bf16, batch 8", "yes", "4.00 GiB"],
        ["h100", "bf16, batch 32", "yes", "16.00 GiB"],
        ["v5e", "f32, batch 8", "yes", "8.00 GiB"],
        ["v5e", "f32, batch 32", "NO", "-"],
        ["v5e", "bf16, batch 8", "yes", "4.00 GiB"],
        ["v5e", "bf16, batch 32", "NO", "-"],
    ]
    assert "the compiler gave up: RESOURCE_EXHAUSTED" in out
    assert [call["target"] for call in compiles] == ["h100"] * 4 + ["v5e"] * 4


def test_targets_with_commas(run: Run, compiles: list):
    status, _, err = run(f"{STEPS}:make_step", "--target", "h100, v5e", "--target", "l4")
    assert (status, err) == (0, "")
    assert [call["target"] for call in compiles] == ["h100", "v5e", "l4"]


def test_defaults_of_make_step(run: Run, compiles: list):
    status, out, _ = run(f"{STEPS}:make_step", "--target", "h100")
    assert status == 0
    assert rows(out)[1][:3] == ["h100", "yes", "4.00 GiB"]
    assert len(compiles) == 1


def test_options_reach_the_compiler(run: Run, compiles: list):
    options = ["--gemm", "library", "--flag=--xla_gpu_a=1", "--timeout", "9", "--no-cache"]
    status, out, _ = run(f"{STEPS}:make_any_step", "--target", "h100:1", "--batch", "2", *options)
    assert status == 0
    assert compiles == [
        {
            "target": "h100:1",
            "gemm": "library",
            "flags": ("--xla_gpu_a=1",),
            "timeout": 9.0,
            "cache": False,
        }
    ]
    assert "GPU matrix products: library" in out


def test_the_memory_fraction_decides_what_fits(run: Run, compiles: list):
    sixty = [f"{STEPS}:make_step", "--target", "h100", "--batch", "60"]
    assert rows(run(*sixty)[1])[1][1] == "NO"
    assert rows(run(*sixty, "--memory-fraction", "0.9")[1])[1][1] == "yes"


def test_what_the_step_and_the_user_donate(run: Run, compiles: list):
    def donated(*options: str) -> int:
        _, out, _ = run(f"{STEPS}:make_step", "--target", "h100", "--json", "-", *options)
        return json.loads(out)["entries"][0]["alias_bytes"]

    parameters, batch = 4 * _steps.WIDTH**2, 4 * 4 * _steps.WIDTH
    assert donated() == parameters
    assert donated("--donate", "0,1") == parameters + batch


def test_a_policy_written_out_is_one_policy(run: Run, compiles: list):
    status, out, _ = run(
        f"{STEPS}:make_step",
        *("--target", "h100", "--policy", "f32", "--policy", "p=f32,c=bf16,o=f32"),
    )
    assert status == 0
    assert [line[1] for line in rows(out)[1:]] == ["f32", "p=f32,c=bf16,o=f32"]


def test_the_largest_batch(run: Run, compiles: list):
    status, out, _ = run(
        f"{STEPS}:make_step",
        *("--target", "h100", "--target", "v5e", "--policy", "f32,bf16"),
        *("--largest-batch", "--multiple-of", "2"),
    )
    assert status == 0
    expected = {("f32", "h100"): 58, ("bf16", "h100"): 118, ("f32", "v5e"): 14, ("bf16", "v5e"): 30}
    for (policy, target), batch in expected.items():
        assert f"{policy}, {target}: the largest batch is {batch} (" in out
        assert any(line[:2] == [target, f"{policy}, batch {batch}"] for line in rows_below(out))


def rows_below(out: str) -> list[list[str]]:
    """The table that stands below other lines."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("target"))
    return [cells(line) for line in lines[start:]]


def test_no_batch_fits_on_one_of_two(run: Run, compiles: list):
    status, out, err = run(
        f"{STEPS}:make_step",
        *("--target", "v5e", "--target", "h100", "--largest-batch", "--multiple-of", "20"),
    )
    assert status == 1
    assert "not even a batch of 20 fits on v5e" in err
    assert "h100: the largest batch is 40" in out


# Where answers go.


@pytest.mark.parametrize("search", [False, True])
def test_json_on_standard_output_is_nothing_but_json(run: Run, compiles: list, search: bool):
    options = ["--largest-batch"] if search else ["--batch", "8", "--detail"]
    status, out, err = run(
        f"{STEPS}:make_loud_step", "--target", "h100", "--json", "-", "--require-fit", *options
    )
    assert status == 0
    (entry,) = json.loads(out)["entries"]
    assert entry["variant"] == ("batch 59" if search else "batch 8")
    assert "made a step" in err
    if search:
        assert "the largest batch is 59" in err


def test_json_and_plot_in_files(run: Run, compiles: list, tmp_path: pathlib.Path):
    made, drawn = tmp_path / "report.json", tmp_path / "report.png"
    status, out, _ = run(
        f"{STEPS}:make_step",
        *("--target", "h100", "--policy", "f32,f16", "--json", str(made), "--plot", str(drawn)),
    )
    assert status == 0
    report = json.loads(made.read_text())
    assert [entry["variant"] for entry in report["entries"]] == ["f32", "f16"]
    assert report["entries"][1]["peak_bytes"] - report["entries"][1]["argument_bytes"] == 2 * GIB
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert [line[1] for line in rows(out)[1:]] == ["f32", "f16"]


def test_detail(run: Run, compiles: list):
    status, out, _ = run(f"{STEPS}:make_step", "--target", "h100", "--detail")
    assert status == 0
    figures = {line[0]: line[1:] for line in rows(out)}
    assert figures["memory: parameters"] == ["4.0 KiB"]
    assert figures["memory: batch"] == ["512 B"]
    assert figures["memory: temporaries"] == ["4.00 GiB"]
    assert figures["contraction: float32 x float32 -> float32"] == ["8192 FLOP in 1"]


def test_what_fills_the_peak(run: Run, tmp_path: pathlib.Path):
    saved, drawn = tmp_path / "report.json", tmp_path / "peak.png"
    halfstep.PreflightReport((entry(peak=peak()),)).to_json(saved)
    status, out, _ = run(str(saved), "--peak", "--plot-peak", str(drawn))
    assert status == 0
    assert "What fills the peak of bf16 on h100" in out
    assert "By role: residuals 60 %" in out
    assert drawn.read_bytes().startswith(b"\x89PNG")
    _, out, _ = run(str(saved))
    assert "What fills" not in out
    _, out, _ = run(str(saved), "--peak", "--detail")
    assert out.count("What fills") == 1


@pytest.mark.parametrize(("batch", "expected"), [("8,16", 0), ("8,64", 1)])
def test_require_fit(run: Run, compiles: list, batch: str, expected: int):
    options = ["--target", "h100", "--batch", batch]
    assert run(f"{STEPS}:make_step", *options)[0] == 0
    status, out, err = run(f"{STEPS}:make_step", *options, "--require-fit")
    assert status == expected
    assert len(rows(out)) == 3
    assert ("batch 64 does not fit on h100: it needs 64.00 GiB" in err) == (expected == 1)


def test_what_must_be_in_8_bits(run: Run, compiles: list, monkeypatch: pytest.MonkeyPatch):
    options = ["--target", "h100", "--f8", "1"]
    status, _, err = run(f"{STEPS}:make_step", *options)
    assert status == 1
    assert "required: 100 % of the eligible contractions' FLOPs in fp8" in err
    monkeypatch.setattr(sys.modules[__name__], "HLO", HLO.replace("f32[", "f8e4m3fn["))
    assert run(f"{STEPS}:make_step", *options)[0] == 0


# A saved report.


def test_a_saved_report_is_shown(run: Run, compiles: list, tmp_path: pathlib.Path):
    path = str(tmp_path / "report.json")
    _, compiled, _ = run(MAKE_STEP, "--target", "h100", "--batch", "64", "--json", path)
    assert run(path) == (0, compiled, "")
    assert run(path, "--require-fit")[0] == 1
    assert json.loads(run(path, "--json", "-")[1]) == json.loads(pathlib.Path(path).read_text())


# No answer: status 2, what to do about it, and no traceback.

MAKE_STEP = f"{STEPS}:make_step"
TO = ("--target", "h100")
WRONG: dict[str, tuple[Sequence[str], str]] = {
    "no colon": ((STEPS, *TO), "such as train.py:make_step; got 'tests.cli._steps'"),
    "no module": (("nowhere:make_step", *TO), "cannot import 'nowhere': No module named 'nowhere'"),
    "no file": (("nowhere.py:make_step", *TO), "there is no file 'nowhere.py'"),
    "no function": ((f"{STEPS}:nothing", *TO), "must have a function 'nothing'; it has none"),
    "no callable": ((f"{STEPS}:not_a_function", *TO), "'not_a_function'; it has a int"),
    "no batch=": (
        (f"{STEPS}:without_batch", *TO, "--policy", "f32", "--batch", "8"),
        "can be called as without_batch(policy=..., batch=...)",
    ),
    "no batch= to look for": (
        (f"{STEPS}:without_batch", *TO, "--policy", "f32", "--largest-batch"),
        "can be called as without_batch(policy=..., batch=...)",
    ),
    "no policy": ((f"{STEPS}:without_batch", *TO), "can be called as without_batch()"),
    "an argument of its own": (
        (f"{STEPS}:with_depth", *TO, "--batch", "8"),
        "can be called as with_depth(batch=...)",
    ),
    "no arguments": (
        (f"{STEPS}:only_a_step", *TO),
        "must return a step and a tuple of its arguments, (step, args); got a PjitFunction",
    ),
    "arguments first": ((f"{STEPS}:swapped", *TO), "(step, args); got (tuple, PjitFunction)"),
    "no tuple of arguments": (
        (f"{STEPS}:bare_argument", *TO),
        "(step, (params,)) if there is one; got a dict instead of the tuple",
    ),
    "unknown target": ((MAKE_STEP, "--target", "h1000"), "Did you mean 'h100'?"),
    "size of a target": ((MAKE_STEP, "--target", "v5e:3x2"), "Write 'v5e:4x2'"),
    "no target": ((MAKE_STEP,), "--target is required and was not given. Write --target h100"),
    "no mesh": ((MAKE_STEP, "--target", "h100:8"), "give `mesh=` and `shardings=`"),
    "another mesh": (
        (f"{STEPS}:sharded_over_four", "--target", "h100:8"),
        "the mesh {'data': 4} has 4 devices, but h100:8 has 8",
    ),
    "no saved report": (("nowhere.json",), "cannot read the report 'nowhere.json': No such file"),
    "a saved report for a target": (
        ("after.json", *TO, "--policy", "f32"),
        "after.json is a saved report, and nothing is compiled; leave out --target, --policy",
    ),
    "no number": ((MAKE_STEP, *TO, "--batch", "8,many"), "such as 64,128; got '8,many'"),
    "two ways to a batch": (
        (MAKE_STEP, *TO, "--batch", "8", "--largest-batch"),
        "--largest-batch looks for the batch itself; got --batch 8 with it",
    ),
    "policies of both forms": (
        (MAKE_STEP, *TO, "--policy", "f32,p=f32,c=bf16"),
        "such as --policy f32 --policy p=f32,c=bf16; got 'f32,p=f32,c=bf16'",
    ),
    "no folder": (
        (MAKE_STEP, *TO, "--json", "nowhere/out.json"),
        "cannot write 'nowhere/out.json': there is no folder 'nowhere'",
    ),
    "a folder": ((MAKE_STEP, *TO, "--json", "."), "cannot write '.': it is a folder"),
    "no picture": (
        (MAKE_STEP, *TO, "--plot", "out.gif"),
        "cannot write 'out.gif': the name must end in .png or .pdf or .svg",
    ),
    "no flag": ((MAKE_STEP, *TO, "--flag=-O3"), "--xla_gpu_... or --xla_tpu_...; got '-O3'"),
    "fraction": ((MAKE_STEP, *TO, "--memory-fraction", "75"), "at most 1; got 75.0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use(
    name: str,
    run: Run,
    compiles: list,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    options, message = WRONG[name]
    status, out, err = run(*options)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
    assert "error: " in err or err.startswith("halfstep: ")
    assert (out, compiles) == ("", []), "nothing was compiled"


def test_an_unwritable_folder(run: Run, compiles: list, monkeypatch: pytest.MonkeyPatch):
    # Root may write everywhere.
    monkeypatch.setattr("os.access", lambda *_: False)
    status, _, err = run(MAKE_STEP, *TO, "--json", "out.json")
    assert (status, compiles) == (2, [])
    assert "cannot write 'out.json': permission denied" in err


def test_a_missing_compiler(run: Run, compiles: list, monkeypatch: pytest.MonkeyPatch):
    def missing(platform: str) -> None:
        raise halfstep.PreflightError(f"no compiler for {platform}; pip install it")

    monkeypatch.setattr(_steps_of_preflight, "compiler_versions", missing)
    assert run(MAKE_STEP, *TO) == (2, "", "halfstep: no compiler for cuda; pip install it\n")


def test_the_users_own_error_has_its_traceback_and_is_no_answer(run: Run, compiles: list):
    status, out, err = run(f"{STEPS}:fails", *TO)
    assert (status, out) == (2, "")
    assert "_steps.py" in err
    assert "ZeroDivisionError: in the user's own code" in err


def test_interruption(run: Run, compiles: list, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_steps_of_preflight, "compile_program", interrupted)
    assert run(MAKE_STEP, *TO)[::2] == (130, "halfstep: interrupted\n")


# Modules and files.


def test_a_module_in_the_working_directory(
    run: Run, compiles: list, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_train.py").write_text(f"from {STEPS} import make_step\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p] + [str(ROOT)])
    assert run("my_train:make_step", *TO)[0] == 0
    assert len(compiles) == 1


def test_a_file_with_a_sibling(run: Run, compiles: list, tmp_path: pathlib.Path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "my_sibling.py").write_text(f"from {STEPS} import make_step\n")
    (folder / "my_script.py").write_text("from my_sibling import make_step\n")
    assert run(f"{folder / 'my_script.py'}:make_step", *TO)[0] == 0
    assert len(compiles) == 1


# The real thing.


def test_the_version():
    done = subprocess.run(
        [sys.executable, "-m", "halfstep", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"halfstep {halfstep.__version__}\n"


def test_help_says_what_make_step_is(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["preflight", "--help"])
    assert 'def make_step(policy="f32", batch=64):' in capsys.readouterr().out


@pytest.mark.slow
def test_the_gpu_compiler(tmp_path: pathlib.Path):
    need("cuda")
    options = ["--target", "h100", "--policy", "bf16", "--batch", "64", "--require-fit"]
    # As users have it: nothing says that there is no GPU.
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-m", "halfstep", "preflight", MAKE_STEP, *options, "--json", "-"],
        cwd=ROOT,
        env=environment | {"HALFSTEP_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (entry,) = json.loads(done.stdout)["entries"]
    assert entry["variant"] == "bf16, batch 64"
    assert entry["memory"]["parameters"] == 4 * _steps.WIDTH**2
    assert entry["memory"]["batch"] == 2 * 64 * _steps.WIDTH
    assert entry["alias_bytes"] == 4 * _steps.WIDTH**2
    version = importlib.metadata.version("jax-cuda12-plugin")
    assert entry["versions"]["jax-cuda12-plugin"] == version
