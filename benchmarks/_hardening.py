"""What long runs, strange texts, wrong arguments and random programs did, for the documentation."""

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
            "grows": "yes" if row["grows"] else _held(row),
        }
        for row in result["rows"]
    ]
    heads = {"what": "", "early": "after a third", "late": "at the end", "grows": "grows"}
    return (
        f"{result['steps']:,} steps in {result['minutes']:g} minutes, recorded, with a live view, "
        "checkpoints, comparisons of copies and a bad batch every 37 steps:\n\n"
        f"{table(rows, heads)}{_orbax_alone(result)}"
    )


def _held(row: dict[str, Any]) -> str:
    """How little something grows that does not count as growing."""
    is_more = row["what"] == "memory" and row["late"] > 1.02 * row["early"]
    return "as much as with Orbax alone" if is_more else "no"


def _orbax_alone(result: dict[str, Any]) -> str:
    """What Orbax itself keeps, where it was measured."""
    if "orbax_alone" not in result:
        return ""
    (memory,) = (row for row in result["rows"] if row["what"] == "memory")
    each = result["orbax_alone"]["bytes_per_save"]
    saves = memory["steps"] / result["save_every"]
    return (
        f"\n\nOrbax alone, with TensorStore {result['versions']['tensorstore']}, keeps "
        f"{each / 1024:.0f} KiB of memory for every save of these arrays, measured over "
        f"{result['orbax_alone']['saves']} saves: {each * saves / 2**20:.0f} MiB in the "
        f"{saves:,.0f} saves between the two counts. The memory may grow by as much, and by 2 %."
    )


def fuzz_text(result: dict[str, Any]) -> str:
    """How many texts were tried."""
    rows = [{**row, "executions": f"{row['executions']:,}"} for row in result["rows"]]
    crashes = sum(row["crashed"] for row in result["rows"])
    heads = {"target": "what reads them", "executions": "texts"}
    return f"{table(rows, heads)}\n\nCrashes: {crashes}."


_OUTCOMES = {
    "same": "as the oracle says",
    "skipped: refused": "refused by a message: its policy has a rule for something it has not",
    "skipped: JAX refuses": "not compared: JAX cannot differentiate or map the plain program",
    "skipped: a constant": "not compared: a constant that several numbers round to",
    "skipped: JAX rounds": "not compared: JAX computes a constant in float32 while it traces",
    "failed": "failed",
}


def random_programs_text(result: dict[str, Any]) -> str:
    """How many programs were compared, why others were not, and what the oracle can see."""
    made = result["programs"]
    counts: dict[str, int] = {}
    for kind, count in made["outcomes"].items():
        starts = (told for start, told in _OUTCOMES.items() if kind.startswith(start))
        told = next(starts, "not compared for another reason")
        counts[told] = counts.get(told, 0) + count
    rows = [{"what": what, "programs": f"{count:,}"} for what, count in counts.items()]
    each = made["seconds"] / max(made["programs"], 1)
    text = (
        f"{made['programs']:,} programs: {made['compared']:,} compared with the oracle as they are "
        f"traced, {made['run']:,} of them also as XLA runs them, "
        f"{len(made['failures'])} failures; {each:.1f} seconds each.\n\n"
        f"{table(rows, {'what': 'what became of them', 'programs': 'programs'})}"
    )
    return f"{text}\n\n{_planted(result['planted'])}" if result["planted"] else text


def _planted(found: list[dict[str, Any]]) -> str:
    rows = [
        {
            "error": f"{row['error']}, {row['in']} pass",
            "planted": f"{row['planted']:,}",
            "function": f"{row['function']:.1%}",
            "rounding": f"{row['rounding']:.1%}",
        }
        for row in found
    ]
    columns = {
        "error": "planted error",
        "planted": "programs",
        "function": "found as traced",
        "rounding": "found as run",
    }
    return f"Errors that were planted in one operation of each program:\n\n{table(rows, columns)}"


def wrong_arguments_text(result: dict[str, Any]) -> str:
    """The results in words, and as a table by module."""
    total, wrongly = sum(result["calls"].values()), len(result["complaints"])
    rows = [{"module": name, "calls": f"{n:,}"} for name, n in sorted(result["calls"].items())]
    return (
        f"{total:,} calls of {result['functions']} functions and methods, with {result['objects']} "
        f"objects in the place of each of {result['parameters']} arguments. {wrongly} raised an "
        "error from inside another library, or one that does not name the parameter.\n\n"
        f"{table(rows, {'module': 'module', 'calls': 'calls'})}"
    )


def rest_text(found: dict[str, Any]) -> str:
    """Which flipped bits were found, and what the checks cost."""
    flips, steps = (sum(row[name] for row in found["rows"]) for name in ("flips", "steps"))
    missed = sum(len(row["missed"]) for row in found["rows"])
    every = next(list(row["ratios"]) for row in found["rows"] if "ratios" in row)
    listed = [
        {
            "mode": row["mode"],
            "run": f"`{row['policy']}`, {row['optimizer']}",
            "processes": row["processes"],
            "steps": f"{row['steps']:,}",
            "found": f"{row['flips'] - len(row['missed']):,} of {row['flips']:,}"
            if row["flips"]
            else "none planted",
            **{f"every {n}": f"{ratio:.2f}" for n, ratio in row.get("ratios", {}).items()},
        }
        for row in found["rows"]
    ]
    columns = {
        "mode": "parameters",
        "run": "policy, optimizer",
        "processes": "processes",
        "steps": "steps with a check",
        "found": "flips found",
        **{f"every {n}": f"time of a step, check every {n}" for n in every},
    }
    reads = [
        {
            "target": row["target"],
            **{
                name: f"{row[f'{name}_bytes'] / 2**20:,.1f} MiB"
                for name in ("state", "check", "step")
            },
            "share": f"{row['check_bytes'] / row['step_bytes']:.1%}",
        }
        for row in found["traffic"]
    ]
    heads = {
        "target": "target",
        "state": "state",
        "check": "a check reads and writes",
        "step": "a step reads and writes",
        "share": "share",
    }
    return (
        f"{flips:,} bits were flipped, one at a time; {missed} were not found or named wrongly. "
        f"{steps:,} steps with a check after each gave no false alarm. Times are multiples of the "
        f"time without checks:\n\n{table(listed, columns)}\n\n"
        "What preflight says about a check of the example at its own size, on one device. The "
        "activations of a model this small stay in the TPU's on-chip memory and do not count, "
        f"which is why the share is large there:\n\n{table(reads, heads)}"
    )
