"""The tables of how a step grows with the devices, and what follows from its figures."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks._images import markdown
from benchmarks._report import table
from benchmarks._scale_steps import ALL, GROUP, GROUPS
from halfstep._preflight import ACCELERATORS
from halfstep._preflight.hlo.analysis import Contraction
from halfstep._preflight.report.roofline import peak_rate

Row = Mapping[str, Any]
MIB = 2**20
ALT = (
    "Peak memory and sent bytes of one device over the number of devices: bf16 and f8 lie well "
    "below f32. From 8 to 256 devices memory falls; beyond, neither changes much"
)
SHORT = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
PORT, PORTS = 50e9, 8
"""Bytes a second of one port of 400 Gbit/s, and how many a host with 8 GPUs has."""
LINK = PORT * PORTS
"""Bytes a second for a device: what comes into a host is passed on to its GPUs over NVLink, so that
all ports carry one copy."""
BATCHES = (2**22, 2**24)
"""Tokens in a batch, for which the devices are counted that can share it."""
KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def sent(row: Row) -> int | None:
    """Bytes that a device sends in a step, if each collective is a ring over many devices.

    An all-gather and a reduce-scatter send their payload once, an all-reduce twice: it is both.
    """
    if row.get("collectives") is None:
        return None
    return sum(c["bytes"] * (2 if c["kind"] == "all-reduce" else 1) for c in row["collectives"])


def divided(row: Row) -> int | None:
    """What is divided over the devices: parameters and optimizer state."""
    if row.get("memory") is None:
        return None
    return sum(row["memory"].get(role, 0) for role in ("parameters", "optimizer state"))


def rest(row: Row) -> int | None:
    """What is not: activations, gradients on the way, gathered weights."""
    part = divided(row)
    if part is None or row.get("peak_bytes") is None:
        return None
    return row["peak_bytes"] - part


def piece(row: Row) -> float:
    """Bytes of one message: the mean gathered or scattered array, divided over its ring."""
    large = [c for c in row["collectives"] if c["kind"] in KINDS and c["bytes"] > MIB]
    ring = row["devices"] if row["layout"] == ALL else GROUP
    return sum(c["bytes"] for c in large) / sum(c["count"] for c in large) / ring


def compute_seconds(row: Row) -> float:
    """All products at the data sheet's rate: a lower bound and no estimate."""
    accelerator = ACCELERATORS[row["target"].partition(":")[0]]
    total = 0.0
    for name, flops in row["flops"].items():
        lhs, _, rhs = name.partition(" x ")
        rate = peak_rate(Contraction(lhs, rhs or lhs, "float32", flops, 1), accelerator)
        total += flops / rate if rate else 0.0
    return total


def tokens_to_hide(row: Row, tokens: int) -> float:
    """Tokens on a device from which on computing takes as long as sending over `LINK`.

    What is computed grows with the tokens, and what is sent does not.
    """
    return tokens * (sent(row) or 0) / LINK / compute_seconds(row)


def place(row: Row) -> str:
    """A target and how it is divided, as the heading of a column."""
    name = f"{row['target'].partition(':')[0]} x {row['devices']:,}"
    return name if row["layout"] == ALL else f"{name}, {row['layout']}"


def _line(row: Row) -> tuple[str, str]:
    return row["model"], row["recipe"]


