"""Report on every step and target: whether it fits, as text, HTML, JSON and a plot."""

import dataclasses
import os
from typing import Any

from halfstep._base import Report, check_share, checked, size
from halfstep._explain import LintError
from halfstep._preflight.preflight_errors import DoesNotFitError
from halfstep._preflight.report.peak_report import PeakReport, largest
from halfstep._preflight.report.preflight_entry import PreflightEntry
from halfstep._preflight.report.rendering import detail, f8_miss, html, plot, table
from halfstep._preflight.report.saved import load


@dataclasses.dataclass(frozen=True, repr=False)
class PreflightReport(Report):
    """The compilers' answers about a step, for each target and variant.

    `print(report)` shows a table, and a notebook shows the same as HTML. `report["h100"]` is one
    entry, or `report["h100", "bf16"]` if there are several variants.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def double(x):
            return 2 * x


        x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

        report = halfstep.preflight(double, (x,), targets="h100")
        print(report)
        assert report.targets == ("h100",)
        report.require_fit()
        ```
    """

    entries: tuple[PreflightEntry, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets, in the order they were given."""
        return tuple(dict.fromkeys(entry.target for entry in self.entries))

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants, in the order they were given."""
        return tuple(dict.fromkeys(entry.variant for entry in self.entries))

    @property
    def peak(self) -> PeakReport:
        """The memory at the peak of every entry: `print(report.peak)` shows the largest groups."""
        return PeakReport(self.entries)

    def __getitem__(self, key: str | tuple[str, str]) -> PreflightEntry:
        target, variant = key if isinstance(key, tuple) else (key, None)
        found = [
            entry
            for entry in self.entries
            if entry.target == target and variant in (None, entry.variant)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise KeyError(
                f"{target!r} has the variants {list(self.variants)}; "
                f"write report[{target!r}, {self.variants[0]!r}]"
            )
        raise KeyError(
            f"no entry {key!r}; give one of the targets {list(self.targets)} "
            f"and of the variants {list(self.variants)}"
        )

    def __str__(self) -> str:
        return table(self.entries)

    def _repr_html_(self) -> str:
        return html(self.entries)

    def detail(self) -> str:
        """Return every figure of every entry, as text."""
        return "\n\n".join(f"{detail(entry)}\n\n{PeakReport((entry,))}" for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {"entries": [entry.to_dict() for entry in self.entries]}

    @staticmethod
    @checked
    def load(path: str | os.PathLike[str]) -> "PreflightReport":
        """Read a report that `to_json` or `halfstep preflight --json FILE` has written.

        The text of the programs is not in the file. Reports of older versions can lack other
        figures, which are then `None`.

        Args:
            path: The file.

        Raises:
            PreflightError: If the file cannot be read, or is not a report.

        Example:
            ```python
            import pathlib
            import tempfile

            import halfstep
            import jax
            import jax.numpy as jnp


            def double(x):
                return 2 * x


            x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
            report = halfstep.preflight(double, (x,), targets="h100")
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder) / "report.json"
                report.to_json(path)
                assert halfstep.PreflightReport.load(path).entries == report.entries
            ```
        """
        return PreflightReport(load(path))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the memory of each entry by role, as stacked bars, into a PNG (or PDF, SVG) file.

        Needs matplotlib, which `pip install "halfstep[plot]"` installs.
        """
        plot(self.entries, path)

    def require_fit(self) -> None:
        """Raise unless every entry fits; for scripts and CI.

        Raises:
            DoesNotFitError: If an entry does not fit. The message says for each such entry how much
                it needs, how much is usable, and what takes the most.
        """
        lines = [_shortage(entry) for entry in self.entries if not entry.fits]
        if lines:
            raise DoesNotFitError("\n".join(lines))

    @checked
    def check(self, *, f8: float | int) -> None:
        """Raise unless enough products are in 8 bits, in every entry; for tests and CI.

        Eligible are the products that a policy's recipe makes, forward and backward, and all other
        products with 8-bit operands. Products that a recipe leaves out are not required: `explain`
        has a check for them. A step without any eligible product fails the check, and so does a
        target without fp8 units.

        Args:
            f8: The share of the eligible contractions' FLOPs that has to be in 8 bits (or 4) in the
                compiled program.

        Raises:
            LintError: If the share is too small. The message has every eligible product that is not
                in 8 bits: its line, shapes, scope, and why.
        """
        check_share("f8", f8)
        lines = [miss for entry in self.entries if (miss := f8_miss(entry, f8))]
        if lines:
            raise LintError("\n".join(lines))


def _shortage(entry: PreflightEntry) -> str:
    name = f"{entry.variant} does not fit on {entry.target}"
    if entry.peak_bytes is None or entry.temp_bytes is None:
        needs = "" if entry.peak_bytes is None else f" needs {size(entry.peak_bytes)},"
        return (
            f"{name}:{needs} usable are {size(entry.usable_bytes)}; {'; '.join(entry.notes)}. "
            f"Try a smaller batch, or more devices.{_filled(entry)}"
        )
    largest = max(entry.memory, key=lambda role: entry.memory[role])
    advice = {
        "temporaries": "a smaller batch, microbatches=, jax.checkpoint or a 16-bit policy",
        "optimizer state": "sharding it over more devices, or a smaller optimizer state",
        "parameters": "sharding them over more devices",
        "outputs": "donating the arguments that the outputs replace (donate_argnums)",
    }.get(largest, "a larger target")
    over = entry.peak_bytes - entry.usable_bytes
    # JAX preallocates a part of the memory. A step that fits on the device may not fit into that
    # part.
    share = ""
    if entry.peak_bytes <= entry.capacity_bytes:
        share = (
            f" The device has {size(entry.capacity_bytes)}: it would fit if JAX were allowed more "
            "(memory_fraction= here, XLA_PYTHON_CLIENT_MEM_FRACTION there)."
        )
    return (
        f"{name}: it needs {size(entry.peak_bytes)} of {size(entry.usable_bytes)} usable, "
        f"{size(over)} too much. Most is {largest}, {size(entry.memory[largest])}: "
        f"try {advice}.{share}{_filled(entry)}"
    )


def _filled(entry: PreflightEntry) -> str:
    """Name the largest buffers that the step computes."""
    found = "" if entry.peak is None else largest(entry.peak)
    return f" The largest at the peak are {found}; print(report.peak) shows more." if found else ""
