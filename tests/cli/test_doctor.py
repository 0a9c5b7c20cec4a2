"""`halfstep doctor`: what it finds, on machines that have it."""

import json
import pathlib
import re
import tomllib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import halfstep
from halfstep._base.versions import TESTED_JAX, TESTED_PYTHON, known_to_work
from halfstep.cli import main
from halfstep.cli._run import doctor, facts
from halfstep.cli._run.facts import Requirement, expanded
from halfstep.cli._run.pitfalls import pitfalls
from tests.cli._machines import machine

ROOT = pathlib.Path(__file__).parents[2]

WITH = {name: {"accelerators": (name,)} for name in ("cuda", "tpu")}
# What is changed on a machine in order; the level, and the beginning of what is found.
FOUND: list[tuple[dict[str, Any], str, str]] = [
    ({"requires": {"halfstep": (), "jax": ()}}, "wrong", "halfstep has no metadata"),
    ({"versions": {"jax": "0.8.3"}}, "wrong", "jax 0.8.3, and halfstep requires jax>=0.10"),
    ({"versions": {"equinox": "0.9"}}, "wrong", "equinox 0.9, and halfstep requires"),
    (
        {"versions": {"jax": "9.0.0"}},
        "note",
        f"JAX 9.0.0 is newer than {TESTED_JAX[-1]}, the newest",
    ),
    (
        {"versions": {"jax": "0.10.0"}},
        "note",
        f"JAX 0.10.0 is older than {TESTED_JAX[0]}, the oldest",
    ),
    ({"python": "3.99.1"}, "note", f"Python 3.99.1 is newer than {TESTED_PYTHON[-1]}, the newest"),
    (
        {"versions": {"libtpu": "0.0.50.1"}},
        "note",
        "a plugin for tpu is installed, and no such device is seen",
    ),
    (
        {"versions": {"libtpu": "0.0.49.3"}, **WITH["tpu"]},
        "wrong",
        "libtpu 0.0.49.3, and JAX 0.12.0.1 requires",
    ),
    (
        {"versions": {"jax-cuda12-plugin": "0.12.0"}, **WITH["cuda"]},
        "wrong",
        "jax-cuda12-plugin 0.12.0, and JAX 0.12.0.1 requires <=0.12.0.1,>=0.12.0.1",
    ),
    (
        {
            "versions": {"jax-cuda12-plugin": "0.12.0.1", "jax-cuda13-plugin": "0.12.0.1"},
            **WITH["cuda"],
        },
        "wrong",
        "jax-cuda12-plugin and jax-cuda13-plugin are both installed",
    ),
    ({"variables": {"JAX_PLATFORMS": "tpu,cpu"}}, "wrong", "no plugin for tpu is installed"),
    ({"accelerators": ("cuda",)}, "wrong", "no plugin for cuda is installed, and the machine"),
    (
        {"variables": {"JAX_PLATFORMS": "cpu"}, "accelerators": ("cuda",)},
        "note",
        "JAX_PLATFORMS=cpu, and this machine has a cuda device",
    ),
    ({"config": {"jax_enable_x64": True}}, "wrong", "jax_enable_x64 is on"),
    (
        {"config": {"jax_default_matmul_precision": "highest"}},
        "wrong",
        "jax_default_matmul_precision is highest",
    ),
    (
        {"config": {"jax_default_matmul_precision": "bfloat16"}},
        "note",
        "jax_default_matmul_precision is bfloat16",
    ),
    ({"config": {"jax_debug_nans": True}}, "wrong", "jax_debug_nans is on"),
    ({"config": {"jax_debug_infs": True}}, "wrong", "jax_debug_infs is on"),
    ({"config": {"jax_disable_jit": True}}, "wrong", "jax_disable_jit is on"),
    (
        {"config": {"jax_numpy_dtype_promotion": "strict"}},
        "note",
        "jax_numpy_dtype_promotion is strict",
    ),
    ({"config": {"jax_compilation_cache_dir": None}}, "note", "no compilation cache"),
    (
        {"variables": {"XLA_FLAGS": "--xla_allow_excess_precision=false"}},
        "note",
        "XLA_FLAGS has --xla_allow_excess_precision=false",
    ),
    (
        {"variables": {"XLA_FLAGS": "--xla_backend_optimization_level=0"}},
        "note",
        "XLA_FLAGS has --xla_backend_optimization_level=0",
    ),
    (
        {"variables": {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}},
        "note",
        "XLA_FLAGS has --xla_gpu_autotune_level=0",
    ),
    (
        {"variables": {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}},
        "note",
        "XLA_FLAGS has --xla_force_host_platform_device_count=4",
    ),
    ({"variables": {"XLA_FLAGS": "--xla_dump_to=out"}}, "note", "XLA_FLAGS has --xla_dump_to"),
    ({"native16": ()}, "note", "the processor has no 16-bit arithmetic"),
    (
        {"variables": {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}},
        "note",
        "XLA_PYTHON_CLIENT_MEM_FRACTION=.9",
    ),
]


