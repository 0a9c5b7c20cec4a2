"""Define `explain`, which says what runs in which precision, and why."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from halfstep._autocast import (
    Plan,
    Rule,
    Sharing,
    Slot,
    TracedCall,
    check_rules,
    named_sites,
    run_traced,
    settings_of,
    trace,
)
from halfstep._base import ClosedJaxpr, FlatCall, checked, listed, option_names, refusing, size
from halfstep._explain.carry_rows import carry_rows
from halfstep._explain.cotangents import scale_sensitive
from halfstep._explain.entries import is_float, name_of
from halfstep._explain.explain_report import ExplainReport
from halfstep._explain.findings import (
    FLOAT16,
    low_reductions,
    merged,
    model_copies,
    ranges,
    stored_float32,
    unknown,
    unlowered,
)
from halfstep._explain.flops import is_unseen
from halfstep._explain.magnitudes import magnitudes
from halfstep._explain.places import PlanPlace
from halfstep._explain.promotion import promotions
from halfstep._explain.residual_rows import rows
from halfstep._explain.stored import Residual, residuals
from halfstep._explain.totals import casts, own_casts, totals_of
from halfstep._explain.walk import Step, walk
from halfstep._explain.written import run_as_written
from halfstep._policy import Policy, as_policy, recipes_of
from halfstep._program import Finder

_MEBIBYTE = 2**20


@checked
def explain(
    func: Callable[..., Any],
    policy: Policy | str = "bf16",
    *,
    params: int | Sequence[int] = 0,
    values: bool = False,
    min_bytes: int = _MEBIBYTE,
) -> Callable[..., ExplainReport]:
    """Say what `autocast` makes of a function: every operation, its dtypes, and why.

    Nothing runs unless `values=True` asks for it, so arguments can be arrays or shapes
    (`jax.ShapeDtypeStruct`).

    Args:
        func: Any function that can be traced, ideally a loss.
        policy: As for `autocast`. The state of its recipe is not needed.
        params: As for `autocast`. The report shows what the gradient with respect to these
            arguments stores for the backward pass.
        values: Run the function once as it is written, and measure how large the results of
            contractions are. This finds matrix products that leave float16's range.
        min_bytes: Report findings about values of at least this size. Scalars and the vectors of
            norms are small enough to stay in float32.

    Returns:
        A function of the same arguments that returns an `ExplainReport`.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def loss(params, x):
            hidden = jax.nn.gelu(x @ params["up"])
            return jnp.mean(jax.nn.softmax(hidden @ params["down"]) ** 2)


        shape = jax.ShapeDtypeStruct
        params = {
            "up": shape((512, 2048), jnp.float32),
            "down": shape((2048, 512), jnp.float32),
        }
        report = halfstep.explain(loss, "bf16")(params, shape((4096, 512), jnp.float32))
        report.check(low=1.0, max_findings=0)
        assert report.totals.stored.keys() == {"bf16"}
        ```
    """
    policy = as_policy(policy)
    settings = settings_of(policy)
    numbers = listed(params)

    def explained(*args: Any, **kwargs: Any) -> ExplainReport:
        finder = Finder()
        call = FlatCall(func, args, kwargs)
        traced = trace(func, settings, args, kwargs, params=numbers, keep=policy.keep)
        root = PlanPlace(traced.plan, paths=traced.paths)
        steps = walk(root, finder)
        notes = _notes(steps)
        if values:
            steps = _looked_into(root, steps, call, notes)
        entries = tuple(step.entry for step in steps)
        # Positions beyond these belong to arguments that are passed by name, or left out.
        own = [number for number in numbers if number < len(args)]
        # The plan runs once. Its program is differentiated, and shows which casts there are: a
        # value is cast once for all operations that read it in the same dtype, which the plan does
        # not say.
        sharing = Sharing(traced.plan, as_one=jax.jit, regions_alone=True)
        program = jax.make_jaxpr(_lowered(call, traced, sharing))(*call.arrays)
        added = casts(program.jaxpr) - own_casts(steps)
        stored = _stored(lambda: program, call, own, finder, notes)
        # A second reason for the same error would only repeat the note.
        written = (
            _stored(lambda: _written(call, traced, sharing), call, own, finder, [])
            if stored is not None
            else None
        )
        findings = [*low_reductions(steps, min_bytes)]
        if settings.compute.itemsize < 4:
            findings += promotions(steps, finder, min_bytes)
            findings += unlowered(steps, min_bytes)
            findings += model_copies(steps, _parameter_bytes(call, own), min_bytes)
            findings += unknown(steps, min_bytes)
            findings += ranges(steps)
            if settings.compute == FLOAT16 and stored is not None:
                findings += scale_sensitive(call, own, finder)
            # Lines that a rule of the user's has made wide, or that another finding is about, are
            # known.
            known = {finding.source for finding in findings}
            known |= {entry.source for entry in entries if entry.by}
            findings += stored_float32(stored or (), known, min_bytes)
        return ExplainReport(
            _name(func),
            str(policy),
            name_of(settings.compute),
            entries,
            totals_of(entries, settings, added, stored, written),
            merged(findings),
            tuple(notes),
            next(iter(recipes_of(policy.recipe, policy.rules)), None),
            rows(stored or (), steps),
            tuple(carry_rows(root, finder)),
        )

    return refusing(explain, option_names(explain), func, explained)


def _name(func: Callable[..., Any]) -> str:
    if isinstance(func, functools.partial):
        return _name(func.func)
    return getattr(func, "__name__", type(func).__name__)


def _lowered(call: FlatCall, traced: TracedCall, sharing: Sharing) -> Callable[..., list[Any]]:
    """Return a call as `autocast` rewrites it, as a function of its arrays.

    It runs the plan that the operations were read from. `autocast` itself would trace the function
    and decide about all of its operations again, for each derivative and each count of casts.
    """
    settings = traced.plan.settings
    if settings.compute.itemsize >= 4:
        return call
    check_rules(traced.plan)
    has_state = any(recipe.needs_state for recipe in settings.recipes)
    state = _blank(traced.plan) if has_state else None
    return lambda *arrays: run_traced(traced, arrays, state=state, sharing=sharing)


def _written(call: FlatCall, traced: TracedCall, sharing: Sharing) -> ClosedJaxpr:
    """Return a call as it is written.

    It is the program that was traced for the plan. If parameters are stored in 16 bits, which the
    plan traces as float32, the function itself is traced once more.
    """
    dtypes = [getattr(aval, "dtype", None) for aval in traced.program.in_avals]
    is_same = dtypes == [array.dtype for array in call.arrays]
    func = functools.partial(run_as_written, traced.plan, sharing) if is_same else call
    return jax.make_jaxpr(func)(*call.arrays)


def _blank(plan: Plan) -> Mapping[str, Slot]:
    """Return a recipe's state before any observations: `explain` needs only its shapes."""
    has_scales = any(recipe.history for recipe in plan.settings.recipes)
    is_random = any(recipe.is_random for recipe in plan.settings.recipes)
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return {
        found.name: Slot(
            jnp.ones((*found.turns, 3), jnp.float32) if has_scales else None,
            jnp.zeros((*found.turns, *words.shape), words.dtype) if is_random else None,
            jnp.zeros((*found.turns, 3, 3), jnp.float32),
        )
        for found in named_sites(plan)
    }


def _parameter_bytes(call: FlatCall, params: Sequence[int]) -> int:
    """Return the bytes of the floating-point arrays of some arguments."""
    return sum(
        value.size * value.dtype.itemsize
        for value, owner in zip(call.arrays, call.owners, strict=True)
        if owner in params and is_float(value.dtype)
    )


def _stored(
    function: Callable[[], ClosedJaxpr],
    call: FlatCall,
    params: Sequence[int],
    finder: Finder,
    notes: list[str],
) -> list[Residual] | None:
    try:
        return residuals(function(), call, params, finder)
    except Exception as error:  # Any error of the user's derivative rules ends up here.
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        notes.append(f"what is stored for the backward pass is not known: {first}")
        return None


def _looked_into(
    root: PlanPlace, steps: list[Step], call: FlatCall, notes: list[str]
) -> list[Step]:
    for path, value in zip(call.paths, call.arrays, strict=True):
        if isinstance(value, jax.ShapeDtypeStruct):
            raise TypeError(
                "values=True runs the function once and needs arrays; got jax.ShapeDtypeStruct for "
                f"`{path}`. Leave values= out, or pass arrays."
            )
    found = magnitudes(root, call.arrays)
    if found.skipped:
        names = ", ".join(found.skipped)
        notes.append(f"contractions inside {names} were not looked into for their values")
    return [
        dataclasses.replace(
            step,
            entry=dataclasses.replace(
                step.entry, largest=found.largest.get((*step.place.key, step.index))
            ),
        )
        for step in steps
    ]


def _stays_wide(step: Step) -> bool:
    """Return whether a result stays float32 only because it is not known to fit float16."""
    plan = step.place.plan
    return any(
        plan.depths[user] > plan.depths[step.index]
        and plan.decisions[user].rule is not Rule.COMPUTE
        for number in plan.too_large.intersection(step.node.outs)
        for user in plan.graph.users[number]
    )


def _notes(steps: list[Step]) -> list[str]:
    notes: list[str] = []
    labels = {label for step in steps for label in step.entry.within}
    if "while" in labels:
        notes.append("a while loop is counted as one iteration")
    if any(label.startswith("branch") for label in labels):
        notes.append("all branches of a cond are counted")
    if "shard_map" in labels:
        notes.append("inside shard_map the figures are those of one device")
    # A figure that leaves something out says so. Otherwise a share of FLOPs in low precision would
    # look better than it is.
    unseen = [step.entry for step in steps if is_unseen(step.node.name, step.node.params)]
    if unseen:
        moved = sum((entry.bytes_in + entry.bytes_out) * entry.count for entry in unseen)
        names = ", ".join(sorted({f"`{entry.name}`" for entry in unseen}))
        notes.append(
            f"what runs in {names} is not in the traced program and not counted; it reads and "
            f"writes {size(moved)}"
        )
    wide = sum(_stays_wide(step) for step in steps)
    if wide:
        notes.append(
            f"{wide} results of float32 operations that are read after the next contraction stay "
            "float32: they may be larger than float16 holds"
        )
    by = sorted({step.entry.by for step in steps if step.entry.by and step.entry.is_contraction})
    notes += [f"contractions decided by the rule {text}" for text in by]
    return notes
