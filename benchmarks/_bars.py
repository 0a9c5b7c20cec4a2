"""The bars of a training benchmark in words: which there are, and which were missed."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

LEARNS = " learns"
# Recording only adds work. If the bare step is slower than the recorded one by more than noise, the
# ratio does not measure recording, and a bar is not met by it.
BASELINE = 0.95


class Bar(NamedTuple):
    """One bar: for a policy on a task, and what it asks."""

    task: str
    policy: str
    asked: str


def parsed(name: str, tasks: Iterable[str]) -> Bar:
    """Take the name of a bar apart, which `benchmarks.training` has put together.

    Names of policies have commas in them, so that the task is looked up and the rest is cut at its
    last comma.
    """
    (task,) = [task for task in tasks if name.startswith((f"{task}, ", f"{task}: "))]
    rest = name[len(task) + 2 :]
    if rest.endswith(LEARNS):
        return Bar(task, rest.removesuffix(LEARNS), "the loss falls well below a constant guess")
    who, _, asked = rest.partition(": ")
    policy, _, loss = who.rpartition(", ")
    return Bar(task, policy, f"{loss} {asked}")


def bars_text(made: Mapping[str, Any]) -> str:
    """Name the bars of a result, then the ones that were missed."""
    asked: dict[str, list[str]] = {}
    missed: dict[tuple[str, str], list[str]] = {}
    for name, met in made["bars"].items():
        bar = parsed(name, made["tasks"])
        policy = f"`{bar.policy}`"
        if policy not in (group := asked.setdefault(bar.asked, [])):
            group.append(policy)
        if not met:
            missed.setdefault((bar.task, bar.asked), []).append(policy)
    bars = "; ".join(f"{what}, for {_listed(of)}" for what, of in asked.items())
    failed = "; ".join(f"{what}, on {t}, by {_listed(of)}" for (t, what), of in missed.items())
    end = f"**Missed**: {failed}." if failed else "All bars were met."
    return f"**Bars**: {bars}. {end}"


def _listed(values: Iterable[str]) -> str:
    *others, last = values
    return f"{', '.join(others)} and {last}" if others else last
