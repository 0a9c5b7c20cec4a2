"""Describe the operations of a function: what is known about each, and how types are written."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfstep._base import dtype_name
from halfstep._program import Source

# Short names, as recipes write them.
_FEW_BITS = MappingProxyType(
    {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1"}
)


@dataclasses.dataclass(frozen=True)
class Typed:
    """The type of a value as it will be when the function runs."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def typed(aval: object, dtype: np.dtype | None = None) -> Typed:
    """Return the type of a value, in another dtype if one is given."""
    held = getattr(aval, "dtype", None) if dtype is None else dtype
    shape = tuple(getattr(aval, "shape", ()))
    # Tokens, which order effects, have neither a dtype nor a shape.
    if held is None:
        return Typed(str(aval), shape, 0)
    # Rounded up to whole bytes: elements may have 4 bits.
    return Typed(name_of(held), shape, -(-math.prod(shape) * _bits(held) // 8))


def _bits(dtype: Any) -> int:
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    return 8 * dtype.itemsize if is_key else jax.dtypes.itemsize_bits(dtype)


def name_of(dtype: Any) -> str:
    """Return the short name of a dtype, even if NumPy does not know it, such as a key's."""
    try:
        name = dtype_name(dtype)
    except TypeError:
        return str(dtype)
    return _FEW_BITS.get(name, name)


def is_float(dtype: Any) -> bool:
    """Return whether a dtype is one of real floating-point numbers."""
    return jnp.issubdtype(dtype, jnp.floating)


@dataclasses.dataclass(frozen=True)
class ExplainEntry:
    """One operation of a function, as it will run.

    Attributes:
        name: JAX's name of the primitive.
        source: The line of the user's code that it comes from: `file`, `line`, `function`.
        scope: The `jax.named_scope`s that it is in, with `/` between them.
        within: The loops, branches and calls that it is in, outermost first.
        ins: Dtype and shape of its operands.
        outs: Dtype and shape of its results.
        rule: How its precision is decided: compute, float32, widest, follow or as traced.
        reason: Why it runs in the dtype it runs in.
        by: The policy's rule that has decided; empty if it was the table of operations.
        island: The number of the float32 island that it is in, which is recomputed for the gradient
            instead of stored; `None` if it is in none.
        count: How often it runs in one call. A `while` loop is counted as one iteration.
        flops: The FLOPs of one run.
        is_contraction: Whether it is a dot or a convolution.
        largest: The largest magnitude in a contraction's result; only with `values=True`.
        parameter: The parameter that a contraction multiplies, `params/up`; empty if there is
            none, or if it is not known.
        in_f8: Whether a contraction multiplies numbers of 8 or 4 bits.
        refusal: Why the policy's recipe leaves a contraction out, or does not multiply it in 8 or
            4 bits; empty otherwise.
        inside_flops: FLOPs of the contractions in functions that the operation runs as they are
            written, such as the solvers of `custom_linear_solve` and the kernels of `pallas_call`,
            by dtype. A kernel counts as often as its grid says, and a loop of unknown length as one
            iteration.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        report = halfstep.explain(lambda w, x: jnp.sum(x @ w), "bf16")(jnp.eye(4), jnp.eye(4))
        product, total = report.operations
        assert (product.name, product.dtypes) == ("dot_general", "bf16 -> bf16")
        assert (total.name, total.dtypes, total.rule) == ("reduce_sum", "f32 -> f32", "float32")
        ```
    """

    name: str
    source: Source
    scope: str
    within: tuple[str, ...]
    ins: tuple[Typed, ...]
    outs: tuple[Typed, ...]
    rule: str
    reason: str
    by: str
    island: int | None
    count: int
    flops: int
    is_contraction: bool
    largest: float | None = None
    parameter: str = ""
    in_f8: bool = False
    refusal: str = ""
    inside_flops: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def bytes_in(self) -> int:
        """The bytes that one run reads."""
        return sum(value.bytes for value in self.ins)

    @property
    def bytes_out(self) -> int:
        """The bytes that one run writes."""
        return sum(value.bytes for value in self.outs)

    @property
    def dtypes(self) -> str:
        """The dtypes that go in and come out: `bf16 x f32 -> bf16`."""
        ins = [value.dtype for value in self.ins]
        outs = list(dict.fromkeys(value.dtype for value in self.outs))
        if not self.is_contraction:
            ins = list(dict.fromkeys(ins))
        elif len(set(ins[:2])) == 1:
            ins = ins[:1]
        else:
            ins = ins[:2]
        return f"{' x '.join(ins) or '()'} -> {', '.join(outs) or '()'}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return {
            "name": self.name,
            "source": dataclasses.asdict(self.source),
            "scope": self.scope,
            "within": list(self.within),
            "ins": list(map(str, self.ins)),
            "outs": list(map(str, self.outs)),
            "rule": self.rule,
            "reason": self.reason,
            "by": self.by,
            "island": self.island,
            "count": self.count,
            "flops": self.flops,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "is_contraction": self.is_contraction,
            "largest": self.largest,
            "parameter": self.parameter,
            "in_f8": self.in_f8,
            "refusal": self.refusal,
            "inside_flops": dict(self.inside_flops),
        }
