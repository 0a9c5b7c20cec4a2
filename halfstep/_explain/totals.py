"""What the operations of a function add up to."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from halfstep._explain.entry import ExplainEntry
from halfstep._explain.f8 import ExplainF8


@dataclasses.dataclass(frozen=True)
class ExplainTotals:
    """Totals of one forward pass and of what it stores.

    Attributes:
        contraction_flops: FLOPs of contractions by the dtype of their operands.
        low: Share of them at the compute dtype or in fewer bits; 1 if there are no contractions.
        other_flops: FLOPs of all that is no contraction.
        again_flops: Of these, what is computed again in the backward pass, in islands.
        islands: How many there are.
        casts: Conversions between dtypes that are added to the function's own.
        stored: Bytes kept for the backward pass by dtype, arguments and casts of them left out.
            `None` if the function cannot be differentiated.
        stored_casts: Bytes of casts and views of arguments that are kept, by dtype. Compilers may
            make them again instead.
        stored_float32: What the function as it is written would keep, by dtype, arguments and
            views of them left out.
        f8: How many contractions are in 8 or 4 bits, and why the others are not; `None` if the
            policy has no recipe.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        report = halfstep.explain(lambda w, x: jnp.sum(x @ w), "bf16")(jnp.eye(4), jnp.eye(4))
        assert report.totals.low == 1.0
        assert report.totals.contraction_flops == {"bf16": 2 * 4**3}
        ```
    """

    contraction_flops: Mapping[str, int]
    low: float
    other_flops: int
    again_flops: int
    islands: int
    casts: int
    stored: Mapping[str, int] | None
    stored_casts: Mapping[str, int] | None
    stored_float32: Mapping[str, int] | None
    f8: ExplainF8 | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON."""
        return dataclasses.asdict(self)


def contraction_flops(entries: Sequence[ExplainEntry]) -> dict[str, int]:
    """FLOPs of contractions by the dtype of their operands, the largest first."""
    total: dict[str, int] = {}
    for entry in entries:
        if entry.is_contraction:
            name = entry.dtypes.partition(" -> ")[0]
            total[name] = total.get(name, 0) + entry.flops * entry.count
        for name, count in entry.inside_flops.items():
            total[name] = total.get(name, 0) + count * entry.count
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def is_low(entry: ExplainEntry, compute: str) -> bool:
    """Whether a contraction is at the compute dtype, or in fewer bits."""
    return entry.in_f8 or {value.dtype for value in entry.ins[:2]} == {compute}


def other_flops(entries: Sequence[ExplainEntry], *, islands: bool = False) -> int:
    """FLOPs of all else, or of what is in islands."""
    return sum(
        entry.flops * entry.count
        for entry in entries
        if not entry.is_contraction and (not islands or entry.island is not None)
    )
