"""What a comparison says."""

import dataclasses
import html as escaping
import os
from collections.abc import Sequence
from typing import Any

from halfstep._base import ABSENT, Report, aligned, html_table
from halfstep.debug._compare.deviation import Deviation, GradientDeviation
from halfstep.debug._compare.distance import Distance, distance
from halfstep.debug._compare.plot import plot

# How many sites and gradients are shown.
_SHOWN = 10
_SITES = (
    ("site", False),
    ("scope", False),
    ("held in", False),
    ("error", True),
    ("of its inputs", True),
    ("cosine", True),
)
_GRADIENTS = (("gradient of", False), ("error", True), ("cosine", True))


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Report):
    """Where a policy departs from float32.

    `print(report)` shows where error is added, most first, and the gradients; a notebook shows the
    same as HTML.

    Attributes:
        policy: The policy, as text.
        results: Error and cosine of what the function returns.
        sites: All sites that were computed, in the order of a run.
        gradients: Of a loss, how far the gradient of each parameter is off; else empty.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def loss(w, x):
            return jnp.mean((x @ w) ** 2)


        w, x = jnp.linspace(0.1, 1, 4), jnp.linspace(-1, 0.5, 8).reshape(2, 4)
        report = halfstep.debug.compare(loss, "bf16")(w, x)
        assert isinstance(report, halfstep.debug.Comparison)
        assert 0 < report.results.error < 0.01
        assert report.gradient.cosine > 0.999
        ```
    """

    policy: str
    results: Distance
    sites: tuple[Deviation, ...] = dataclasses.field(repr=False)
    gradients: tuple[GradientDeviation, ...] = dataclasses.field(repr=False)

    @property
    def worst(self) -> tuple[Deviation, ...]:
        """The sites that add error, those that add most first."""
        found = [site for site in self.sites if site.added > 0]
        return tuple(sorted(found, key=lambda site: (-site.added, -site.there)))

    @property
    def gradient(self) -> Distance:
        """Error and cosine of all gradients together."""
        return distance([one.sums for one in self.gradients])

    def __str__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        return _html(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "policy": self.policy,
            "results": self.results._asdict(),
            "sites": [site.to_dict() for site in self.sites],
            "gradient": self.gradient._asdict() if self.gradients else None,
            "gradients": [one.to_dict() for one in self.gradients],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the errors in the order of a run, and those of the gradients, into a PNG.

        Args:
            path: The file. Needs `halfstep[plot]`.
        """
        title = f"{self.policy} beside float32"
        plot(title, self.sites, self.worst, self.gradients, path)


def share(value: float) -> str:
    """An error for people: `0.57 %`."""
    if value == float("inf"):
        return "not finite"
    return f"{100 * value:.0f} %" if value >= 1 else f"{100 * value:.2g} %"


def _headline(report: Comparison) -> str:
    """How far off everything is."""
    parts = [f"results are off by {share(report.results.error)}"]
    if report.gradients:
        gradient = report.gradient
        parts.append(f"gradients by {share(gradient.error)} (cosine {_cosine(gradient.cosine)})")
    return f"{report.policy} beside float32, {len(report.sites)} sites: {', '.join(parts)}"


def _tables(report: Comparison) -> list[tuple[str, Sequence[tuple[str, bool]], list[list[str]]]]:
    """Captions, headings and rows."""
    made = []
    if report.worst:
        rows = [_site(site) for site in report.worst[:_SHOWN]]
        made.append(("Where error is added, most first:", _SITES, rows))
    if report.gradients:
        order = sorted(report.gradients, key=lambda one: -one.error)[:_SHOWN]
        rows = [[one.path, share(one.error), _cosine(one.cosine)] for one in order]
        made.append(("Gradients, the worst first:", _GRADIENTS, rows))
    return made


def _text(report: Comparison) -> str:
    """All of it."""
    parts = [_headline(report)]
    for caption, head, rows in _tables(report):
        lines = [[name for name, _ in head], *rows]
        parts.append(f"{caption}\n{aligned(lines, [number for _, number in head])}")
    return "\n\n".join(parts)


def _html(report: Comparison) -> str:
    """The same; what is not finite is red."""
    parts = [f"<p>{escaping.escape(_headline(report))}</p>"]
    for caption, head, rows in _tables(report):
        numbers = [number for _, number in head]
        cells = [list(zip(row, numbers, strict=True)) for row in rows]
        good = ["not finite" not in row for row in rows]
        parts += [f"<p>{caption}</p>", html_table(head, cells, good)]
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def _site(one: Deviation) -> list[str]:
    site = one.site
    name = site.path or f"{site.source.short} {site.op}"
    turn = ""
    if one.turn is not None:
        turn = f", most in turn {one.turn} of {len(one.turns)}"
    return [
        f"{name}{turn}",
        site.scope or ABSENT,
        one.dtype,
        share(one.there),
        share(one.before),
        _cosine(one.cosine),
    ]


def _cosine(value: float) -> str:
    return f"{value:.5f}"
