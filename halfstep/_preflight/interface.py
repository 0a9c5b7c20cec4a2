"""Define `halfstep.preflight` and `preflight.largest_batch`: compile steps and report on them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from halfstep._base import Progress
from halfstep._preflight.compile.compiler import check_flags, compile_program
from halfstep._preflight.compile.lowering import Program, lower
from halfstep._preflight.compile.requirements import compiler_versions
from halfstep._preflight.preflight_errors import PreflightError, RefusedError
from halfstep._preflight.report.preflight_entry import PreflightEntry, make_entry
from halfstep._preflight.report.preflight_report import PreflightReport
from halfstep._preflight.report.roles import Argument, arguments as with_roles
from halfstep._preflight.search import LargestBatch, search
from halfstep._preflight.target.mesh import MeshLike, as_mesh, check_mesh
from halfstep._preflight.target.targets import Target, parse_target
from halfstep.kernels._target import compiling_for

Step = Callable[..., Any]
Gemm = Literal["auto", "triton", "library"]
_T = TypeVar("_T")


class Preflight:
    """`halfstep.preflight`: compile a training step for hardware that is not there."""

    def __call__(
        self,
        step: Step | None,
        args: Sequence[Any] = (),
        *,
        targets: str | Target | Sequence[str | Target],
        donate_argnums: int | Sequence[int] = (),
        variants: Mapping[str, Step | tuple[Step, Sequence[Any]]] | None = None,
        mesh: MeshLike | None = None,
        shardings: Any = None,
        roles: Mapping[str, str] | None = None,
        memory_fraction: float | None = None,
        gemm: Gemm = "auto",
        flags: Sequence[str] = (),
        timeout: float | None = None,
        cache: bool = True,
        progress: bool = True,
    ) -> PreflightReport:
        """Compile a step for targets, and report what it takes there.

        The step is traced and lowered here and compiled in another process, so that nothing is
        allocated and no accelerator is needed. The compilers are XLA's own: `pip install
        "halfstep[cuda-preflight]"` for NVIDIA's GPUs, `"halfstep[tpu-preflight]"` for TPUs.

        Args:
            step: The function to compile, jitted or not. What a jitted step donates is donated. May
                be `None` if `variants` are given.
            args: Its positional arguments: arrays, or `jax.ShapeDtypeStruct`s (see
                `jax.eval_shape`), in any trees. What is neither is constant.
            targets: What to compile for: `"h100"`, `"h100:8"`, `"h100:32x8"` (32 hosts of 8),
                `"v5e"`, `"v5e:16x16"`.
            donate_argnums: Arguments whose memory the step may reuse, as `jax.jit` has it.
            variants: Steps to compare, by name: functions of the same arguments, or pairs of a
                function and its own arguments.
            mesh: For more than one device, the mesh: `{"data": 32, "model": 8}`, or a mesh of
                JAX's. Not needed if arguments have `NamedSharding`s.
            shardings: `PartitionSpec`s or `NamedSharding`s for `args`, as a prefix of their tree.
            roles: What arguments are for, by name, where that is guessed wrong: `"parameters"`,
                `"optimizer state"`, `"batch"` or `"other"`.
            memory_fraction: Share of the device's memory that may be used. JAX takes three quarters
                of a GPU's and all of a TPU's if not told otherwise, which is the default here.
            gemm: Who makes matrix products on a GPU: `"triton"` (XLA's own kernels) or `"library"`
                (cuBLAS). Without a GPU XLA cannot time them and choose. `"auto"` takes Triton's,
                and for all variants of a target the library's if Triton refuses one.
            flags: More flags for XLA, `--xla_gpu_...` or `--xla_tpu_...`. Those in this process's
                environment are not passed on.
            timeout: Seconds that one compile may take.
            cache: Whether to take and keep answers in `$HALFSTEP_CACHE_DIR`, or in the user's cache
                folder. They are kept by program, target, flags and versions.
            progress: Whether to show a progress bar, where tqdm is installed.

        Returns:
            A report with an entry for each target and variant.

        Raises:
            PreflightError: If there is no answer: no compiler, a step that cannot be lowered, a
                mesh of another size than the target. A step that does not fit is an answer.

        Example:
            ```python
            import halfstep
            import jax
            import jax.numpy as jnp


            def step(params, batch):
                def loss(params):
                    return jnp.mean((batch @ params) ** 2)

                return params - 0.1 * jax.grad(loss)(params)


            params = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
            batch = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
            report = halfstep.preflight(
                step, (params, batch), targets="h100", donate_argnums=0
            )
            print(report)
            assert report["h100"].fits
            ```
        """
        options = _Options(
            donate_argnums, mesh, shardings, memory_fraction, gemm, flags, timeout, cache
        )
        if isinstance(targets, str | Target):
            targets = [targets]
        parsed = [parse_target(target) for target in targets]
        if not parsed:
            raise PreflightError(
                f'no target given; got targets={targets!r}. Write targets="h100", say.'
            )
        prepared = [
            _prepare(case, parsed, options, roles) for case in _cases(step, tuple(args), variants)
        ]
        entries: list[PreflightEntry] = []
        with Progress(len(parsed) * len(prepared), show=progress) as bar:
            for target in parsed:
                entries += _in_one_way(
                    options.gemm,
                    target,
                    lambda way, target=target: [
                        _compile(case, target, way, options, bar) for case in prepared
                    ],
                )
        return PreflightReport(tuple(entries))

    def largest_batch(
        self,
        step_for_batch: Callable[[int], tuple[Step, Sequence[Any]]],
        *,
        target: str | Target,
        multiple_of: int = 1,
        maximum: int = 2**20,
        donate_argnums: int | Sequence[int] = (),
        mesh: MeshLike | None = None,
        shardings: Any = None,
        memory_fraction: float | None = None,
        gemm: Gemm = "auto",
        flags: Sequence[str] = (),
        timeout: float | None = None,
        cache: bool = True,
        progress: bool = True,
    ) -> LargestBatch:
        """Find the largest batch that fits on a target, by doubling and then halving.

        Args:
            step_for_batch: Given a batch size, returns a step and its arguments.
            target: What to compile for.
            multiple_of: Try only multiples of this; over a mesh, the devices that share the batch.
            maximum: The largest batch to try.
            donate_argnums: As in `preflight`, and so are all the others.
            mesh: As in `preflight`.
            shardings: As in `preflight`.
            memory_fraction: As in `preflight`.
            gemm: As in `preflight`.
            flags: As in `preflight`.
            timeout: As in `preflight`.
            cache: As in `preflight`.
            progress: As in `preflight`.

        Returns:
            The batch, its entry, and all that were tried.

        Raises:
            DoesNotFitError: If not even the smallest batch fits.

        Example:
            ```python
            import halfstep
            import jax
            import jax.numpy as jnp


            def step_for_batch(batch):
                x = jax.ShapeDtypeStruct((batch, 4096), jnp.float32)
                return (lambda x: jnp.tanh(x @ x.T)), (x,)


            found = halfstep.preflight.largest_batch(
                step_for_batch, target="l4", multiple_of=32768
            )
            print(found)
            assert found.entry.fits
            ```
        """
        options = _Options(
            donate_argnums, mesh, shardings, memory_fraction, gemm, flags, timeout, cache
        )
        parsed = parse_target(target)

        # One way for the whole search: if Triton refuses a batch in the middle, all of them are
        # compiled again by the library, because peaks of two compilers do not lie on one line.
        def find(way: str) -> LargestBatch:
            def compile_batch(batch: int) -> PreflightEntry:
                step, args = step_for_batch(batch)
                prepared = _prepare(_Case(f"batch {batch}", step, tuple(args)), [parsed], options)
                return _compile(prepared, parsed, way, options, bar)

            return search(compile_batch, multiple_of=multiple_of, maximum=maximum)

        with Progress(None, show=progress) as bar:
            return _in_one_way(options.gemm, parsed, find)


preflight = Preflight()
"""Will a step fit, on hardware that is not there?"""


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options that `preflight` and `largest_batch` share, as they were given, and checked."""

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
        numbers = self.donate_argnums
        return (numbers,) if isinstance(numbers, int) else tuple(numbers)


@dataclasses.dataclass(frozen=True)
class _Case:
    name: str
    step: Step
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Prepared:
    case: _Case
    programs: Mapping[str, Program]
    arguments: tuple[Argument, ...]


def _cases(
    step: Step | None,
    args: tuple[Any, ...],
    variants: Mapping[str, Step | tuple[Step, Sequence[Any]]] | None,
) -> list[_Case]:
    # A function without a name, such as a `functools.partial`, is called "step".
    cases = [] if step is None else [_Case(getattr(step, "__name__", "step"), step, args)]
    for name, variant in (variants or {}).items():
        func, given = variant if isinstance(variant, tuple) else (variant, args)
        cases.append(_Case(name, func, tuple(given)))
    names = [case.name for case in cases]
    if not cases or len(set(names)) < len(names):
        raise PreflightError(
            "pass a step, or `variants`, a mapping of names to steps, each name once; got "
            f"{'neither' if not cases else f'the names {names}'}."
        )
    return cases


def _prepare(
    case: _Case,
    targets: Sequence[Target],
    options: _Options,
    roles: Mapping[str, str] | None = None,
) -> _Prepared:
    programs: dict[str, Program] = {}
    lowered: dict[tuple[str, tuple[int, int] | None], Program] = {}
    for accelerator in dict.fromkeys(target.accelerator for target in targets):
        platform, capability = accelerator.platform, accelerator.capability
        # First of all: who has no compiler must not wait for a trace to learn it.
        compiler_versions(platform)
        # A program that did not ask for the generation is stored without one, and is for all of
        # them.
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
    return _Prepared(case, programs, with_roles(case.step, case.args, leaves, roles))


def _compile(
    prepared: _Prepared, target: Target, gemm: str, options: _Options, bar: Progress
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


def _in_one_way(gemm: Gemm, target: Target, run: Callable[[str], _T]) -> _T:
    """Run with one maker of matrix products throughout: only likes are compared."""
    if gemm != "auto" or target.accelerator.platform != "cuda":
        return run(gemm)
    try:
        return run("triton")
    except RefusedError as refused:
        try:
            return run("library")
        except RefusedError:
            # What the default compiler says is nearer to the cause than what the other one says.
            raise refused from None
