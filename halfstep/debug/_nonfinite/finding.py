"""The first value that is not finite: what, where, out of what, and what to do."""

import dataclasses
import html as escaping
import math
from typing import Any

import numpy as np

from halfstep._base import Report
from halfstep._program import Constant
from halfstep.debug._instrument.ancestors import Parents
from halfstep.debug._instrument.layout import Layout
from halfstep.debug._instrument.site import Site
from halfstep.debug._instrument.stats import Column, Range, range_of
from halfstep.debug._nonfinite.advice import advice, which_of
from halfstep.debug._nonfinite.origin import Origin, turns_of


@dataclasses.dataclass(frozen=True)
class Operand:
    """What an operation was given.

    Attributes:
        site: Where the value was made; `None` for a number that is written into the program.
        range: Its numbers, over all turns of a loop.
        value: A number that is written into the program.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        found = halfstep.debug.first_nonfinite(lambda x: 1.0 / x, jnp.array([4.0, 0.0]))
        number, x = found.operands
        assert isinstance(x, halfstep.debug.Operand)
        assert number.site is None and number.value == 1
        assert x.site.op == "argument" and x.range.zeros == 1
        ```
    """

    site: Site | None
    range: Range | None
    value: float | None = None

    def __str__(self) -> str:
        if self.site is None:
            return f"the constant {self.value:g}"
        return f"{self.site}: {self.range}"


@dataclasses.dataclass(frozen=True, repr=False)
class NonFinite(Report):
    """Where values that are not finite began.

    `print(found)` says it in a few lines.

    Attributes:
        site: The first operation whose result is not finite while its operands are.
        kind: `"nan"`, or `"inf"`.
        count: How many elements are not finite.
        total: Of how many, in one turn and on one shard.
        turns: The turn of each loop around it.
        shard: The shard of the `shard_map` around it, counted through; `None` if there is none.
        operands: What it was given.
        between: The operations between what was recorded before it and `site`, of which one made
            it; empty if each was recorded.
        nan: Where it became NaN, if it was infinite at first.
        chain: The operations on the way from there to a result.
        reaches: Whether anything that is not finite reaches a result or a check of one. If not, it
            is masked, and harmless.
        advice: What to do.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        found = halfstep.debug.first_nonfinite(lambda x: jnp.log(x - 1), jnp.ones(3))
        assert isinstance(found, halfstep.debug.NonFinite)
        assert (found.site.op, found.kind, found.count) == ("log", "inf", 3)
        assert found.reaches and found.operands[0].range.zeros == 3
        assert str(found).startswith("an infinity in log, f32[3]")
        ```
    """

    site: Site
    kind: str
    count: int
    total: int
    turns: tuple[int, ...]
    shard: int | None
    operands: tuple[Operand, ...]
    between: tuple[str, ...]
    nan: Site | None
    chain: tuple[Site, ...]
    reaches: bool
    advice: str

    @property
    def place(self) -> str:
        """The pass, and the loops, branches and shard that it is in."""
        turns = iter(self.turns)
        within = [
            f"turn {next(turns)} of {label}" if label in self.site.loops else label
            for label in self.site.within
        ]
        parts = [self.site.pass_name, *within]
        if self.shard is not None:
            parts.append(f"shard {self.shard}")
        return ", ".join(parts)

    def __str__(self) -> str:
        name = "NaN" if self.kind == "nan" else "an infinity"
        site = self.site
        if site.path:
            head = f"{name} in the argument {site.path}, {site.type}"
        else:
            op = ", ".join(self.between) or site.op
            head = f"{name} in {op}, {site.type}, at {site.source}"
        lines = [head, f"  {self.place}: {self.count} of {self.total} elements"]
        if site.scope:
            lines.append(f"  scope {site.scope}")
        lines += [f"  operand {n}: {operand}" for n, operand in enumerate(self.operands)]
        if self.nan is not None:
            lines.append(f"  became NaN in {self.nan}, {self.nan.pass_name}")
        if not self.reaches:
            lines.append("  it reaches no result and no check of one: something masks it")
        return "\n".join([*lines, f"  {self.advice}"])

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            **self.site.to_dict(),
            "kind": self.kind,
            "count": self.count,
            "total": self.total,
            "turns": list(self.turns),
            "shard": self.shard,
            "between": list(self.between),
            "operands": [str(operand) for operand in self.operands],
            "nan": None if self.nan is None else self.nan.to_dict(),
            "chain": [site.to_dict() for site in self.chain],
            "reaches": self.reaches,
            "advice": self.advice,
        }

    def _repr_html_(self) -> str:
        return f'<pre style="overflow-x:auto">{escaping.escape(str(self))}</pre>'


def finding(layout: Layout, rows: np.ndarray, found: Origin) -> NonFinite:
    """What is known about where it began."""
    row, site = rows[found.row], layout.sites[found.row]
    turns = turns_of(layout, rows, found.row)
    parents = Parents(layout)
    between = parents.between(found.row)
    operands = []
    for value in parents.operands(found.row, tuple(map(float, turns))):
        if isinstance(value, Constant):
            operands.append(Operand(None, None, float(np.asarray(value.value).flat[0])))
        else:
            is_later = turns_of(layout, rows, value) > turns
            operands.append(Operand(layout.sites[value], range_of(rows[value], finite=is_later)))
    kind = "nan" if math.isnan(row[Column.ABSMAX]) else "inf"
    shard = int(row[Column.SHARD])
    constant = any(o.value is not None and not math.isfinite(o.value) for o in operands)
    ranges = [operand.range for operand in operands if operand.range]
    return NonFinite(
        site=site,
        kind=kind,
        count=int(row[Column.BAD]),
        total=math.prod(site.type.shape),
        turns=turns,
        shard=None if shard < 0 else shard,
        operands=tuple(operands),
        between=tuple(between) if len(between) > 1 else (),
        nan=None if found.nan is None else layout.sites[found.nan],
        chain=tuple(layout.sites[number] for number in found.chain),
        reaches=found.reaches,
        advice=which_of(between)
        if len(between) > 1
        else advice(site, kind, ranges, constant=constant),
    )
