"""Findings: 16 bits that the user has written, and float32 that is stored."""

from collections.abc import Collection, Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from halfstep._autocast import Kind
from halfstep._explain.entry import name_of
from halfstep._explain.finding import ExplainFinding
from halfstep._explain.residuals import Residual
from halfstep._explain.walk import Step
from halfstep._program import Source

_SUMS = frozenset(
    {
        "cumlogsumexp",
        "cumprod",
        "cumsum",
        "psum",
        "psum_invariant",
        "reduce_prod",
        "reduce_scatter",
        "reduce_sum",
        "reduce_window_sum",
        "scatter-add",
        "scatter_add",
    }
)


def low_reductions(steps: list[Step], min_bytes: int) -> Iterator[ExplainFinding]:
    """Sums of 16-bit numbers, which the user has written in 16 bits."""
    for step in steps:
        if step.entry.name not in _SUMS or not step.node.ins:
            continue
        dtype = step.place.plan.graph.aval(step.node.ins[0]).dtype
        if not _is_half(dtype) or step.entry.bytes_in < min_bytes:
            continue
        yield ExplainFinding(
            "low-precision reduction",
            step.entry.source,
            step.entry.scope,
            f"`{step.entry.name}` adds up numbers that are written in {name_of(dtype)}",
            f"The sum is rounded to {name_of(dtype)} at every step: small terms are lost.",
            "sum in float32, `x.astype(jnp.float32)` before it; or leave the function in float32 "
            "and let autocast cast.",
            step.entry.bytes_in,
        )


def model_copies(
    steps: list[Step], parameter_bytes: int, min_bytes: int
) -> Iterator[ExplainFinding]:
    """Casts of most of the parameters to 16 bits, before they are used."""
    found = []
    for step in steps:
        if step.entry.name != "convert_element_type":
            continue
        (operand,) = step.node.ins
        is_parameter = not isinstance(operand, int) or step.place.producer(operand) is None
        if step.place.kind(step.index, operand) is not Kind.PARAM or not is_parameter:
            continue
        if _is_half(step.place.plan.graph.avals[step.node.outs[0]].dtype):
            found.append(step)
    copied = sum(step.entry.bytes_in * step.entry.count for step in found)
    if copied < min_bytes or 2 * copied < parameter_bytes:
        return
    for step in found:
        yield ExplainFinding(
            "model copy",
            step.entry.source,
            step.entry.scope,
            f"parameters are cast to {step.entry.outs[0].dtype} before they are used",
            "A copy of the model is kept from the first use to the last, and what is made of it, "
            "sums and norms too, runs in 16 bits.",
            "leave the cast out: autocast casts each parameter where it is used.",
            step.entry.bytes_in * step.entry.count,
        )


def stored_float32(
    found: Sequence[Residual], known: Collection[Source], min_bytes: int
) -> Iterator[ExplainFinding]:
    """Large float32 values that are kept for the backward pass, but for lines that are known."""
    for residual in found:
        if residual.type.dtype != "f32" or residual.type.bytes < min_bytes:
            continue
        if residual.of_argument or residual.is_constant or residual.source in known:
            continue
        yield ExplainFinding(
            "float32 residual",
            residual.source,
            residual.scope,
            f"`{residual.name}` makes {residual.type}, which is stored for the backward pass",
            "In the compute dtype it would take half of the memory.",
            "compute it again instead, with `jax.checkpoint` around it (or `islands=True`, if that "
            "is off); or cast what it is made of.",
            residual.type.bytes,
        )


def _is_half(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2
