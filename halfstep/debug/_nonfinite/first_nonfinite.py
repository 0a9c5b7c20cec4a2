"""`first_nonfinite`: name the first operation with a non-finite result, its operands and a fix."""

import dataclasses
import html as escaping
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from halfstep._base import Report, checked, parse_dtype
from halfstep._program import Constant
from halfstep.debug._instrument.ancestors import Parents
from halfstep.debug._instrument.layout import Layout, instrument
from halfstep.debug._instrument.site import Site
from halfstep.debug._instrument.stats import Column, Range, range_of
from halfstep.debug._nonfinite.origin import NonFiniteOrigin, turns_of
from halfstep.debug._nonfinite.passes import search

_ROOTS = ("sqrt", "rsqrt", "cbrt", "pow")
_EXPONENTIALS = ("exp", "exp2", "expm1", "cosh", "sinh", "integer_pow", "square")
_CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
_SUMS = ("reduce_sum", "cumsum", "psum", "add_any", "add", "reduce_window_sum")


@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand of an operation.

    Attributes:
        site: Where the value was computed; `None` for a constant in the program.
        range: The numbers of the value, over all iterations of a loop.
        value: The value of a constant in the program.

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
    """Where non-finite values began.

    `print(found)` explains it in a few lines.

    Attributes:
        site: The first operation whose result is not finite while its operands are.
        kind: `"nan"`, or `"inf"`.
        count: How many elements are not finite.
        total: How many elements there are, in one iteration and on one shard.
        turns: The iteration of each loop around `site`.
        shard: The flat index of the shard in the `shard_map` around `site`; `None` outside one.
        operands: The operands of the operation.
        between: The candidates, if not every operation was recorded: the operations between the
            last recorded values and `site`. Otherwise empty.
        nan: Where the values became NaN, if they were infinite at first.
        chain: The operations on the way from `site` to a result. `first_nonfinite` leaves out
            operations that only pass a non-finite value on, as additions do.
        reaches: Whether anything that is not finite reaches a result or a check of a result. If
            not, it is masked and harmless.
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
        """The pass, loops, branches and shard that `site` is in."""
        turns = iter(self.turns)
        within = [
            f"iteration {next(turns)} of {label}" if label in self.site.loops else label
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
        """Return everything as plain values."""
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


@checked
def first_nonfinite(func: Callable[..., Any], *args: Any, **kwargs: Any) -> NonFinite | None:
    """Find the first operation whose result is not finite while its operands are.

    The function is compiled and run twice. The first run flags the values that show whether
    everything is finite. The second records numbers only near the place where non-finite values
    began, and computes nothing after it. Prints and other effects happen once. A function with
    effects inside loops, or with effects that return something, is run only once, with numbers of
    every operation's result, which takes much longer to compile. On a CPU, the programs are
    compiled without LLVM's optimizations, so that a value may differ from that of your own program
    by rounding.

    The search covers the forward pass, the backward pass and the update, inside `scan`,
    `while_loop`, `cond`, `jax.checkpoint` and `shard_map`, on all devices. It needs no callbacks to
    the host.

    An infinity or NaN that something masks (`jnp.where`) is ignored as long as another one reaches
    a result, or a check whether results are finite.

    Args:
        func: A loss, a gradient, or a whole training step; jitted or not.
        *args: The arguments of the function, with the batch for which it goes wrong.
        **kwargs: The same, by name.

    Returns:
        The operation, its place, its operands, and what to do; `None` if everything is finite.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def loss(scale, x):
            return jnp.sum(scale * jnp.sqrt(x))


        found = halfstep.debug.first_nonfinite(jax.grad(loss, argnums=1), 2.0, jnp.zeros(3))
        assert (found.site.op, found.site.stage) == ("div", "backward")
        assert found.count == 3
        ```
    """
    traced = instrument(func, args, kwargs, sites="ops", compute=None)
    recorded = search(traced)
    return None if recorded is None else finding(recorded.layout, recorded.rows, recorded.found)


def finding(layout: Layout, rows: np.ndarray, found: NonFiniteOrigin) -> NonFinite:
    """Describe where non-finite values began."""
    row, site = rows[found.row], layout.sites[found.row]
    turns = turns_of(layout, rows, found.row)
    parents = Parents(layout)
    # With `sites="scopes"`, several operations may lie between two sites, and any of them may be
    # the origin. Then all are named, and advice for a single operation would mislead.
    between = parents.between(found.row)
    operands = []
    for value in parents.operands(found.row, tuple(map(float, turns))):
        if isinstance(value, Constant):
            operands.append(Operand(None, None, float(np.asarray(value.value).flat[0])))
        else:
            # An operand that was bad only in a later iteration was finite when it was used.
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
        advice=_which_of(between)
        if len(between) > 1
        else _advice(site, kind, ranges, constant=constant),
    )


def _advice(site: Site, kind: str, operands: Sequence[Range], *, constant: bool) -> str:
    """Say what to do, in a sentence or two.

    Args:
        site: Where non-finite values began.
        kind: `"nan"` or `"inf"`.
        operands: The ranges of the operands.
        constant: Whether one of the operands is a constant in the program that is not finite.
    """
    if site.path:
        return (
            "It is bad before anything is computed. Data: look at how it is read, and drop it. A "
            "parameter or a state: an earlier step has written it, so look at that one."
        )
    # From the specific to the general; the first match wins. Advice that depends only on the dtype
    # comes after advice for an operation.
    few_bits = site.type.dtype in ("f16", "bf16") or site.type.bytes < 4
    narrow = site.type.dtype == "f16"
    has_zero = any(found.zeros > 0 for found in operands)
    rule = f'`halfstep.PrecisionRule("float32", op="{site.op}")`'
    if narrow and site.stage == "backward" and kind == "inf" and site.op in _CONTRACTIONS:
        return (
            "Gradients are too large for float16: with `DynamicLossScaling` the step is skipped "
            "and the scale halved; a scale that stays at its floor means that the loss itself is "
            "too large."
        )
    if site.op == "convert_element_type":
        return (
            f"The number is too large for {site.type.dtype} (largest {_largest(site)}): keep what "
            "makes it in float32 with a rule for its scope, or use bfloat16."
        )
    if site.op in _EXPONENTIALS and kind == "inf":
        where = f"keep it in float32: {rule}; " if few_bits else ""
        return f"Too large: {where}subtract the maximum first, as `jax.nn.softmax` does, or clip."
    if site.op in ("log", "log1p"):
        return (
            "The logarithm of zero or of a negative number: use `jax.nn.log_softmax` or "
            "`jax.nn.log_sigmoid`, or clip what it takes. An epsilon below the dtype's smallest "
            "number is zero."
        )
    if site.op in _ROOTS:
        return (
            "The root of a negative number, or its derivative at zero, which is infinite: add an "
            f"epsilon under the root that {site.type.dtype} can hold, or use `jnp.where` on what "
            "goes in, not only on what comes out."
        )
    if site.op == "div":
        what = "Zero over zero" if kind == "nan" else "A division by zero or by a tiny number"
        if site.stage == "backward":
            return (
                f"{what} in a derivative: replace what goes into the division, root or norm by "
                "`jnp.where` where it is zero, before it and not after."
            )
        eps = f" that {site.type.dtype} can hold" if few_bits else ""
        return f"{what}: add an epsilon to the denominator{eps}, or mask what goes in."
    if site.op in _CONTRACTIONS and kind == "inf":
        return (
            f"The product is too large for {site.type.dtype}: scale before it, not after it, use "
            "bfloat16, or let it accumulate in float32: "
            f'`halfstep.PrecisionRule("accumulate", op="{site.op}")`.'
        )
    if site.op in _SUMS and kind == "inf":
        return f"The sum is too large for {site.type.dtype}: sum in float32: {rule}."
    if site.op == "select_n" and constant:
        return (
            f"An infinity is written into the program, or a number that is infinite in "
            f"{site.type.dtype}: for a mask, use one that is finite there (-1e4 in float16), and "
            "mind rows that are masked as a whole."
        )
    if narrow and kind == "inf":
        return f"Too large for float16 (largest 65504): keep it in float32: {rule}."
    if has_zero and kind == "inf":
        return "One of its operands has zeros: replace them before it."
    return (
        f"Look at its operands; `halfstep.debug.compare` says whether it is finite in float32, and "
        f"{rule} keeps it there."
    )


def _which_of(operations: Sequence[str]) -> str:
    """Say what to do if the origin may be any of several operations."""
    return (
        f"To know which of {', '.join(operations)} it is, call "
        "`halfstep.debug.first_nonfinite(step, ...)` with what this step was given, or record with "
        '`sites="ops"`.'
    )


def _largest(site: Site) -> str:
    return f"{float(jnp.finfo(parse_dtype(site.type.dtype)).max):.5g}"
