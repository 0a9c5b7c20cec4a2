"""Run a real compiler in a process of its own, and keep its answers."""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from halfstep._base import (
    DamagedFolderError,
    check_files,
    read_json,
    regular_file,
    seal,
    sealed_files,
)
from halfstep._preflight.compile.lowering import Program
from halfstep._preflight.compile.requirements import compiler_versions
from halfstep._preflight.preflight_errors import PreflightError, RefusedError
from halfstep._preflight.target.targets import Target

_WORKER = pathlib.Path(__file__).with_name("worker.py")
# Lines that the compilers print on every machine without an accelerator.
_NOISE = re.compile(r"cudart_stub|absl::InitializeLog|could not determine TPU|InitGoogle")
# Autotuning times candidates on the card, which is not there. Without autotuning, Triton finds no
# tile sizes for some large products ("Couldn't find output tile sizes"), which is why cuBLAS is the
# alternative.
_NO_AUTOTUNING = "--xla_gpu_autotune_level=0"
_LIBRARY = "--xla_gpu_enable_triton_gemm=false"

_KEPT = 1024
"""The most answers in the cache; the least recently used go first. One takes about 200 KB."""

_ANSWER_VERSION = 3
"""Increased when an answer holds more, so that answers of an older halfstep are not used."""

_FILES = ("answer.json", "program.hlo.gz", "program.pb.gz")
"""The files that a worker leaves and the cache keeps."""

_LARGEST = 2**30
"""The most bytes of a file of an answer; a program of 10,000 instructions has some million."""

Answer = tuple[dict[str, Any], str, bytes]
"""A compiler's figures, and its program as text and as a message `xla.HloProto`."""


@dataclasses.dataclass(frozen=True)
class CompilerAnswer:
    """A compiler's answer about a program."""

    memory: Mapping[str, int]
    estimates: Mapping[str, float]
    hlo: str
    flags: tuple[str, ...]
    gemm: str | None
    versions: Mapping[str, str]
    program: bytes = dataclasses.field(default=b"", repr=False)
    """The optimized program and the compiler's buffer assignment, a message `xla.HloProto`; empty
    if the compiler gave up before it had a program."""
    exceeded: str | None = None
    """The compiler's own words, if it gave up because the device's memory is too small."""


def compile_program(
    program: Program,
    target: Target,
    *,
    gemm: str = "triton",
    flags: Sequence[str] = (),
    timeout: float | None = None,
    cache: bool = True,
) -> CompilerAnswer:
    """Compile a program for a target, or take the answer of an earlier compile."""
    versions = compiler_versions(program.platform)
    given = tuple(flag for flag in flags if flag.startswith(f"--xla_{_prefix(program.platform)}_"))
    made = None
    if program.platform == "cuda":
        made = gemm
        given = (_NO_AUTOTUNING, *((_LIBRARY,) if gemm == "library" else ()), *given)
    answer, hlo, optimized = _ask(program, target, given, versions, timeout, cache)
    failure = answer.get("error")
    if failure is None:
        return CompilerAnswer(
            answer["memory"], answer["estimates"], hlo, given, made, versions, optimized
        )
    # XLA:TPU does not finish a program that is too large. That is an answer, and not an error.
    if exceeds_memory(failure):
        return CompilerAnswer(
            {}, {}, "", given, made, versions, optimized, _first_lines(failure, 2).rstrip(".")
        )
    with_flags = f" with {' '.join(given)}" if given else ""
    raise RefusedError(
        f"the compiler for {target.name} refused the step{with_flags}. Change what "
        "it names, or leave flags out. It says:\n"
        f"{_first_lines(failure, 12)}"
    )


def exceeds_memory(message: str) -> bool:
    """Return whether a compiler gave up because the device has too little memory."""
    # Only `hbm` counts: the same status is given for the memory on the chip (vmem, smem), and a
    # larger device does not have more of that memory.
    return "RESOURCE_EXHAUSTED" in message and re.search(r"\bhbm\b", message, re.I) is not None


