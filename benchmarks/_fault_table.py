"""What `benchmarks.faults` found, in words and as a table."""

from typing import Any

from benchmarks._report import table
from tests.scale import _worker
from tests.scale._reactions import COORDINATOR


def text(found: dict[str, Any]) -> str:
    """The results as text and a table for the docs."""
    summary = found["summary"]
    rows = [
        {
            "mode": row["mode"],
            "policy": f"`{row['policy']}`",
            "processes": row["processes"],
            "killed": len(row["faults"]),
            "writing": sum(fault["was_writing"] for fault in row["faults"]),
            "lost": sum(fault["steps_lost"] for fault in row["faults"]),
            "same": "no" if row["differs"] else "yes",
        }
        for row in found["rows"]
    ]
    columns = {
        "mode": "parameters",
        "policy": "policy",
        "processes": "processes",
        "killed": "killed",
        "writing": "of these while writing",
        "lost": "steps lost",
        "same": "same bits",
    }
    said = (
        f"{summary['injected']} processes were killed, {summary['while_writing']} of them while a "
        f"checkpoint was being written, and {summary['survived']} times the run ended with the "
        f"bits of an uninterrupted one. A kill cost {summary['steps_lost_mean']} steps in the mean "
        f"and {summary['steps_lost_max']} at most, with a checkpoint every "
        f"{found['save_every']} steps; the other processes had ended after "
        f"{summary['seconds_to_end_max']} seconds at most."
    )
    return f"{_reactions(found['reactions'])}\n\n{said}\n\n{table(rows, columns)}"


def _reactions(found: dict[str, Any]) -> str:
    names = {
        "SIGKILL": "killed",
        COORDINATOR: "killed, the one that the other is connected with",
        "exception": "raises",
        "hang": "hangs",
        "SIGSTOP": "is stopped",
        "SIGTERM": "is told to end (SIGTERM)",
        "slow": (
            f"is slow: {_worker.SLOW * found['limit']:g} seconds in each of "
            f"{_worker.LAST - _worker.FIRST + 1} steps"
        ),
        "late": f"is started {_worker.LATE:g} seconds late",
    }
    rows = []
    for row in found["ended"]:
        how = "both end, with an error"
        if row["fault"] == "SIGTERM":
            first, second = found["stopped_after"]
            how = f"both end well, after the steps {first} and {second}"
        elif row["fault"] in ("slow", "late"):
            how = "both end well"
        elif row["fault"] == "SIGSTOP":
            how = "the other ends, with an error"
        rows.append({"fault": names[row["fault"]], "seconds": row["seconds"], "how": how})
    columns = {"fault": "one of two processes", "seconds": "seconds", "how": "what happens"}
    bad = [
        name for name, both in found["bad_numbers"].items() if not any(b["finite"] for b in both)
    ]
    said = (
        f"The limit of the watchdogs was {found['limit']} seconds. With {', '.join(bad)} in the "
        f"batch of one process both skipped the step, halved the loss scale, and had "
        f"{'the same' if found['same_bits'] else 'other'} bits afterwards. A bit that was flipped "
        f"on one of them after step {found['flipped_after']} was found by both after step "
        f"{found['flipped_found_after'][0]}, with a comparison every 2 steps."
    )
    return f"{table(rows, columns)}\n\n{said}"
