"""A report of a log as text."""

from typing import TYPE_CHECKING

from halfstep._tables import ABSENT, aligned, percent

if TYPE_CHECKING:
    from halfstep.debug._report import DebugReport, Trace

# So many steps fit on a line.
_STEPS = 6
COLUMNS = ("site", "pass", "scope")


def number(value: float) -> str:
    """A magnitude for people; nothing for what was not computed."""
    return ABSENT if value == -1 else f"{value:.3g}"


def headline(report: "DebugReport") -> str:
    """Whether anything is wrong, and since when."""
    if report.step is None:
        return "nothing is recorded yet"
    kept = f"steps {report.steps[0]} to {report.steps[-1]}"
    if report.found is None:
        return f"{kept}: all finite in step {report.step}, {len(report.sites)} sites"
    later = [step for step in report.bad_steps if step != report.step]
    others = f"; also in step{'s' * (len(later) > 1)} {_listed(later)}" if later else ""
    return f"{kept}: not finite in step {report.step}{others}; {len(report.sites)} sites"


def shown_steps(report: "DebugReport") -> list[int]:
    """The steps that a table has columns for, by position: the last ones up to the bad one."""
    if report.step is None:
        return []
    end = report.steps.index(report.step) + 1
    return list(range(max(0, end - _STEPS), end))


def heads(report: "DebugReport") -> list[tuple[str, bool]]:
    """The headings of the table, and whether they are of numbers."""
    steps = [(f"step {report.steps[at]}", True) for at in shown_steps(report)]
    words = [(name, False) for name in COLUMNS]
    return [*words, *steps, ("below", True), ("above", True)]


def cells(report: "DebugReport", trace: "Trace") -> list[str]:
    """A line of the table: magnitudes step by step, and the shares of the last one."""
    at = shown_steps(report)
    site = trace.site
    name = site.path or f"{site.source.short} {site.op} {site.type}"
    return [
        name,
        site.pass_name,
        site.scope or ABSENT,
        *(number(trace.absmax[position]) for position in at),
        percent(trace.below[at[-1]]),
        percent(trace.above[at[-1]]),
    ]


def caption(report: "DebugReport") -> str:
    """What the table shows."""
    if report.found is not None:
        return "Largest magnitudes there and of what it is made of, step by step:"
    if report.shown:
        return "Nearest to what the compute dtype can hold, largest magnitudes step by step:"
    return "No number is below or above what the compute dtype can hold."


def text(report: "DebugReport") -> str:
    """All of it."""
    parts = [headline(report)]
    if report.found is not None:
        parts.append(str(report.found))
    if report.step is not None:
        parts.append(caption(report))
    if report.shown:
        heading = heads(report)
        rows = [[name for name, _ in heading], *(cells(report, t) for t in report.shown)]
        parts[-1] += "\n" + aligned(rows, [is_number for _, is_number in heading])
    return "\n\n".join(parts)


def _listed(steps: list[int]) -> str:
    first = ", ".join(map(str, steps[:8]))
    return f"{first} and {len(steps) - 8} more" if len(steps) > 8 else first