def required_bytes(message: str) -> int | None:
    """Return the memory that a program would have needed, if the compiler says so."""
    found = re.search(r"Used ([\d.]+)([KMGT]) of", message)
    if found is None:
        return None
    return int(float(found[1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[found[2]])


def check_flags(flags: Sequence[str]) -> None:
    """Refuse flags that no compiler would be given."""
    for flag in flags:
        if not flag.startswith(("--xla_gpu_", "--xla_tpu_")):
            raise PreflightError(
                "flags are XLA's, for one of its compilers: --xla_gpu_... or --xla_tpu_...; "
                f"got {flag!r}."
            )


def _prefix(platform: str) -> str:
    return "gpu" if platform == "cuda" else "tpu"


def _ask(
    program: Program,
    target: Target,
    flags: tuple[str, ...],
    versions: Mapping[str, str],
    timeout: float | None,
    cache: bool,
) -> Answer:
    request = {
        "platform": program.platform,
        "axes": program.axes,
        "axis_types": program.axis_types,
        "donated": program.donated,
    }
    if program.platform == "cuda":
        request |= {
            "target_config": target.gpu_target_config,
            "topology": target.gpu_topology,
        }
    else:
        request |= {"topology": target.tpu_topology, "chips_per_host": target.tpu_chips_per_host}
    name = cache_key(
        {
            "program": program.fingerprint,
            "request": request,
            "flags": flags,
            "versions": dict(versions),
            "answer": _ANSWER_VERSION,
        }
    )
    if cache and (kept := load_answer(name)) is not None:
        return kept
    with tempfile.TemporaryDirectory(prefix="halfstep-preflight-") as place:
        folder = pathlib.Path(place)
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "program.bin").write_bytes(program.serialized)
        code = _run(folder, _environment(program.platform, flags, folder), timeout, target)
        if not (folder / "answer.json").exists():
            raise PreflightError(_died(code, folder, target))
        answer = json.loads((folder / "answer.json").read_text())
        # A failure is not kept: the next attempt may be on a machine that has what this one lacked.
        if "error" in answer:
            dumped = folder / _FILES[2]
            return answer, "", _decompressed(folder, dumped.name) if dumped.exists() else b""
        made = _read(folder)
        if not made[2]:
            raise PreflightError(
                "preflight counts what a step does in its optimized program, a message "
                f"`xla.HloModuleProto`. For {target.name} there came none: the executable of JAX "
                f"{versions['jax']} has no `hlo_modules()`, and the compiler dumped no program. "
                "Try flags that leave XLA's dump alone, or another version of JAX."
            )
        if cache:
            save_answer(name, folder)
        return made


def _environment(platform: str, flags: tuple[str, ...], folder: pathlib.Path) -> dict[str, str]:
    """Return an environment in which the compiler works and looks for no device."""
    ours = {
        name: value
        for name, value in os.environ.items()
        # Settings for computing here must not change programs that are compiled for elsewhere.
        if not name.startswith(("JAX_", "XLA_", "LIBTPU_", "TPU_"))
    }
    # The plugins must not start: without a device, cuInit fails and libtpu looks for its hosts.
    # 64-bit types are on because otherwise 64-bit arguments of a program would be taken for 32-bit
    # ones; programs without 64-bit types do not change.
    ours |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    # Dumps do not change the compiled program, and are the only way to the buffer assignment.
    dump = (f"--xla_dump_to={folder / 'dump'}", "--xla_dump_hlo_as_proto")
    # XLA splits its flags at spaces, and has no way to escape a space.
    dump = dump if not re.search(r"\s", str(folder)) else ()
    if platform == "cuda":
        return ours | {"XLA_FLAGS": " ".join((*dump, *flags)), "CUDA_VISIBLE_DEVICES": ""}
    return ours | {
        "XLA_FLAGS": " ".join(dump),
        "LIBTPU_INIT_ARGS": " ".join(flags),
        # libtpu would ask the cloud's metadata server which TPU this machine has.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_LOG_DIR": "disabled",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # Any number of processes may compile at a time, also while another one uses a TPU.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def _run(
    folder: pathlib.Path, environment: dict[str, str], timeout: float | None, target: Target
) -> int:
    with (folder / "log").open("wb") as log:
        # `-P` keeps the worker's own folder off the path, where modules of this package could be
        # taken for others of the same name.
        command = [sys.executable, "-P", str(_WORKER), str(folder)]
        # Standard input stays open and empty: the worker ends when it closes. The worker has a
        # session of its own, so that processes that the compiler starts (ptxas) end with it.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        with _ended(process):
            try:
                return process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise PreflightError(
                    f"compiling for {target.name} took longer than timeout={timeout:g} seconds. "
                    "Raise it, or leave it out to wait as long as it takes."
                ) from None


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Generator[None, None, None]:
    """End the process, and all that it started, however the block is left."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _died(code: int, folder: pathlib.Path, target: Target) -> str:
    log = (folder / "log").read_text(errors="replace").strip().splitlines()
    said = [line for line in log if not _NOISE.search(line)]
    last = "\n".join(said[-8:]) or "(it printed nothing)"
    if code == -signal.SIGKILL:
        return (
            f"the process that compiled for {target.name} was killed (SIGKILL). The usual cause is "
            "that this machine, not the target, ran out of memory: put repeated layers into a "
            f"jax.lax.scan, or use a machine with more. Its last words:\n{last}"
        )
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return (
        f"the process that compiled for {target.name} ended with {how} and no answer. "
        f"Try cache=False, and other flags or none. Its last words:\n{last}"
    )


def _first_lines(text: str, count: int) -> str:
    lines = text.strip().splitlines()
    more = f"\n... ({len(lines) - count} lines more)" if len(lines) > count else ""
    return "\n".join(line[:600] for line in lines[:count]) + more


# Answers are kept by the content of the question. An answer is a folder of JSON, text and
# a message. Nothing in it is executed, so a cache that somebody else has written can be wrong but
# not dangerous.


def cache_dir() -> pathlib.Path:
    """Return where answers are kept: `$HALFSTEP_CACHE_DIR`, else in the user's cache folder."""
    own = os.environ.get("HALFSTEP_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(own if own else os.path.join(base, "halfstep")) / "preflight"


def cache_key(question: Mapping[str, Any]) -> str:
    """Return a name for a question: the program, the target, flags and versions."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


def load_answer(name: str) -> Answer | None:
    """Load an answer, or return `None`; an entry that cannot be read counts as absent."""
    entry = cache_dir() / name
    try:
        # An entry is complete when it is written. If it was changed afterwards, in any way, the
        # program is recompiled.
        check_files(entry, sealed_files(entry), most=_LARGEST)
        answer = _read(entry)
        # The time of last use decides which entries are removed.
        os.utime(entry)
    except (OSError, ValueError, EOFError, RecursionError, zlib.error):
        return None
    return answer


def _read(folder: pathlib.Path) -> Answer:
    answer = read_json(folder, _FILES[0])
    if not isinstance(answer, dict) or not all(
        isinstance(answer.get(part), dict)
        and all(isinstance(number, int | float) for number in answer[part].values())
        for part in ("memory", "estimates")
    ):
        raise DamagedFolderError(f"`{_FILES[0]}` has no figures of memory")
    text, optimized = (_decompressed(folder, name) for name in _FILES[1:])
    return answer, text.decode(), optimized


def _decompressed(folder: pathlib.Path, name: str) -> bytes:
    """Decompress a file; refuse a file that would fill the memory."""
    with gzip.open(regular_file(folder, name, most=_LARGEST)) as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise DamagedFolderError(f"`{name}` holds more than {_LARGEST:,} bytes")
    return content


def save_answer(name: str, folder: pathlib.Path) -> None:
    """Keep the answer in a worker's folder. A cache that cannot be written is not an error."""
    cache = cache_dir()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # The entry is written under another name first, so that other processes see a whole entry
        # or none. If one of them renames first, the rename here fails with an OSError, and the same
        # answer is there anyway.
        staging = pathlib.Path(tempfile.mkdtemp(prefix=".new-", dir=cache))
        try:
            for file in _FILES:
                shutil.copy(folder / file, staging / file)
            seal(staging, where=staging)
            shutil.rmtree(cache / name, ignore_errors=True)
            staging.rename(cache / name)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        entries = sorted(cache.glob("[0-9a-f]*"), key=lambda entry: entry.stat().st_mtime)
        for entry in entries[: max(0, len(entries) - _KEPT)]:
            shutil.rmtree(entry, ignore_errors=True)
    except OSError:
        return
