"""The page on memory: peaks, traffic and largest batches as text for the documentation."""

from typing import Any

from benchmarks._images import markdown
from benchmarks._report import table

OURS = "halfstep, bf16"
ALT = (
    "Peak memory and traffic as shares of the float32 step, over the batch, for two models. In "
    "peak memory, halfstep's lines lie below those of the casts by hand and of mpx"
)


def text(result: dict[str, Any]) -> str:
    """All tables, with the picture."""
    on_gpu = [row for row in result["rows"] if row["gemm"] == "library"]
    on_tpu = [row for row in result["rows"] if row["gemm"] is None]
    peak = by_batch(on_gpu, "peak", ("h100",))
    for line in peak:
        line["fits"] = _fitting(on_gpu, line["model"], line["batch"])
    found = [
        {
            "step": row["step"],
            "batch": f"{row['batch']:,}" if "batch" in row else "refused",
            "peak": f"{row['peak_bytes'] / 2**20:,.0f}" if "batch" in row else "",
            "again": f"{row['rematerialized']:,}" if "batch" in row else "",
        }
        for row in result["largest_batch"]
    ]
    largest_columns = {
        "step": "step",
        "batch": "largest batch",
        "peak": "peak MiB",
        "again": "instructions computed twice",
    }
    fits, said = {}, ""
    if found:
        usable = f"{result['largest_batch'][0]['usable_bytes'] / 2**20:,.0f} MiB"
        fits = {"fits": "fits on RTX 4070"}
        said = (
            " The last column says which steps fit on an RTX 4070, of whose memory JAX takes "
            f"{usable} by default; it is of the programs compiled for that card, where there are "
            "such."
        )
    parts = [
        f"Peak memory in MiB, compiled for an H100.{said}",
        table(peak, _columns(peak, on_gpu, fits)),
        "Memory traffic of a step in GiB, compiled for an H100.",
        _table(on_gpu, "traffic", ("h100",)),
        _makers(result["rows"]),
    ]
    if on_tpu:
        targets = tuple(dict.fromkeys(row["target"] for row in on_tpu))
        parts += [
            "Peak memory in MiB, compiled for a single chip of a TPU. An empty cell: the compiler "
            "gave up, because it would not fit, and did not say what it would take.",
            _table(on_tpu, "peak", targets),
            "Bytes accessed in a step in GiB, as the TPU's compiler says, on the chip and off it. "
            "It counts the body of a loop once, so that those of the GPT, whose layers are one "
            "loop, are of one layer and all that is outside.",
            _table(on_tpu, "accessed", targets),
            "Traffic to and from the TPU's main memory in a step in GiB, counted as for a GPU, a "
            "loop once per iteration.",
            _table(on_tpu, "traffic", targets),
        ]
    if found:
        model = result["largest_batch"][0]["model"]
        parts += [
            f"The largest batch of the {model} on an RTX 4070, in multiples of 32:",
            table(found, largest_columns),
        ]
    parts.append(markdown(ALT, "memory"))
    return "\n\n".join(parts)


def _table(rows: list[dict[str, Any]], what: str, targets: tuple[str, ...]) -> str:
    lines = by_batch(rows, what, targets)
    return table(lines, _columns(lines, rows, {}))


def _columns(
    lines: list[dict[str, Any]], rows: list[dict[str, Any]], more: dict[str, str]
) -> dict[str, str]:
    """Headings: what is compared, each step, and what was found; those that no line has not."""
    columns = {
        "chip": "chip",
        "model": "model",
        "batch": "batch",
        **{row["step"]: row["step"] for row in rows},
        "floor": "16-bit floor",
        "less": f"f32 / {OURS}",
        "of_floor": f"{OURS} / floor",
        **more,
    }
    return {key: name for key, name in columns.items() if any(key in line for line in lines)}


def by_batch(
    rows: list[dict[str, Any]], what: str, targets: tuple[str, ...]
) -> list[dict[str, Any]]:
    """One line for each target, model and batch, with a column for each step."""
    unit, form = (2**20, ",.0f") if what == "peak" else (2**30, ",.2f")
    lines: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in rows:
        if row["target"] not in targets:
            continue
        place = {"model": row["model"], "batch": row["batch"]}
        if len(targets) > 1:
            place["chip"] = row["target"]
        line = lines.setdefault((row["target"], row["model"], row["batch"]), place)
        size = row.get(f"{what}_bytes")
        if "refused" in row:
            line[row["step"]] = "refused"
        elif size is not None:
            line[row["step"]] = format(size / unit, form)
        if what == "peak" and "floor_bytes" in row:
            line["floor"] = format(row["floor_bytes"] / unit, form)
        if row["step"] != OURS:
            continue
        if f"{what}_ratio" in row:
            line["less"] = f"{row[f'{what}_ratio']:.2f}"
        if what == "peak" and "floor_ratio" in row:
            line["of_floor"] = f"{row['floor_ratio']:.3f}"
    return list(lines.values())


def _fitting(rows: list[dict[str, Any]], model: str, batch: int) -> str:
    there = {
        row["step"]: row.get("fits", False)
        for row in rows
        if (row["model"], row["batch"], row["target"]) == (model, batch, "rtx4070")
    }
    if not there:
        return ""
    if all(there.values()):
        return "all"
    if all(fits == (step != "f32") for step, fits in there.items()):
        return "all but f32"
    return "; ".join(step for step, fits in there.items() if fits) or "none"


def _makers(rows: list[dict[str, Any]]) -> str:
    """How far the figures depend on who makes the matrix products, and on the card."""
    batch = 256
    triton = [
        row
        for row in rows
        if (row["gemm"], row["target"], row["batch"]) == ("triton", "h100", batch)
        and "refused" not in row
    ]
    shown = "; ".join(
        f"{row['step']} {row['peak_bytes'] / 2**20:,.0f} MiB ({row['traffic_bytes'] / 2**30:.2f})"
        for row in triton
    )
    floor = next((row["floor_bytes"] for row in triton if "floor_bytes" in row), None)
    said = "" if floor is None else f" The 16-bit floor is {floor / 2**20:,.0f} MiB there."
    peaks: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        if row["gemm"] == "library" and row.get("rematerialized") == 0:
            key = (row["model"], row["batch"], row["step"])
            peaks.setdefault(key, []).append(row["peak_bytes"])
    apart = max(max(pair) / min(pair) - 1 for pair in peaks.values())
    if any(len(pair) > 1 for pair in peaks.values()):
        said += (
            " The cards get programs of their own: of one step at one batch, where neither "
            f"recomputes anything, the peaks are up to {100 * apart:.0f} % apart."
        )
    return (
        "In both tables matrix products are cuBLAS's. With XLA's own, made by Triton, the desktop "
        f"ViT at batch {batch} has a peak (and GiB of traffic) of {shown}.{said}"
    )
