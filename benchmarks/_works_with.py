"""The page "Works with": figures of other packages' programs as text for the documentation."""

from collections.abc import Sequence
from typing import Any

from benchmarks._report import table
from benchmarks.ecosystem import LEEWAY, SHARE, bars, no_worse

HEADS = {
    "program": "program",
    "bf16": "bf16",
    "inputs": "bf16, casting inputs",
    "f16": "f16",
    "f8": "fp8",
    "share": "FLOPs in 16 bits",
    "tracing": "tracing",
    "fault": "a planted infinity is found in",
}


def text(result: dict[str, Any]) -> str:
    """One table per run, in the order of packages, with what did not work and the bars."""
    rows = sorted(result["rows"], key=lambda row: (row["package"].lower(), row["name"]))
    parts = [
        _summary(rows),
        table([_line(row) for row in rows], HEADS),
        _bars(rows),
        _packages(rows),
    ]
    remarks = [line for row in rows for line in _remarks(row)]
    if remarks:
        parts += ["Remarks and failures:", "\n".join(remarks)]
    return "\n\n".join(parts)


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    compared = [row for row in rows if no_worse(row) is not None]
    within = sum(bool(no_worse(row)) for row in compared)
    strictly = sum(row["bf16"] <= row["bf16_inputs"] for row in compared)
    refused = sum(isinstance(row.get("bf16_inputs"), str) for row in rows)
    return (
        f"{len(rows)} programs of {len({row['package'] for row in rows})} packages. Casting all "
        f"inputs really runs in 16 bits in {len(compared)} of them: there the gradient of "
        f"`autocast` has at most the error of casting inputs in {strictly}, and at most "
        f"{LEEWAY:g} times that error in {within}. Casting inputs raises an error in {refused} "
        "programs."
    )


def _percent(value: Any) -> str:
    return f"{100 * value:.2g} %" if isinstance(value, float) else ""


def _error(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    return "raises" if isinstance(value, str) else _percent(value)


def _line(row: dict[str, Any]) -> dict[str, str]:
    inputs = _error(row, "bf16_inputs")
    promotes = row.get("inputs_run_low") is False
    tracing, fault = row.get("tracing"), row.get("fault") or ""
    found = f"`{fault.partition(' at ')[0]}`, `{fault.partition(' at ')[2]}`"
    return {
        "program": f"`{row['name']}`",
        "bf16": "fails" if "failed" in row else _error(row, "bf16"),
        "inputs": f"({inputs})" if promotes and inputs else inputs,
        "f16": _error(row, "f16"),
        "f8": _error(row, "f8"),
        "share": f"{100 * row['share']:.0f} %" if isinstance(row.get("share"), float) else "",
        "tracing": f"{tracing:.1f}" if isinstance(tracing, float) else "",
        "fault": found if " at " in fault else fault,
    }


def _bars(rows: Sequence[dict[str, Any]]) -> str:
    compared = [row for row in rows if no_worse(row) is not None]
    strictly = sum(row["bf16"] <= row["bf16_inputs"] for row in compared)
    strict = f"at most the error of casting inputs, without any leeway, in {SHARE:.0%} of them"
    kept = {**bars(rows), strict: strictly >= SHARE * len(compared)}
    lines = [f"- {name}: {'yes' if held else '**missed**'}" for name, held in kept.items()]
    return "What has to hold:\n\n" + "\n".join(lines)


def _packages(rows: Sequence[dict[str, Any]]) -> str:
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        if "version" in row:
            found.setdefault(row["jax"], {})[row["package"]] = row["version"]
    parts = [
        f"With JAX {jax}: {', '.join(f'{name} {version}' for name, version in packages.items())}."
        for jax, packages in sorted(found.items(), reverse=True)
    ]
    return " ".join(parts)


def _remarks(row: dict[str, Any]) -> list[str]:
    said = [row["note"]] if row.get("note") else []
    said += [f"fails: {row['failed']}"] if "failed" in row else []
    said += [
        f"{what}: {row[key].splitlines()[0]}"
        for key, what in (("bf16", "bf16"), ("f16", "f16"), ("f8", "fp8"))
        if isinstance(row.get(key), str)
    ]
    return [f"- `{row['name']}` {one}." for one in said]
