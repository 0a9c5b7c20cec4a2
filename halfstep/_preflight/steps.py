"""Prepare steps and compile them, with one set of options."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from halfstep._base import Progress, listed
from halfstep._preflight.compile.compiler import check_flags, compile_program
from halfstep._preflight.compile.lowering import Program, lower
from halfstep._preflight.compile.requirements import compiler_versions
from halfstep._preflight.preflight_errors import PreflightError, RefusedError
from halfstep._preflight.report.preflight_entry import PreflightEntry, make_entry
from halfstep._preflight.report.roles import Argument, arguments as with_roles
from halfstep._preflight.target.mesh import MeshLike, as_mesh, check_mesh
from halfstep._preflight.target.targets import Target
from halfstep.kernels._target import compiling_for

Step = Callable[..., Any]
Gemm = Literal["auto", "triton", "library"]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """The options that `preflight` and functions built on it share, as given, and checked."""

    donate_argnums: int | Sequence[int]
    mesh: MeshLike | None
    shardings: object
    memory_fraction: float | None
    gemm: Gemm
    flags: Sequence[str]
    timeout: float | None
    cache: bool

    def __post_init__(self) -> None:
        check_flags(self.flags)
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise PreflightError(
                f"memory_fraction is a share, above 0 and at most 1; got {self.memory_fraction}."
            )
        if self.gemm not in get_args(Gemm):
            raise PreflightError(f'gemm must be "auto", "triton" or "library"; got {self.gemm!r}.')

    @property
    def donated(self) -> tuple[int, ...]:
        """The numbers of the donated arguments."""
        return listed(self.donate_argnums)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step with its arguments."""

    name: str
    step: Step
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A step that has been traced and lowered."""

    case: Case
    programs: Mapping[str, Program]
    arguments: tuple[Argument, ...]


def prepare(
    case: Case,
    targets: Sequence[Target],
    options: CompileOptions,
    roles: Mapping[str, str] | None = None,
) -> Prepared:
    programs: dict[str, Program] = {}
    lowered: dict[tuple[str, tuple[int, int] | None], Program] = {}
    for accelerator in dict.fromkeys(target.accelerator for target in targets):
        platform, capability = accelerator.platform, accelerator.capability
        # This comes first: a user without the compiler must not wait for a trace to learn that.
        compiler_versions(platform)
        # A program that did not ask for the GPU generation is stored without one, and is for all
        # generations.
        program = lowered.get((platform, capability)) or lowered.get((platform, None))
        if program is None:
            with compiling_for(capability) as told:
                program = lower(
                    case.step,
                    case.args,
                    platform=platform,
                    donate_argnums=options.donated,
                    mesh=as_mesh(options.mesh),
                    shardings=options.shardings,
                    device_kind=accelerator.pallas_name,
                )
            # Most programs are the same for all GPUs: they are lowered once.
            lowered[platform, capability if told.asked else None] = program
        programs[accelerator.name] = program
    for target in targets:
        check_mesh(dict(programs[target.accelerator.name].axes), target)
    leaves = next(iter(programs.values())).leaves
    return Prepared(case, programs, with_roles(case.step, case.args, leaves, roles))


def compile_prepared(
    prepared: Prepared, target: Target, gemm: str, options: CompileOptions, bar: Progress
) -> PreflightEntry:
    bar.begin(f"{target.name}, {prepared.case.name}")
    program = prepared.programs[target.accelerator.name]
    compiled = compile_program(
        program,
        target,
        gemm=gemm,
        flags=tuple(options.flags),
        timeout=options.timeout,
        cache=options.cache,
    )
    bar.done()
    return make_entry(
        prepared.case.name, program, compiled, target, prepared.arguments, options.memory_fraction
    )


def in_one_way(gemm: Gemm, target: Target, run: Callable[[str], _T]) -> _T:
    """Run with one implementation of matrix products throughout, so that results are comparable."""
    if gemm != "auto" or target.accelerator.platform != "cuda":
        return run(gemm)
    try:
        return run("triton")
    except RefusedError as refused:
        try:
            return run("library")
        except RefusedError:
            # The default compiler's message is nearer to the cause than the library's.
            raise refused from None
