"""Numbers that are written into pages by hand: each has a source, or is an error.

Looked for are those that have the form of something measured, a share, a size, a time or a ratio,
outside code and rendered blocks.
"""

import pathlib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

ROOT = pathlib.Path(__file__).parents[1]
FENCE = re.compile(r"^ *```.*?^ *```[ ]*$", re.MULTILINE | re.DOTALL)
RENDERED = re.compile(r"<!-- [^>]+ -->\n.*?<!-- end of [\w ]+ -->", re.DOTALL)
INLINE = re.compile(r"`[^`\n]+`")
MEASURED = re.compile(
    r"(?<![\w.])\d[\d,.]*"
    r"(?: ?%| ?[KMGT]i?B\b| bytes (?:a|per) parameter| ms\b| seconds?\b| minutes?\b|x\b"
    r"| times (?:less|more|as|faster|slower)\b| of \d[\d,]*\b| kills in \d+ runs\b)"
)

FIVE_BYTES = "tests/optim/test_any.py::test_a_master_of_24_bits_and_compressed_state_is_5_bytes"
SOURCES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("README.md", "5 bytes per parameter"): FIVE_BYTES,
        ("README.md", "34 of 34"): "docs/my-loss-is-nan.md::Of 34 planted faults, "
        "`debug.first_nonfinite` names 34 ",
        ("README.md", "64 kills in 16 runs"): "docs/scale.md::64 processes were killed",
        # The same numbers in MiB.
        ("README.md", "22.6 GiB"): "docs/memory.md::| 23,152 |",
        ("README.md", "13.0 GiB"): "docs/memory.md::| 13,357 ",
        ("README.md", "4.3 GiB"): "docs/memory.md::| 4,447 ",
        ("README.md", "22.5 GiB"): "docs/memory.md::| 23,028 |",
        ("README.md", "12.0 GiB"): "docs/memory.md::| 12,333 ",
        ("README.md", "11.9 GiB"): "docs/memory.md::| 12,148 ",
        ("README.md", "10.3 GiB"): "docs/memory.md::| 10,583 ",
        ("docs/choosing-a-policy.md", "5 bytes per parameter"): FIVE_BYTES,
        ("docs/examples.md", "5 bytes per parameter"): FIVE_BYTES,
        ("docs/scale-by-compiler.md", "5 bytes per parameter"): FIVE_BYTES,
        ("docs/tour.md", "5 bytes per parameter"): FIVE_BYTES,
        ("docs/optimizers.md", "4.125 bytes per parameter"): "tests/optim/test_four_bits.py::"
        "(optim.flash_adamw(1e-3, moment_bits=4), 4.125)",
        # What bfloat16 takes.
        ("docs/gradient-release.md", "2 bytes per parameter"): "docs/formats.md::bf16",
        ("docs/what-is-stored.md", "0.3 %"): "docs/what-is-stored.md::again < 0.003",
        ("docs/my-loss-is-nan.md", "10 %"): "halfstep/debug/_live/live.py::name_above: float = 0.1",
        ("docs/training.md", "0.5 %"): "benchmarks/training.py::BAR_PERCENT = 0.5",
        # In the caption of a picture that is drawn there.
        ("docs/where-precision-is-lost.md", "6 %"): "docs/generators/precision.py::underflow",
    }
)
"""Where a number of a page comes from: a file, and what is written there."""


def found(text: str) -> Iterator[str]:
    """The numbers in a page that look measured."""
    for pattern in (RENDERED, FENCE, INLINE):
        text = pattern.sub("", text)
    for match in MEASURED.finditer(text):
        yield match[0]


def wrong(pages: Mapping[str, str], sources: Mapping[tuple[str, str], str] = SOURCES) -> list[str]:
    """What is wrong with the numbers of pages, a line each."""
    seen = {(page, number) for page, text in pages.items() for number in found(text)}
    lines = [
        f"{page}: {number} is written by hand: render it from a result, or name its source in "
        "benchmarks/_numbers.py"
        for page, number in sorted(seen - set(sources))
    ]
    for (page, number), source in sources.items():
        name, _, text = source.partition("::")
        path = ROOT / name
        if page in pages and (page, number) not in seen:
            lines.append(f"{page}: {number} has a source and is not there")
        elif not path.is_file() or text not in path.read_text():
            lines.append(f"{page}: the source of {number}, {source}, is not there")
    return lines


def pages() -> dict[str, str]:
    """All pages."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}
