"""The tables of products in 8 bits, for the page and for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._report import table

NAMES = {"equinox": "Equinox", "linen": "Linen", "nnx": "NNX", "haiku": "Haiku"}
Row = dict[str, Any]


def text(made: Mapping[str, Any]) -> str:
    """All of them, as Markdown."""
    sizes = made["transformer"]
    shown = {name: NAMES[name] for name in made["frameworks"]}
    models = "; ".join(f"{name}: {about}" for name, about in made["models"].items())
    cells, errors = peer_lines(made["peer_cosines"], made["frameworks"])
    mlp = made["peer_mlp"]
    parts = [
        "**Gradients.** The cosine between the gradient and float32's: a transformer of "
        f"{sizes['layers']} layers of width {sizes['width']}, scanned and rematerialized, "
        f"{sizes['batch']} sequences of {sizes['tokens']} tokens; the mean of {made['batches']} "
        "batches. The models are unmodified.",
        table(
            cosine_lines(made["cosines"]),
            {"policy": "policy", **shown, "least": "lowest of all batches", "bar": "bar"},
        ),
        cosine_bars(made["cosines"]),
        "**Products.** How many of the eligible ones, forward and of both gradients, multiply "
        "8-bit operands in the program for an H100, with XLA's own kernels (Triton) and with "
        "cuBLAS. What a loop or a rematerialization repeats counts each time. Not eligible are "
        "products of two activations (attention), and those with a size that is not a multiple of "
        "16. The tensor cores of an H100 cannot scale blocks. Those of `f8-block` are large enough "
        "to be scaled between two products, by a kernel, on one device. `mxfp8` and `nvfp4`, and "
        "all blocks on several devices, are read back in 16 bits before they are multiplied. "
        f"{models}.",
        table(
            product_lines(made["products"], ("model", "recipe")),
            {
                "model": "model",
                "recipe": "recipe",
                "triton": "Triton",
                "library": "cuBLAS",
                "of_activations": "of activations",
                "odd": "odd sizes",
            },
        ),
        *gathers(made["products"]),
        "**Other libraries, gradients.** The same cosine, and whether it can be computed at all.",
        table(cells, {"library": "library", **shown}),
        *([errors] if errors else []),
        "**Other libraries, products.** Those of a Linen network of two layers, "
        f"{mlp['width']:,} to {mlp['hidden']:,} and back with {mlp['batch']:,} rows, and of the "
        "Linen transformer above, for an H100. Compilers merge some that share a factor.",
        table(
            product_lines(made["peer_products"], ("model", "library")),
            {"model": "model", "library": "library", "triton": "Triton", "library_": "cuBLAS"},
        ),
    ]
    return "\n\n".join(parts)


def cosine_lines(rows: Sequence[Row]) -> list[Row]:
    """Cosines with four digits, rounded down: none looks better than it is."""
    return [
        {
            "policy": f"`{row['policy']}`",
            **{name: digits(row[name]) for name in NAMES if name in row},
            "least": digits([min(min(row[name]) for name in NAMES if name in row)]),
            "bar": None if row["bar"] is None else f"{row['bar']:.4f}",
        }
        for row in rows
    ]


def cosine_bars(rows: Sequence[Row]) -> str:
    """Say what the bars are of, which recipes miss theirs, and which single batches do."""
    means, lowest = [], []
    for row in rows:
        values = [row[name] for name in NAMES if name in row]
        if row["bar"] is None:
            continue
        if min(sum(value) / len(value) for value in values) < row["bar"]:
            means.append(f"`{row['policy']}`")
        if min(map(min, values)) < row["bar"]:
            lowest.append(f"`{row['policy']}`")
    return (
        "The bar is for the mean of each framework. "
        + (f"**Missed** by {', '.join(means)}. " if means else "All recipes with a bar met it. ")
        + (f"Single batches of {', '.join(lowest)} are below it. " if lowest else "")
        + "`nvfp4` has no bar."
    )


def digits(values: Sequence[float]) -> str:
    """Their mean."""
    return f"{int(sum(values) / len(values) * 10_000) / 10_000:.4f}"


def product_lines(rows: Sequence[Row], keys: tuple[str, str]) -> list[Row]:
    """One line for each model and recipe or library, with a column for each maker of products."""
    lines: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        place = {key: row[key] for key in keys}
        if "recipe" in place:
            place["recipe"] = f"`{place['recipe']}`"
        line = lines.setdefault(tuple(place.values()), dict(place))
        # A column named after cuBLAS must not be taken for the library that is compared.
        column = (
            "library_" if (row["gemm"], "library" in keys) == ("library", True) else row["gemm"]
        )
        problem = row.get("refused") or row.get("error")
        line[column] = problem or f"{row['f8']} of {row['eligible']}"
        line |= {key: row[key] for key in ("of_activations", "odd") if key in row}
    return list(lines.values())


def gathers(rows: Sequence[Row]) -> list[str]:
    """What is gathered over devices, in words."""
    for row in rows:
        if "gathered_bytes" in row and (row["recipe"], row["gemm"]) == ("f8", "triton"):
            return [
                f"{row['model']} gathers {listed(row['gathered_bytes'])} on each device with "
                f"`f8`, and {listed(row['float32_gathered_bytes'])} in float32. Weights are "
                "gathered in 8 bits; what remains are activations of the embedding and tokens."
            ]
    return []


def listed(sizes: Mapping[str, int]) -> str:
    found = [f"{size / 2**20:,.1f} MiB of {name}" for name, size in sizes.items()]
    return ", ".join(found)


def peer_lines(rows: Sequence[Row], frameworks: Sequence[str]) -> tuple[list[Row], str]:
    """Cosines of libraries, and the errors that are there instead, by number."""
    errors: list[str] = []
    lines = []
    for row in rows:
        line: Row = {"library": row["library"]}
        for name in frameworks:
            if row.get("absent"):
                line[name] = "not installed"
                continue
            value = row[name]
            if isinstance(value, Mapping):
                if value["error"] not in errors:
                    errors.append(value["error"])
                line[name] = f"no ({errors.index(value['error']) + 1})"
            else:
                line[name] = value if isinstance(value, str) else digits(value)
        lines.append(line)
    return lines, "\n".join(f"{number}. `{said}`" for number, said in enumerate(errors, 1))
