"""Report a comparison: errors of sites and gradients, as text, HTML and a plot."""

import dataclasses
import html as escaping
import math
import os
from collections.abc import Sequence
from typing import Any

from halfstep._base import ABSENT, Report, aligned, figure_of, html_table
from halfstep.debug._compare.added_error import gain
from halfstep.debug._compare.distance import Distance, distance
from halfstep.debug._instrument.site import Site

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
_LINE, _JUMP = "#1565c0", "#d32f2f"
# How many sites are named and how many gradients are drawn: as many as there is room for.
_NAMED, _BARS = 8, 30


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far the value of a site is from its value in float32.

    Attributes:
        site: The site.
        dtype: The dtype in which the policy holds the value.
        error: The norm of the difference, relative to the norm in float32; infinite if an element
            is finite in one value and not in the other.
        cosine: The cosine between both values.
        before: The largest error among the sites that it is computed from; in a loop, in iteration
            `turn`.
        turns: For a site in a loop, the error in each iteration.
        turn: For a site in a loop, the index in `turns` of the iteration that adds the most error.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def f(x):
            return jnp.tanh(x + 1000.0 - 1000.0)


        report = halfstep.debug.compare(f, "bf16,op:*=compute", sites="ops")(jnp.full(4, 0.3))
        worst = report.worst[0]
        assert isinstance(worst, halfstep.debug.Deviation)
        assert (worst.site.op, worst.dtype) == ("sub", "bf16")
        assert worst.error > 0.5 and worst.before < 0.01
        ```
    """

    site: Site
    dtype: str
    error: float
    cosine: float
    before: float
    turns: tuple[float, ...] = ()
    turn: int | None = None

    @property
    def there(self) -> float:
        """The error where the site adds the most: in iteration `turn`, or else overall."""
        return self.error if self.turn is None else self.turns[self.turn]

    @property
    def added(self) -> float:
        """How much error this site adds to the error of its inputs; at 100 %, all is lost."""
        return gain(self.there, self.before)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {**dataclasses.asdict(self), "site": self.site.to_dict(), "added": self.added}


@dataclasses.dataclass(frozen=True)
class GradientDeviation:
    """How far the gradient of a parameter is from its gradient in float32.

    Attributes:
        path: The path of the parameter.
        sums: The sums that `error` and `cosine` are computed from.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def loss(params, x):
            return x @ params["scale"] + params["offset"]


        params = {"scale": jnp.ones(4), "offset": jnp.float32(0)}
        report = halfstep.debug.compare(loss, "bf16")(params, jnp.full(4, 0.1))
        errors = {one.path: one.error for one in report.gradients}
        assert 0 < errors["scale"] < 0.01 and errors["offset"] == 0
        ```
    """

    path: str
    sums: tuple[float, ...] = dataclasses.field(repr=False)

    @property
    def error(self) -> float:
        """The norm of the difference, relative to the norm in float32."""
        return distance([self.sums]).error

    @property
    def cosine(self) -> float:
        """The cosine between both gradients."""
        return distance([self.sums]).cosine

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"path": self.path, "error": self.error, "cosine": self.cosine}


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Report):
    """Where a policy departs from float32.

    `print(report)` shows where error is added, most first, and the gradients; a notebook shows the
    same as HTML.

    Attributes:
        policy: The policy, as a string.
        results: Error and cosine of what the function returns.
        sites: All sites that were computed, in the order of a run.
        gradients: For a loss, how far the gradient of each parameter is off; otherwise empty.

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
        """The sites that add error, most first."""
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
        """Return everything as plain values."""
        return {
            "policy": self.policy,
            "results": self.results._asdict(),
            "sites": [site.to_dict() for site in self.sites],
            "gradient": self.gradient._asdict() if self.gradients else None,
            "gradients": [one.to_dict() for one in self.gradients],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the errors of sites, in the order of a run, and of gradients into a PNG file.

        Args:
            path: The file. Needs `halfstep[plot]`.
        """
        title = f"{self.policy} compared with float32"
        draw_comparison(title, self.sites, self.worst, self.gradients, path)


def share(value: float) -> str:
    """Format an error, such as `0.57 %`."""
    if value == float("inf"):
        return "not finite"
    return f"{100 * value:.0f} %" if value >= 1 else f"{100 * value:.2g} %"


def _headline(report: Comparison) -> str:
    """Say how far off everything is."""
    parts = [f"results are off by {share(report.results.error)}"]
    if report.gradients:
        gradient = report.gradient
        parts.append(f"gradients by {share(gradient.error)} (cosine {_cosine(gradient.cosine)})")
    return f"{report.policy} compared with float32, {len(report.sites)} sites: {', '.join(parts)}"


def _tables(report: Comparison) -> list[tuple[str, Sequence[tuple[str, bool]], list[list[str]]]]:
    """Return the captions, headings and rows of the tables."""
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
    """Return the whole report as text."""
    parts = [_headline(report)]
    for caption, head, rows in _tables(report):
        lines = [[name for name, _ in head], *rows]
        parts.append(f"{caption}\n{aligned(lines, [number for _, number in head])}")
    return "\n\n".join(parts)


def _html(report: Comparison) -> str:
    """Return the whole report as HTML; rows that are not finite are red."""
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
        turn = f", most in iteration {one.turn} of {len(one.turns)}"
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


def draw_comparison(
    title: str,
    sites: Sequence[Deviation],
    worst: Sequence[Deviation],
    gradients: Sequence[GradientDeviation],
    path: str | os.PathLike[str],
) -> None:
    """Draw a comparison into a file.

    Args:
        title: The name of the comparison.
        sites: The sites, in the order of a run.
        worst: The sites that add error, most first.
        gradients: For a loss, how far the gradient of each parameter is off.
        path: The file.
    """
    figure = figure_of("a comparison")
    panels = 1 + bool(gradients)
    figure.set_size_inches(5.4, 4.6 * panels)
    # Each part has its own layout: long names of parameters do not make the curve narrow.
    parts = figure.subfigures(panels, 1, squeeze=False)[:, 0]
    parts[0].suptitle(title, fontsize=10)
    _draw_sites(parts[0].add_subplot(), sites, worst)
    if gradients:
        _draw_gradients(parts[1].add_subplot(), gradients)
    figure.savefig(path, dpi=150)


def _points(site: Deviation) -> tuple[float, ...]:
    return site.turns or (site.error,)


def _draw_sites(axes: Any, sites: Sequence[Deviation], worst: Sequence[Deviation]) -> None:
    # Arguments without error are left out: they are the same in the policy and in float32.
    shown = [site for site in sites if site.error or not site.site.path]
    ends, values = [], []
    for site in shown:
        values += _points(site)
        ends.append(len(values))
    finite = [value for value in values if math.isfinite(value) and value > 0]
    floor, top = min(finite, default=1e-8), max(finite, default=1.0)

    def height(value: float) -> float:
        # A logarithmic axis has no infinity and no zero: these are drawn above everything and at
        # the bottom.
        return 3 * top if not math.isfinite(value) else max(value, floor)

    axes.plot(range(len(values)), [height(value) for value in values], color=_LINE, lw=1)
    bad = [at for at, value in enumerate(values) if not math.isfinite(value)]
    axes.scatter(bad, [3 * top] * len(bad), color=_JUMP, marker="x", s=18, zorder=3)
    # By identity: two different sites may have equal numbers.
    positions = {id(site): end for site, end in zip(shown, ends, strict=True)}
    names = []
    for number, site in enumerate(worst[:_NAMED], 1):
        points = _points(site)
        turn = site.turn or 0
        at = positions[id(site)] - len(points) + turn
        axes.scatter([at], [height(points[turn])], color=_JUMP, s=22, zorder=4)
        axes.annotate(
            str(number),
            (at, height(points[turn])),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=10,
            color=_JUMP,
        )
        scope = f" in {site.site.scope}" if site.site.scope else ""
        names.append(f"{number}  {site.site.path or site.site.source.short} {site.site.op}{scope}")
    axes.set_yscale("log")
    axes.margins(y=0.1)
    axes.set_xlabel("values in the order of a run; x: not finite")
    axes.set_ylabel("relative error")
    if names:
        axes.text(
            0, -0.24, "most error is added at\n" + "\n".join(names), transform=axes.transAxes,
            va="top", fontsize=10,
        )  # fmt: skip
    axes.grid(alpha=0.3)


def _draw_gradients(axes: Any, gradients: Sequence[GradientDeviation]) -> None:
    order = sorted(gradients, key=lambda one: -one.error)[:_BARS]
    finite = [one.error for one in order if math.isfinite(one.error)]
    top = max(finite, default=1.0) or 1.0
    lengths = [one.error if math.isfinite(one.error) else 1.5 * top for one in order]
    colors = [_LINE if math.isfinite(one.error) else _JUMP for one in order]
    axes.barh(range(len(order)), lengths, color=colors)
    axes.set_yticks(range(len(order)), [one.path for one in order], fontsize=10)
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlabel("relative error of gradients; red: not finite")
    axes.grid(alpha=0.3, axis="x")
