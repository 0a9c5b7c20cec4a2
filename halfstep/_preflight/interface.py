"""Define `halfstep.preflight` and `preflight.largest_batch`: compile steps and report on them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halfstep._base import Progress, checked
from halfstep._preflight.preflight_errors import PreflightError
from halfstep._preflight.report.preflight_entry import PreflightEntry
from halfstep._preflight.report.preflight_report import PreflightReport
from halfstep._preflight.search import LargestBatch, search
from halfstep._preflight.steps import (
    Case,
    CompileOptions,
    Gemm as Gemm,
    Step,
    compile_prepared,
    in_one_way,
    prepare,
)
from halfstep._preflight.target.mesh import MeshLike
from halfstep._preflight.target.targets import Target, parse_target


class Preflight:
    """Compile a training step for hardware that is not there."""

    @checked
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
            step: The function to compile, jitted or not. Arguments that a jitted step donates are
                donated. May be `None` if `variants` are given.
            args: Its positional arguments: arrays, or `jax.ShapeDtypeStruct`s (see
                `jax.eval_shape`), in any trees. All other leaves are constants.
            targets: The targets to compile for: `"h100"`, `"h100:8"`, `"h100:32x8"` (32 hosts of
                8), `"v5e"`, `"v5e:16x16"`.
            donate_argnums: Arguments whose memory the step may reuse, as in `jax.jit`.
            variants: Steps to compare, by name: functions of the same arguments, or pairs of a
                function and its own arguments.
            mesh: For more than one device, the mesh: `{"data": 32, "model": 8}`, or a JAX mesh. Not
                needed if arguments have `NamedSharding`s.
            shardings: `PartitionSpec`s or `NamedSharding`s for `args`, as a prefix of their tree.
            roles: Roles of arguments, by name, where the guess is wrong: `"parameters"`,
                `"optimizer state"`, `"batch"` or `"other"`.
            memory_fraction: Share of the device's memory that may be used. The default is JAX's
                own: three quarters of a GPU's memory and all of a TPU's.
            gemm: Which kernels compute matrix products on a GPU: `"triton"` (XLA's own kernels) or
                `"library"` (cuBLAS). Without a GPU, XLA cannot time both and choose. `"auto"` uses
                Triton. If Triton refuses one variant of a target, all variants of that target use
                the library.
            flags: More flags for XLA, `--xla_gpu_...` or `--xla_tpu_...`. Flags in this process's
                environment are not passed on.
            timeout: Seconds that one compile may take.
            cache: Whether to read and keep answers in `$HALFSTEP_CACHE_DIR`, or in the user's cache
                folder. Answers are kept by program, target, flags and versions.
            progress: Whether to show a progress bar, if tqdm is installed.

        Returns:
            A report with an entry for each target and variant.

        Raises:
            PreflightError: If no answer is possible: no compiler, a step that cannot be lowered, a
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
        options = CompileOptions(
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
            prepare(case, parsed, options, roles) for case in _cases(step, tuple(args), variants)
        ]
        entries: list[PreflightEntry] = []
        with Progress(len(parsed) * len(prepared), show=progress) as bar:
            for target in parsed:
                entries += in_one_way(
                    options.gemm,
                    target,
                    lambda way, target=target: [
                        compile_prepared(case, target, way, options, bar) for case in prepared
                    ],
                )
        return PreflightReport(tuple(entries))

    @checked
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
        """Find the largest batch that fits on a target.

        Batches are doubled until one does not fit. Between the last two, the next batch is where a
        line through their peaks meets the usable memory, or the middle if the line was wrong.

        Args:
            step_for_batch: A function that takes a batch size and returns a step and its arguments.
            target: The target to compile for.
            multiple_of: Try only multiples of this number; over a mesh, the number of devices that
                share the batch.
            maximum: The largest batch to try.
            donate_argnums: As in `preflight`, like all arguments that follow.
            mesh: As in `preflight`.
            shardings: As in `preflight`.
            memory_fraction: As in `preflight`.
            gemm: As in `preflight`.
            flags: As in `preflight`.
            timeout: As in `preflight`.
            cache: As in `preflight`.
            progress: As in `preflight`.

        Returns:
            The batch, its entry, and all batches that were tried.

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
        options = CompileOptions(
            donate_argnums, mesh, shardings, memory_fraction, gemm, flags, timeout, cache
        )
        parsed = parse_target(target)

        # The whole search uses one implementation of matrix products: if Triton refuses a batch in
        # the middle, all batches are recompiled with the library, because peaks of two compilers do
        # not lie on one line.
        def find(way: str) -> LargestBatch:
            def compile_batch(batch: int) -> PreflightEntry:
                step, args = step_for_batch(batch)
                prepared = prepare(Case(f"batch {batch}", step, tuple(args)), [parsed], options)
                return compile_prepared(prepared, parsed, way, options, bar)

            return search(compile_batch, multiple_of=multiple_of, maximum=maximum)

        with Progress(None, show=progress) as bar:
            return in_one_way(options.gemm, parsed, find)


preflight = Preflight()
"""Find out whether a step fits on hardware that is not there."""


def _cases(
    step: Step | None,
    args: tuple[Any, ...],
    variants: Mapping[str, Step | tuple[Step, Sequence[Any]]] | None,
) -> list[Case]:
    # A function without a name, such as a `functools.partial`, is called "step".
    cases = [] if step is None else [Case(getattr(step, "__name__", "step"), step, args)]
    for name, variant in (variants or {}).items():
        func, given = variant if isinstance(variant, tuple) else (variant, args)
        cases.append(Case(name, func, tuple(given)))
    names = [case.name for case in cases]
    if not cases or len(set(names)) < len(names):
        raise PreflightError(
            "pass a step, or `variants`, a mapping of names to steps, each name once; got "
            f"{'neither' if not cases else f'the names {names}'}."
        )
    return cases