def pivot(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    """One line for each model and recipe, one column for each place."""
    ordered = sorted(rows, key=lambda r: (r["target"].partition(":")[0], r["devices"], r["layout"]))
    places = dict.fromkeys(place(row) for row in ordered)
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        name = _line(row)
        line = lines.setdefault(name, {"model": name[0], "recipe": f"`{name[1]}`"})
        line[place(row)] = cell(row)
    columns = {"model": "model", "recipe": "recipe", **{name: name for name in places}}
    return table(list(lines.values()), columns)


def mebibytes(size: float | None) -> str:
    return "" if size is None else f"{size / MIB:,.0f}"


def peak(row: Row) -> str:
    if row.get("refused"):
        return "refused"
    if row.get("peak_bytes") is None:
        return "does not fit"
    return mebibytes(row["peak_bytes"]) + ("" if row["fits"] else ", does not fit")


def by_kind(row: Row, kind: str) -> str:
    """Payload of a kind by dtype; what is less than a MiB is left out."""
    found = [c for c in row["collectives"] if c["kind"] == kind and c["bytes"] > MIB]
    return ", ".join(f"{mebibytes(c['bytes'])} {SHORT.get(c['dtype'], c['dtype'])}" for c in found)


def wires(rows: Sequence[Row]) -> str:
    """What is sent, kind by kind, for one model."""
    lines = []
    for row in rows:
        if row.get("collectives") is None:
            continue
        known = {kind: by_kind(row, kind) for kind in KINDS}
        others = [c for c in row["collectives"] if c["kind"] not in KINDS and c["bytes"] > MIB]
        more = ", ".join(f"{c['kind']}: {mebibytes(c['bytes'])} {c['dtype']}" for c in others)
        count = sum(c["count"] for c in row["collectives"])
        lines.append(
            {"place": place(row), "recipe": f"`{row['recipe']}`", **known, "more": more, "n": count}
        )
    columns = {"place": "devices", "recipe": "recipe", **{kind: kind for kind in KINDS}}
    if any(line["more"] for line in lines):
        columns["more"] = "others"
    return table(lines, {**columns, "n": "collectives"})


def limits(rows: Sequence[Row], sizes: Mapping[str, Any]) -> str:
    """Where it stops: arithmetic with the figures of H100s."""
    lines = []
    for row in rows:
        if row.get("collectives") is None or not row["target"].startswith("h100"):
            continue
        size = sizes[row["model"]]
        tokens = size["tokens"] * size["examples"]
        needed = tokens_to_hide(row, tokens)
        lines.append(
            {
                "model": row["model"],
                "recipe": f"`{row['recipe']}`",
                "place": place(row),
                "compute": f"{1e3 * compute_seconds(row):,.0f}",
                "wire": f"{1e3 * (sent(row) or 0) / LINK:,.0f}",
                "tokens": f"{needed:,.0f}",
                **{str(batch): f"{batch / needed:,.0f}" for batch in BATCHES},
                "piece": f"{piece(row) / 2**10:,.0f}",
            }
        )
    columns = {
        "model": "model",
        "recipe": "recipe",
        "place": "devices",
        "compute": "compute, ms",
        "wire": "wire, ms",
        "tokens": "tokens a device to hide the wire",
        **{str(b): f"devices at {b // 2**20} Mi tokens" for b in BATCHES},
        "piece": "message, KiB",
    }
    return table(lines, columns)


def words(rows: Sequence[Row], sizes: Mapping[str, Any]) -> str:
    """What the tables say, in sentences that are made of them."""
    found = {
        (row["model"], row["target"], row["layout"], row["recipe"]): row
        for row in rows
        if row.get("collectives") is not None
    }
    few, some, many = "h100:8", "h100:32x8", "h100:1024x8"
    said = []
    for model, size in sizes.items():
        a, b = (found.get((model, target, ALL, "bf16")) for target in (few, many))
        if a is not None and b is not None:
            said.append(
                f"{model}, `bf16`: from 8 to 8,192 H100s what is divided falls from "
                f"{mebibytes(divided(a))} to {mebibytes(divided(b))} MiB, and the rest from "
                f"{mebibytes(rest(a))} to {mebibytes(rest(b))}."
            )
        a, b = (found.get((model, many, layout, "bf16")) for layout in (ALL, GROUPS))
        if a is not None and b is not None:
            said.append(
                f"{model}, `bf16`, 8,192 H100s: divided over all of them a device sends "
                f"{mebibytes(sent(a))} MiB and takes {mebibytes(a['peak_bytes'])}; in groups of "
                f"{GROUP} it sends {mebibytes(sent(b))} and takes {mebibytes(b['peak_bytes'])}."
            )
        a, b = (found.get((model, some, ALL, recipe)) for recipe in ("bf16", "f8, flash"))
        if a is not None and b is not None:
            tokens = size["tokens"] * size["examples"]
            sends = (sent(b) or 0) / (sent(a) or 1)
            said.append(
                f"{model}, 256 H100s: compared with `bf16`, `f8, flash` sends {sends:.0%} of the "
                f"bytes, and computes in {compute_seconds(b) / compute_seconds(a):.0%} of the time "
                f"at best. To hide the wire it needs {tokens_to_hide(b, tokens):,.0f} tokens on a "
                f"device instead of {tokens_to_hide(a, tokens):,.0f}."
            )
    share = [
        (divided(row) or 0) / row["peak_bytes"]
        for row in found.values()
        if row["devices"] >= GROUP and row["layout"] == ALL
    ]
    if share:
        said.append(
            f"On {GROUP} devices and more, parameters and optimizer state are at most "
            f"{max(share):.0%} of the memory in use, whatever the recipe."
        )
    return "\n".join(f"- {line}" for line in said)


def text(made: Mapping[str, Any]) -> str:
    """All tables, as Markdown."""
    rows, sizes = made["rows"], made["models"]
    full = [row for row in rows if row["devices"] > 8]
    first = next(iter(sizes))
    each = {size["examples"] * size["tokens"] for size in sizes.values()}
    about = "; ".join(
        f"{name}: {size['layers']} layers of width {size['width']:,} and hidden width "
        f"{size['hidden']:,}"
        for name, size in sizes.items()
    )
    unfit = [row for row in rows if not row.get("fits")]
    fitting = f"{len(rows) - len(unfit)} of {len(rows)} fit" if unfit else "All of them fit"
    places, lines = ({key(row) for row in rows} for key in (place, _line))
    if len(rows) < len(places) * len(lines):
        fitting += ". What an empty cell would have was not compiled"
    return "\n\n".join(
        [
            f"{about}. {' or '.join(f'{n:,}' for n in each)} tokens on each device.",
            f"**Memory**, the peak in MiB on each device. {fitting}.",
            pivot(rows, peak),
            "**Of it divided over the devices**, parameters and optimizer state in MiB:",
            pivot(rows, lambda row: mebibytes(divided(row))),
            "**Sent** by each device in a step, in MiB:",
            pivot(rows, lambda row: mebibytes(sent(row))),
            markdown(ALT, "scale"),
            "**In words:**",
            words(rows, sizes),
            f"**By kind and dtype**, payload in MiB of the model of {first}; what is below one MiB "
            "is left out, but counted in the last column:",
            wires([row for row in rows if row["model"] == first]),
            "**Where it stops**, by arithmetic: `compute` is all products at the data sheet's "
            "rate, those of float32 as TF32, and `wire` what is sent at "
            f"{LINK / 1e9:.0f} GB/s. That is a host of {PORTS} GPUs with {PORTS} ports of "
            f"{PORT * 8 / 1e9:.0f} Gbit/s, which receive once for all GPUs what they gather. "
            "Computation grows with the tokens on a device, and traffic does not: above some "
            "number of tokens the products hide the wire, which limits how many devices can share "
            "a batch. A message is what a device passes on at a time in a ring over all that "
            "share a collective:",
            limits(full, sizes),
            "**To compile** took seconds of a processor:",
            pivot(rows, seconds),
        ]
    )


def seconds(row: Row) -> str:
    return f"{row['compile_seconds']:.0f}" if "compile_seconds" in row else ""
