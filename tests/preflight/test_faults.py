"""Compilers that are missing, refuse, hang, are killed: an answer each time, and nothing left."""

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import halfstep
from halfstep._preflight.compile import compiler as _compile, requirements as _requirements
from tests.preflight._compilers import ROOT, own_cache as own_cache
from tests.preflight._programs import dump, program

VECTOR = jax.ShapeDtypeStruct((8,), jnp.float32)
PROGRAM = dump(program("ROOT %x = f32[8]{0} parameter(0)"))


@pytest.fixture(autouse=True)
def temporary(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, own_cache: pathlib.Path
) -> pathlib.Path:
    """Where workers get their folders; whatever happens, none may be left."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the compilers were there: the workers of these tests do not get to them."""
    monkeypatch.setattr(_compile, "compiler_versions", lambda platform: {"jax": "test"})
    monkeypatch.setattr(
        "halfstep._preflight.steps.compiler_versions", lambda platform: {"jax": "test"}
    )


@pytest.fixture
def worker(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], pathlib.Path]:
    """Put a script in the worker's place; it writes its process number beside itself."""

    def replace(body: str) -> pathlib.Path:
        path = tmp_path / "worker.py"
        path.write_text(
            "import json, os, pathlib, signal, sys, time\n"
            f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
            "folder = pathlib.Path(sys.argv[1])\n" + body
        )
        monkeypatch.setattr(_compile, "_WORKER", path)
        return tmp_path / "pid"

    return replace


def preflight(**options: Any) -> halfstep.PreflightReport:
    return halfstep.preflight(lambda x: x * 2, (VECTOR,), targets="h100", **options)


def gone(pid: int, *, within: float = 10) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        # A process that nobody has waited for is dead and still has its number.
        if pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_killed(worker: Any, temporary: pathlib.Path):
    pid = worker("print('so far so good', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(
        halfstep.PreflightError,
        match=r"(?s)for h100 was killed \(SIGKILL\).*ran out of memory.*so far so good",
    ):
        preflight()
    assert gone(int(pid.read_text()))
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGABRT)\n", "ended with signal SIGABRT and no answer"),
        ("sys.exit(3)\n", r"(?s)ended with exit code 3 and no answer.*\(it printed nothing\)"),
        ("raise ImportError('no such thing')\n", "(?s)exit code 1.*ImportError: no such thing"),
    ],
)
def test_ended_without_an_answer(worker: Any, temporary: pathlib.Path, body: str, message: str):
    worker(body)
    with pytest.raises(halfstep.PreflightError, match=message):
        preflight()
    assert not list(temporary.iterdir())


