"""What long runs and strange texts did, as text for the documentation."""

from typing import Any

from benchmarks._report import table


def soak_text(result: dict[str, Any]) -> str:
    """What grew."""
    rows = [
        {
            "what": row["what"] + (", MiB" if row["what"] == "memory" else ""),
            **{
                when: f"{row[when] / (2**20 if row['what'] == 'memory' else 1):,.0f}"
                for when in ("early", "late")
            },
            "grows": "yes" if row["grows"] else "no",
        }
        for row in result["rows"]
    ]
    heads = {"what": "", "early": "after a third", "late": "at the end", "grows": "grows"}
    return (
        f"{result['steps']:,} steps in {result['minutes']:g} minutes, recorded, with a live view, "
        "checkpoints, comparisons of copies and a bad batch every 37 steps:\n\n"
        f"{table(rows, heads)}"
    )


def fuzz_text(result: dict[str, Any]) -> str:
    """How many texts were tried."""
    rows = [{**row, "executions": f"{row['executions']:,}"} for row in result["rows"]]
    crashes = sum(row["crashed"] for row in result["rows"])
    heads = {"target": "what reads them", "executions": "texts"}
    return f"{table(rows, heads)}\n\nCrashes: {crashes}."
