"""What `benchmarks.faults` found, in words and as a table."""

from typing import Any

from benchmarks._report import table


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
    return f"{said}\n\n{table(rows, columns)}"
