"""Say why two entries differ, as far as their figures show it.

Sentences use only figures that both reports have. A cause that no figure shows is not guessed.
"""

from collections.abc import Iterator, Sequence

from halfstep._base import size
from halfstep._preflight.report.changes import HALFSTEP, Change, recomputed, signed
from halfstep._preflight.report.preflight_entry import TEMPORARIES, PreflightEntry

_SETTINGS = ("version of ", "flag ", "GPU matrix products by")


def causes(
    before: PreflightEntry, after: PreflightEntry, changes: Sequence[Change]
) -> tuple[str, ...]:
    """Return sentences about causes, the most specific last."""
    return (
        *_program_or_compiler(before, after, changes),
        *_peak(before, after),
        *_donation(before, after),
        *_temporaries(before, after),
        *_f8(before, after),
        *_wire(before, after),
    )


def _program_or_compiler(
    before: PreflightEntry, after: PreflightEntry, changes: Sequence[Change]
) -> Iterator[str]:
    """Say whether the step has changed, or the compiler and its settings."""
    settings = [change for change in changes if change.what.startswith(_SETTINGS)]
    others = len(settings) < len(changes)
    ours = [change for change in settings if change.what == HALFSTEP]
    settings = [change for change in settings if change.what != HALFSTEP]
    for change in ours:
        yield (
            f"halfstep differs, {change.before} -> {change.after}: it can rewrite the step, and "
            "count what is in a program, in another way."
        )
    if settings:
        named = ", ".join(
            f"{change.what.removeprefix('version of ')} {change.texts[0]} -> {change.texts[1]}"
            for change in settings
        )
        yield f"The compiler or its settings differ: {named}."
    if before.program is None or after.program is None:
        return
    # The fingerprint does not include donation, which the compiler is told separately.
    donated = [[one.donated for one in entry.arguments or ()] for entry in (before, after)]
    same = before.program == after.program and donated[0] == donated[1]
    if same and settings and others:
        yield "The compiler was given the same program, so the step itself has not changed."
    elif not same and not settings and not ours and others:
        yield (
            "The compiler and its settings are the same: the step, its arguments or what it "
            "donates have changed."
        )
    elif not same and settings:
        yield (
            "The program that the compiler was given differs, too: from the step, or from the way "
            "this JAX lowers it. Compile the old step with the new versions to tell which."
        )


def _peak(before: PreflightEntry, after: PreflightEntry) -> Iterator[str]:
    if before.peak_bytes is None or after.peak_bytes is None:
        return
    grown = after.peak_bytes - before.peak_bytes
    if not grown:
        return
    roles = dict.fromkeys([*before.memory, *after.memory])
    by_role = {role: after.memory.get(role, 0) - before.memory.get(role, 0) for role in roles}
    # The role that moved furthest in the direction of the peak: others may have moved against it.
    role = max(by_role, key=lambda role: by_role[role] * (1 if grown > 0 else -1), default=None)
    if role is not None and by_role[role] * grown > 0:
        verb = "rose" if grown > 0 else "fell"
        yield (
            f"The peak {verb} by {size(abs(grown))}; the largest part is {role}, "
            f"{signed(size, by_role[role])}."
        )


def _donation(before: PreflightEntry, after: PreflightEntry) -> Iterator[str]:
    if before.alias_bytes is None or after.alias_bytes is None:
        return
    lost = before.alias_bytes - after.alias_bytes
    if before.arguments is None or after.arguments is None:
        if lost > 0:
            yield f"Outputs take the place of {size(lost)} fewer arguments: a donation was lost."
        return
    # If donated arrays became smaller, or were removed, so were the outputs in their place.
    donated = [
        sum(one.bytes for one in side if one.donated)
        for side in (before.arguments, after.arguments)
    ]
    now = {one.name: one for one in after.arguments}
    kept = [one for one in before.arguments if one.name in now]
    gone = [one.name for one in kept if one.donated and not now[one.name].donated]
    come = [one.name for one in kept if not one.donated and now[one.name].donated]
    if lost > 0 and gone:
        yield (
            f"A donation was lost: {_names(gone)} may not be reused any more, and outputs take the "
            f"place of {size(lost)} fewer arguments. Pass donate_argnums."
        )
    elif (missed := lost - (donated[0] - donated[1])) > 0:
        yield (
            f"As much is donated, but outputs take the place of {size(missed)} fewer arguments: an "
            "output must have the shape and the bits of the argument that it replaces."
        )
    elif lost < 0 and come:
        yield (
            f"A donation is new: {_names(come)} may be reused, and outputs take the place of "
            f"{size(-lost)} more arguments."
        )


def _temporaries(before: PreflightEntry, after: PreflightEntry) -> Iterator[str]:
    if before.temp_bytes is None or after.temp_bytes is None:
        return
    grown = after.memory.get(TEMPORARIES, 0) - before.memory.get(TEMPORARIES, 0)
    # Compare the temporaries at the peak. Only if they are the same, compare all that is allocated.
    grown = grown or after.temp_bytes - before.temp_bytes
    if before.products is not None and after.products is not None:
        old, new = recomputed(before.products), recomputed(after.products)
        if old != new:
            yield (
                f"jax.checkpoint recomputed {old} contractions and now recomputes {new}; "
                f"temporaries {_moved(grown)}."
            )
    if grown and before.written is not None and after.written is not None:
        dtypes = dict.fromkeys([*before.written, *after.written])
        moved = {d: after.written.get(d, 0) - before.written.get(d, 0) for d in dtypes}
        up, down = max(moved, key=moved.__getitem__), min(moved, key=moved.__getitem__)
        if moved[up] > 0 > moved[down]:
            yield (
                f"Kernels write {size(moved[up])} more of {up} and {size(-moved[down])} less of "
                f"{down}; temporaries {_moved(grown)}."
            )


def _moved(grown: int) -> str:
    return f"{'rose' if grown > 0 else 'fell'} by {size(abs(grown))}" if grown else "are the same"


def _f8(before: PreflightEntry, after: PreflightEntry) -> Iterator[str]:
    if before.f8 is None or after.f8 is None or after.products is None:
        return
    if after.f8.count >= before.f8.count:
        return
    left = [one for one in after.products if one.of_recipe and not one.in_f8]
    if left:
        yield f"Fewer contractions are in fp8: {left[0].why_not}."
    elif not after.f8.count:
        yield "No contraction of an fp8 recipe is left: the step has no fp8 policy any more."


def _wire(before: PreflightEntry, after: PreflightEntry) -> Iterator[str]:
    """Name each kind of collective whose dtype differs and whose count does not."""
    if before.collectives is None or after.collectives is None:
        return
    both = before.collectives, after.collectives
    for kind in dict.fromkeys(one.kind for side in both for one in side):
        old, new = ({c.dtype: c.count for c in side if c.kind == kind} for side in both)
        moved = {d: new.get(d, 0) - old.get(d, 0) for d in {*old, *new}}
        less = [d for d, n in moved.items() if n < 0]
        more = [d for d, n in moved.items() if n > 0]
        # Only a clean exchange is reported: as many more of one dtype as fewer of another.
        if len(less) == len(more) == 1 and not sum(moved.values()):
            yield f"{moved[more[0]]} {kind} in {more[0]} instead of {less[0]}."


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
