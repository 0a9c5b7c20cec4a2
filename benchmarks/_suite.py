"""All benchmarks, in groups, and how each is run."""

import ast
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from benchmarks import PEERS, _environments
from benchmarks._environments import ROOT, MissingEnvironmentError


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One module with `--json`."""

    name: str
    quick: tuple[str, ...] = ("--quick",)
    """What makes it small; empty if nothing does."""
    plots: bool = False
    peers: tuple[str, ...] = ()
    """Other libraries that it imports if they are there, by their environments."""
    always: tuple[str, ...] = ()
    """Options that it is given."""

    def about(self) -> str:
        """The first line of its docstring."""
        source = (ROOT / "benchmarks" / f"{self.name}.py").read_text()
        return (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]

    def command(self, out: str, images: str, *, quick: bool) -> list[str]:
        """What is run, from the root of the repository."""
        made = ["-m", f"benchmarks.{self.name}", *self.always, *(self.quick if quick else ())]
        made += ["--json", f"{out}/{self.name}.json"]
        if self.plots:
            made += ["--plot", f"{images}/{self.name}.png"]
        return made


GROUPS: Mapping[str, tuple[Benchmark, ...]] = MappingProxyType(
    {
        "comparison": (Benchmark("peers", ()),),
        "overhead": (
            Benchmark(
                "overhead",
                ("--rounds", "5", "--batch", "2"),
                peers=("mpx", "jmp"),
                always=("--peers",),
            ),
            Benchmark("autocast"),
            Benchmark("startup"),
        ),
        "memory": (
            Benchmark("memory", plots=True, peers=("mpx",)),
            Benchmark("release"),
            Benchmark("plan", plots=True),
            Benchmark("plan_optimum"),
            Benchmark("plan_batches"),
            Benchmark("plan_training", plots=True),
            Benchmark("remat"),
            Benchmark("preflight_roles", plots=True),
        ),
        "optimizers": (
            Benchmark("optimizers", peers=("flashoptim_jax",)),
            Benchmark("kernels"),
            Benchmark("optim_cpu", ("--rounds", "5", "--size", "256")),
            Benchmark("optim_training", plots=True),
        ),
        "fp8": (
            Benchmark("fp8", peers=("qwix",)),
            Benchmark("fp8_memory"),
            Benchmark("blocks"),
            Benchmark("recipes"),
            Benchmark("fp8_training", plots=True),
            Benchmark("fp8_outliers", plots=True),
        ),
        "ecosystem": (Benchmark("ecosystem", ("--no-fault", "jax_dot_product_attention")),),
        "debug": (Benchmark("debug"), Benchmark("bisect", ("--steps", "5"))),
        "scale": (Benchmark("scale", plots=True),),
        "costs": (Benchmark("costs"),),
        "guard": (Benchmark("guard", ("--only", "small GPT")),),
        "stored": (Benchmark("stored", ("--only", "Mamba-like")),),
        "training": (
            Benchmark("training", plots=True),
            Benchmark("loss_scaling", plots=True),
            Benchmark("fashion_mnist", ("--seeds", "0", "--steps", "20"), plots=True),
        ),
        "faults": (
            Benchmark("faults"),
            Benchmark("rest"),
            Benchmark("fuzz", ("--runs", "1000")),
            Benchmark("mutations"),
            Benchmark("wrong_arguments"),
            Benchmark("saving", ("--gigabytes", "0.1", "--rounds", "1")),
            Benchmark("fuzz_programs", ("--count", "10")),
            Benchmark("loop_state"),
            Benchmark("soak", ("--minutes", "0.5")),
            Benchmark("planted", ("--only", "verdict")),
            Benchmark("coverage", ()),
            Benchmark("flags", ("--no-tests", "--only", "jax_remat3")),
        ),
    }
)


def every() -> Iterator[Benchmark]:
    """All of them, in order."""
    for group in GROUPS.values():
        yield from group


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """Those that are named, by their own names or by that of their group; all if none is.

    Raises:
        ValueError: There is no such benchmark or group.
    """
    known = {one.name for one in every()}
    unknown = [name for name in names if name not in GROUPS and name not in known]
    if unknown:
        raise ValueError(
            f"no benchmark or group is named {', '.join(unknown)}. There are the groups "
            f"{', '.join(GROUPS)}; `python -m benchmarks --list` lists what is in them."
        )
    return [
        one
        for group, members in GROUPS.items()
        for one in members
        # A group may have the name of one of its members: then it is the whole group.
        if not names or group in names or (one.name in names and one.name not in GROUPS)
    ]


def listing() -> str:
    """Groups and members with a line each."""
    width = max(len(one.name) for one in every())
    lines = []
    for group, members in GROUPS.items():
        lines.append(group)
        lines += [f"  {one.name.ljust(width)}  {one.about()}" for one in members]
    return "\n".join(lines)


def run(benchmarks: Sequence[Benchmark], out: str, images: str, *, quick: bool) -> list[str]:
    """Run them one after the other, and return the names of those that failed."""
    failed = []
    for number, one in enumerate(benchmarks, start=1):
        print(f"[{number}/{len(benchmarks)}] {one.name}: {one.about()}", flush=True)
        begun = time.monotonic()
        command = [sys.executable, *one.command(out, images, quick=quick)]
        environment = {**os.environ, PEERS: os.pathsep.join(_folders(one.peers))}
        code = subprocess.run(command, cwd=ROOT, check=False, env=environment).returncode
        said = "done" if code == 0 else f"FAILED with exit status {code}"
        print(f"[{number}/{len(benchmarks)}] {one.name}: {said}, {time.monotonic() - begun:.0f} s")
        if code:
            failed.append(one.name)
    return failed


def _folders(peers: Sequence[str]) -> Iterator[str]:
    """Where the packages of other libraries lie; one that cannot be installed is left out."""
    for name in peers:
        try:
            yield str(_environments.packages_of(name))
        except MissingEnvironmentError as error:
            print(f"{name} is left out: {error}", flush=True)