def test_a_machine_in_order():
    assert pitfalls(machine()) == ()
    # Nothing is known about 16 bits: nothing is said.
    assert pitfalls(machine(native16=None)) == ()


@pytest.mark.parametrize(("changes", "level", "found"), FOUND, ids=lambda value: str(value)[:40])
def test_each_pitfall_is_found_alone(changes: dict[str, Any], level: str, found: str):
    (one,) = pitfalls(machine(**changes))
    assert one.level == level
    assert one.found.startswith(found)
    assert one.cause.endswith(".")
    assert one.cure
    assert not one.cure.endswith(".")


PAIRS = list(zip(TESTED_JAX, TESTED_PYTHON, strict=True))


@pytest.mark.parametrize(("version", "python"), PAIRS)
def test_nothing_is_said_about_tested_versions(version: str, python: str):
    assert pitfalls(machine(versions={"jax": version}, python=f"{python}.7")) == ()


def test_tested_versions_are_listed(on: Any, capsys: pytest.CaptureFixture[str]):
    on(versions={"jax": "9.0.0"})
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("tested with ")]
    for version, python in PAIRS:
        assert f"{version} (Python {python})" in line
    # And the note names the range, as errors do.
    assert f"tested with {known_to_work()}." in out
    assert main(["doctor", "--json", "-"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [one["jax"] for one in made["tested"]] == list(TESTED_JAX)


def test_what_is_wrong_comes_first():
    found = pitfalls(machine(config={"jax_compilation_cache_dir": None, "jax_disable_jit": True}))
    assert [one.level for one in found] == ["wrong", "note"]


# What the causes claim.


def _lowered(dtype: Any) -> str:
    """The dtypes of a product of default arrays, under a policy of 16 bits."""
    shape = jax.ShapeDtypeStruct((8, 8), dtype)
    report = halfstep.explain(lambda w, x: jnp.sum(x @ w), "bf16")(shape, shape)
    return str(report).splitlines()[1].rpartition(": ")[2]


def test_float64_is_not_lowered():
    with jax.enable_x64(True):
        assert _lowered(jnp.ones(1).dtype) == "f64 100 %"
    assert _lowered(jnp.ones(1).dtype) == "bf16 100 %"


@pytest.mark.parametrize("precision", ["high", "highest", "float32", "tensorfloat32"])
def test_a_default_precision_is_not_lowered(precision: str):
    with jax.default_matmul_precision(precision):
        assert _lowered(jnp.float32) == "f32 100 %"


def test_another_default_precision_is_lowered():
    with jax.default_matmul_precision("bfloat16"):
        assert _lowered(jnp.float32) == "bf16 100 %"


# The report.


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the command run on another machine."""

    def change(**changes: Any) -> None:
        monkeypatch.setattr(doctor, "gather", lambda: machine(**changes))

    return change


def test_exit_status(on: Any, capsys: pytest.CaptureFixture[str]):
    on()
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "pitfalls: 0 wrong, 0 to know" in out
    assert re.search(r"^live +lacks rich .* pip install \"halfstep\[live\]\"$", out, re.MULTILINE)
    assert re.search(r"^tpu-preflight +lacks libtpu ", out, re.MULTILINE)
    on(native16=())
    assert main(["doctor"]) == 0
    on(config={"jax_debug_nans": True}, versions={"rich": "14.0", "matplotlib": "3.8"})
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "Cure: unset JAX_DEBUG_NANS" in out
    assert re.search(r"^live +yes ", out, re.MULTILINE)
    # An older one than the extra asks for is as good as none.
    assert re.search(r"^plot +lacks matplotlib", out, re.MULTILINE)


def test_json(on: Any, capsys: pytest.CaptureFixture[str]):
    on(config={"jax_debug_nans": True})
    assert main(["doctor", "--json", "-"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert made["healthy"] is False
    assert made["devices"] is None
    assert made["packages"]["jax"] == "0.12.0.1"
    assert made["extras"]["live"]["missing"] == ["rich"]
    assert [one["found"] for one in made["pitfalls"]] == ["jax_debug_nans is on"]


def test_this_machine(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--devices", "--json", "-"]) in (0, 1)
    made = json.loads(capsys.readouterr().out)
    assert made["devices"] == [str(device) for device in jax.devices()]
    assert made["packages"]["jax"] == jax.__version__
    # The tests are strict, and count on four devices.
    found = [one["found"] for one in made["pitfalls"]]
    assert "jax_numpy_dtype_promotion is strict" in found
    assert "XLA_FLAGS has --xla_force_host_platform_device_count=4" in found


def test_devices_are_found_without_being_touched(tmp_path: pathlib.Path):
    assert facts._accelerators(tmp_path / "nothing") == ()
    for name in ("nvidia0", "nvidiactl", "accel0"):
        (tmp_path / name).touch()
    assert facts._accelerators(tmp_path) == ("cuda", "tpu")


def test_what_the_processor_can(tmp_path: pathlib.Path):
    path = tmp_path / "cpuinfo"
    assert facts._native16(path) is None
    path.write_text("processor\t: 0\n")
    assert facts._native16(path) is None
    path.write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\n")
    assert facts._native16(path) == ("amx_bf16",)
    path.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert facts._native16(path) == ()


# The project's own metadata.


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_extra_is_explained():
    assert set(doctor.ENABLES) == set(_project()["optional-dependencies"])


def test_every_requirement_of_the_project_is_understood():
    project = _project()
    lines = [*project["dependencies"]]
    for extra, texts in project["optional-dependencies"].items():
        lines += [f"{text}; extra == '{extra}'" for text in texts]
    made = [Requirement.parse(line) for line in lines]
    assert None not in made
    assert [str(one) for one in made] == [line.partition(";")[0] for line in lines]


def test_tested_versions_are_the_supported_ones():
    project = _project()
    assert project["requires-python"] == f">={TESTED_PYTHON[0]}"
    said = [line.rpartition(" :: ")[2] for line in project["classifiers"] if ":: 3." in line]
    assert said == list(TESTED_PYTHON)
    (required,) = (one for one in project["dependencies"] if one.startswith("jax>"))
    jax = Requirement.parse(required)
    assert jax is not None
    assert all(jax.allows(version) for version in TESTED_JAX)
    # No minor release in front of the oldest tested one is allowed.
    assert required == f"jax>={TESTED_JAX[0].rpartition('.')[0]}"


@pytest.mark.parametrize(
    ("required", "version", "allowed"),
    [
        ("a>=1.2", "1.2.0", True),
        ("a>=1.2", "1.10", True),
        ("a>=1.2", "1.1.9", False),
        ("a<=0.10.2,>=0.10.1", "0.10.1", True),
        ("a<=0.10.2,>=0.10.1", "0.10.3", False),
        ("a==0.0.42.*", "0.0.42.1", True),
        ("a==0.0.42.*", "0.0.4", False),
        ("a!=1.5.*", "1.5.2", False),
        ("a>1", "1.0", False),
        ("a<2", "1.9", True),
        ("a", "0", True),
        ("a>=1.0", "1.0.dev3", True),
    ],
)
def test_versions(required: str, version: str, allowed: bool):
    made = Requirement.parse(required)
    assert made is not None
    assert made.allows(version) is allowed


def test_what_is_for_other_machines_is_left_out():
    assert Requirement.parse("a; sys_platform == 'win32' and extra == 'b'") is None
    assert Requirement.parse("a; extra == 'b'") == Requirement("a", (), "", "b")


def test_extras_of_others_are_followed():
    names = [one.name for one in expanded(machine().requires, "halfstep", "tpu-preflight")]
    assert names == ["jax", "libtpu"]
