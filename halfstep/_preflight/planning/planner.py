"""Define `halfstep.plan`, which finds a policy for a memory budget."""

from collections.abc import Mapping, Sequence
from typing import Any

from halfstep._base import Progress, checked
from halfstep._policy import Policy, as_policy
from halfstep._preflight.planning.memory_plan import MemoryPlan
from halfstep._preflight.planning.plan_search import MakeStep, PlanRequest, first_that_fits
from halfstep._preflight.preflight_errors import PreflightError
from halfstep._preflight.steps import CompileOptions, Gemm, in_one_way
from halfstep._preflight.target.mesh import MeshLike
from halfstep._preflight.target.targets import Target, parse_target

# More than anyone waits for.
_MOST_COMPILES = 10_000


@checked
def plan(
    make_step: MakeStep | Mapping[str, MakeStep],
    args: Sequence[Any],
    *,
    target: str | Target,
    budget: int | float | str | None = None,
    policy: Policy | str = "bf16",
    max_gradient_error: float | None = None,
    batches: Sequence[Sequence[Any]] | None = None,
    donate_argnums: int | Sequence[int] = (),
    compiles: int = 12,
    mesh: MeshLike | None = None,
    shardings: Any = None,
    memory_fraction: float | None = None,
    gemm: Gemm = "auto",
    flags: Sequence[str] = (),
    timeout: float | None = None,
    cache: bool = True,
    progress: bool = True,
) -> MemoryPlan:
    """Find a policy with which a training step fits into a memory budget, at the least cost.

    Each result of a contraction is kept in 16 bits for the backward pass, kept in 8 or 4 bits,
    recomputed, or moved to the host. An integer program makes this choice, and XLA's compiler for
    the target proves that it fits. The target hardware need not be there.

    Args:
        make_step: A function that takes a policy and returns the training step, which uses the
            policy in `autocast` or in one of the gradient functions. A mapping of names to such
            functions offers alternatives, such as optimizers; the first one that can be made to fit
            is taken.
        args: The step's arguments: arrays, or `jax.ShapeDtypeStruct`s, in any trees.
        target: The target to compile for: `"h100"`, `"h100:8"`, `"v5e"`.
        budget: The budget per device: bytes, `"5GiB"`, a share, or `None` for all that JAX takes.
        policy: The policy to start from. Its own store rules, if any, stay first.
        max_gradient_error: The most that low-precision storage may change the gradients, as a share
            of their norm. With `None` nothing is stored in fewer than 16 bits.
        batches: Arguments of the step with real arrays, once for each batch. Errors are measured on
            the first batch. The others are held out and tell whether the plan keeps the bound. The
            step runs on the batches in this process. They may be smaller than `args`.
        donate_argnums: Arguments whose memory the step may reuse, as in `jax.jit`.
        compiles: The most programs to compile.
        mesh: As in `preflight`, like all arguments that follow.
        shardings: As in `preflight`.
        memory_fraction: As in `preflight`.
        gemm: As in `preflight`.
        flags: As in `preflight`.
        timeout: As in `preflight`.
        cache: As in `preflight`.
        progress: As in `preflight`.

    Returns:
        The plan. Train with `plan.policy`.

    Raises:
        DoesNotFitError: If no plan is within the budget; the message has the nearest one.
        PreflightError: If no answer is possible, as in `preflight`.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def make_step(policy):
            def loss(w, x):
                for _ in range(6):
                    x = x + jnp.tanh(x @ w)
                return jnp.mean(x**2)

            return lambda w, x: w - 0.1 * jax.grad(halfstep.autocast(loss, policy))(w, x)


        w = jax.ShapeDtypeStruct((512, 512), jnp.float32)
        x = jax.ShapeDtypeStruct((16384, 512), jnp.float32)
        plan = halfstep.plan(make_step, (w, x), target="h100", budget="220MiB")
        print(plan)
        assert plan.peak_bytes <= 220 * 2**20
        ```
    """
    options = CompileOptions(
        donate_argnums, mesh, shardings, memory_fraction, gemm, flags, timeout, cache
    )
    parsed = parse_target(target)
    makers = make_step if isinstance(make_step, Mapping) else {"": make_step}
    _check(makers, compiles, max_gradient_error, batches)
    with Progress(compiles, show=progress) as bar:
        request = PlanRequest(
            tuple(args),
            parsed,
            budget,
            as_policy(policy),
            max_gradient_error,
            () if batches is None else tuple(batches),
            compiles,
            options,
            bar,
        )
        return in_one_way(options.gemm, parsed, lambda way: first_that_fits(makers, request, way))


def _check(
    makers: Mapping[str, MakeStep],
    compiles: int,
    max_gradient_error: float | None,
    batches: Sequence[Sequence[Any]] | None,
) -> None:
    if not makers or not all(map(callable, makers.values())):
        raise PreflightError(
            f"make_step is a function of a policy, or several by name; got {dict(makers)}. Pass "
            "make_step=, or a mapping with at least one."
        )
    if not 3 <= compiles <= _MOST_COMPILES:
        raise PreflightError(
            f"a plan takes at least 3 compiles, and at most {_MOST_COMPILES:,}; got "
            f"compiles={compiles}. Use compiles=12, say."
        )
    if max_gradient_error is None:
        return
    if max_gradient_error <= 0:
        raise PreflightError(
            f"max_gradient_error is a share above 0; got {max_gradient_error}. Leave it out to "
            "store nothing in fewer than 16 bits."
        )
    if batches is None or len(batches) < 2:
        raise PreflightError(
            "max_gradient_error needs batches: the step's arguments with real arrays, for one "
            "batch to measure on and at least one that is held out; got "
            f"{'none' if batches is None else len(batches)}."
        )
