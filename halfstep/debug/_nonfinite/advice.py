"""What to do about a value that is not finite."""

from collections.abc import Sequence

import jax.numpy as jnp

from halfstep._base import parse_dtype
from halfstep.debug._instrument.site import Site
from halfstep.debug._instrument.stats import Range

_ROOTS = ("sqrt", "rsqrt", "cbrt", "pow")
_EXPONENTIALS = ("exp", "exp2", "expm1", "cosh", "sinh", "integer_pow", "square")
_CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
_SUMS = ("reduce_sum", "cumsum", "psum", "add_any", "add", "reduce_window_sum")


def advice(site: Site, kind: str, operands: Sequence[Range], *, constant: bool) -> str:
    """What to do, in a sentence or two.

    Args:
        site: Where it began.
        kind: `"nan"` or `"inf"`.
        operands: What it was made of.
        constant: Whether one of its operands is a number in the program that is not finite.
    """
    if site.path:
        return (
            "It is bad before anything is computed. Data: look at how it is read, and drop it. A "
            "parameter or a state: an earlier step has written it, so look at that one."
        )
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


def which_of(operations: Sequence[str]) -> str:
    """What to do if it may be one of several operations."""
    return (
        f"To know which of {', '.join(operations)} it is, call "
        "`halfstep.debug.first_nonfinite(step, ...)` with what this step was given, or record with "
        '`sites="ops"`.'
    )


def _largest(site: Site) -> str:
    return f"{float(jnp.finfo(parse_dtype(site.type.dtype)).max):.5g}"