def test_hangs(worker: Any, temporary: pathlib.Path):
    # And starts a process of its own, which must not outlive it.
    pid = worker(
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "(pathlib.Path(__file__).parent / 'child').write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(halfstep.PreflightError, match="took longer than timeout=3 seconds"):
        preflight(timeout=3.0)
    assert gone(int(pid.read_text()))
    assert gone(int((pid.parent / "child").read_text()))
    assert not list(temporary.iterdir())


def test_interrupted(worker: Any, temporary: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    pid = worker("time.sleep(600)\n")
    wait = subprocess.Popen.wait

    def interrupt(process: Any, timeout: float | None = None) -> int:
        if process.poll() is None and not pid.exists():
            while not pid.exists() or not pid.read_text():
                time.sleep(0.01)
            raise KeyboardInterrupt
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        preflight()
    assert gone(int(pid.read_text()))
    assert not list(temporary.iterdir())


def test_a_worker_ends_with_the_process_that_started_it(tmp_path: pathlib.Path):
    """The real worker's watch, with its parent killed in the way that leaves no chance to tidy."""
    code = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", '''
import runpy, time
import pathlib
folder = pathlib.Path({str(tmp_path / "folder")!r})
folder.mkdir()
runpy.run_path({str(_compile._WORKER)!r})["die_with_parent"](folder)
print("watching", flush=True)
time.sleep(600)
'''],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not gone(pid, within=0.5)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pid)
    assert not (tmp_path / "folder").exists()


def test_refused_by_both_kinds_of_matrix_products(worker: Any):
    worker(
        "flags = os.environ['XLA_FLAGS']\n"
        "answer = {'error': 'INTERNAL: ' + ('library' if 'triton' in flags else 'tiles') + ' no'}\n"
        "(folder / 'answer.json').write_text(json.dumps(answer))\n"
    )
    with pytest.raises(
        halfstep.PreflightError,
        match=r"h100 refused the step with --xla_gpu_autotune_level=0\. Change what .* It says:\n"
        "INTERNAL: tiles no",
    ):
        preflight()
    with pytest.raises(halfstep.PreflightError, match="INTERNAL: library no"):
        preflight(gemm="library")


def test_the_library_makes_what_triton_refuses(worker: Any):
    """For all variants of a target, so that likes are compared."""
    worker(
        "import gzip\n"
        "program = (folder / 'program.bin').read_bytes()\n"
        "refused = 'triton' not in os.environ['XLA_FLAGS'] and b'cosine' in program\n"
        "names = ('argument', 'output', 'alias', 'temp')\n"
        "memory = {f'{name}_size_in_bytes': 1 for name in names}\n"
        "with gzip.open(folder / 'program.hlo.gz', 'wt') as file:\n"
        "    file.write('HloModule m')\n"
        "with gzip.open(folder / 'program.pb.gz', 'wb') as file:\n"
        f"    file.write({PROGRAM!r})\n"
        "answer = {'error': 'no tiles'} if refused else {'memory': memory, 'estimates': {}}\n"
        "(folder / 'answer.json').write_text(json.dumps(answer))\n"
    )
    plain, hard = (lambda x: x * 2), jnp.cos

    def makers(**variants: Any) -> list[str | None]:
        report = halfstep.preflight(None, (VECTOR,), targets="h100", variants=variants)
        return [entry.gemm for entry in report.entries]

    assert makers(plain=plain) == ["triton"]
    assert makers(plain=plain, hard=hard) == ["library", "library"]


def test_an_answer_that_an_older_halfstep_kept_is_not_taken(
    worker: Any, monkeypatch: pytest.MonkeyPatch
):
    pid = worker(
        "import gzip\n"
        "names = ('argument', 'output', 'alias', 'temp')\n"
        "memory = {f'{name}_size_in_bytes': 1 for name in names}\n"
        "with gzip.open(folder / 'program.hlo.gz', 'wt') as file:\n"
        "    file.write('HloModule m')\n"
        "with gzip.open(folder / 'program.pb.gz', 'wb') as file:\n"
        f"    file.write({PROGRAM!r})\n"
        "answer = {'memory': memory, 'estimates': {}}\n"
        "(folder / 'answer.json').write_text(json.dumps(answer))\n"
    )
    assert preflight()["h100"].peak is None, "the compiler has written no buffer assignment"
    pid.unlink()
    preflight()
    assert not pid.exists(), "taken from the cache"
    monkeypatch.setattr(_compile, "_ANSWER_VERSION", 0)
    preflight()
    assert pid.exists()


def test_neither_the_executable_nor_the_dump_has_the_program(worker: Any, own_cache: pathlib.Path):
    worker(
        "import gzip\n"
        "for name in ('program.hlo.gz', 'program.pb.gz'):\n"
        "    with gzip.open(folder / name, 'wb') as file:\n"
        "        file.write(b'')\n"
        "answer = {'memory': {'temp_size_in_bytes': 1}, 'estimates': {}}\n"
        "(folder / 'answer.json').write_text(json.dumps(answer))\n"
    )
    with pytest.raises(
        halfstep.PreflightError,
        match=r"a message `xla.HloModuleProto`\. For h100 there came none: the executable of JAX "
        r"test has no `hlo_modules\(\)`, .* Try flags that leave XLA's dump alone",
    ):
        preflight()
    assert not own_cache.exists(), "such an answer is not kept"


def test_what_the_worker_is_given(worker: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    worker(
        "names = ('JAX_', 'XLA_', 'LIBTPU_', 'TPU_', 'CUDA_VIS', 'ALLOW_')\n"
        "told = {k: v for k, v in os.environ.items() if k.startswith(names)}\n"
        "(folder / 'answer.json').write_text(json.dumps({'error': json.dumps(told)}))\n"
    )
    with pytest.raises(halfstep.PreflightError) as error:
        preflight(gemm="triton", flags=["--xla_gpu_x=1", "--xla_tpu_y=2"])
    assert '--xla_dump_hlo_as_proto --xla_gpu_autotune_level=0 --xla_gpu_x=1"' in str(error.value)
    assert "device_count" not in str(error.value)
    assert "elsewhere" not in str(error.value)
    with pytest.raises(halfstep.PreflightError) as error:
        halfstep.preflight(
            lambda x: x, (VECTOR,), targets="v5e", flags=["--xla_gpu_x=1", "--xla_tpu_y=2"]
        )
    assert '"LIBTPU_INIT_ARGS": "--xla_tpu_y=2"' in str(error.value)
    assert '"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"' in str(error.value)


@pytest.mark.parametrize(
    ("message", "bytes_"),
    [
        ("RESOURCE_EXHAUSTED: ... Used 23.50G of 15.75G hbm. Exceeded", int(23.5 * 2**30)),
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, temporaries (37.12G) exceeds", None),
    ],
)
def test_memory_that_a_tpu_does_not_have(worker: Any, message: str, bytes_: int | None):
    worker(f"(folder / 'answer.json').write_text(json.dumps({{'error': {message!r}}}))\n")
    report = halfstep.preflight(lambda x: x, (VECTOR,), targets="v5e")
    assert report["v5e"].fits is False
    assert report["v5e"].peak_bytes == bytes_
    assert message in report["v5e"].notes[0]


@pytest.mark.parametrize(
    ("platform", "missing", "message"),
    [
        ("cuda", "flatbuffers", r'flatbuffers.*pip install "halfstep\[cuda-preflight\]"'),
        ("tpu", "flatbuffers", r'flatbuffers.*pip install "halfstep\[tpu-preflight\]"'),
        ("tpu", "libtpu", r'package libtpu.*pip install "halfstep\[tpu-preflight\]"'),
        ("cuda", "jax-cuda", r'jax-cuda12-plugin.*pip install "halfstep\[cuda-preflight\]"'),
        ("cuda", "nvidia", r'ptxas.*pip install "halfstep\[cuda-preflight\]"'),
    ],
)
def test_a_missing_extra(
    monkeypatch: pytest.MonkeyPatch, platform: str, missing: str, message: str
):
    versions = {
        "jax": "0.10.2",
        "jaxlib": "0.10.2",
        "jax-cuda12-plugin": "0.10.2",
        "jax-cuda12-pjrt": "0.10.2",
        "nvidia-cuda-nvcc-cu12": "12.9",
        "libtpu": "0.0.42",
    }

    def version(name: str) -> str:
        if name not in versions or name.startswith(missing):
            raise _requirements.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(_requirements.importlib.metadata, "version", version)
    monkeypatch.setattr(_requirements.shutil, "which", lambda name: None)
    monkeypatch.setattr(
        _requirements.importlib.util, "find_spec", lambda name: None if name == missing else name
    )
    with pytest.raises(halfstep.PreflightError, match=message):
        _requirements.compiler_versions(platform)
    monkeypatch.setattr(_requirements.importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(_requirements.importlib.util, "find_spec", lambda name: name)
    assert _requirements.compiler_versions(platform)["jaxlib"] == "0.10.2"
    versions |= {"jax-cuda12-plugin": "0.9.0"}
    if platform == "cuda":
        with pytest.raises(
            halfstep.PreflightError, match=r"must be of jaxlib's version, 0\.10\.2; 0\.9"
        ):
            _requirements.compiler_versions(platform)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flags": ["--xla_cpu_x=1"]}, "got '--xla_cpu_x=1'"),
        ({"memory_fraction": 1.5}, "above 0 and at most 1; got 1.5"),
        ({"targets": []}, r'no target given; got targets=\[\]\. Write targets="h100"'),
        (
            {"step": None},
            "pass a step, or `variants`, a mapping of names to steps, each name once; got neither",
        ),
        ({"variants": {"<lambda>": lambda x: x}}, "got the names"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], message: str):
    settings: dict[str, Any] = {"step": lambda x: x, "args": (VECTOR,), "targets": "h100"}
    with pytest.raises(halfstep.PreflightError, match=message):
        halfstep.preflight(**(settings | options))


def test_a_new_user_without_the_extras_is_told_what_to_install():
    code = """
import halfstep, importlib.metadata as metadata
real = metadata.version
def version(name):
    if "cuda" in name: raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
halfstep.preflight(lambda x: x, (1.0,), targets="h100")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert 'pip install "halfstep[cuda-preflight]"' in done.stderr.splitlines()[-1]
