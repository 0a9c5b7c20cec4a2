"""Describe number formats: their names, their limits, and which 16-bit format "half" means."""

import contextlib
import dataclasses
import difflib
from collections.abc import Generator, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jax.typing
import numpy as np

DTypeLike: TypeAlias = jax.typing.DTypeLike
"""A dtype, a scalar type such as `jnp.bfloat16`, or a name such as `"bf16"`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """The facts about one floating-point format.

    Attributes:
        name: Short name, as policies write it.
        dtype: The NumPy dtype.
        aliases: Other names that mean the same dtype.

    Example:
        ```python
        import halfstep

        f16 = halfstep.FORMATS["f16"]
        assert (f16.bits, f16.mantissa_bits, f16.max) == (16, 10, 65504)
        assert f16.eps == 2**-10
        ```
    """

    name: str
    dtype: np.dtype
    aliases: tuple[str, ...]

    @property
    def bits(self) -> int:
        """Bits of storage for one number."""
        return int(jnp.finfo(self.dtype).bits)

    @property
    def mantissa_bits(self) -> int:
        """Stored bits of the significand, without the implicit leading one."""
        return int(jnp.finfo(self.dtype).nmant)

    @property
    def max(self) -> float:
        """Largest finite number."""
        return float(jnp.finfo(self.dtype).max)

    @property
    def tiny(self) -> float:
        """Smallest positive normal number."""
        return float(jnp.finfo(self.dtype).tiny)

    @property
    def smallest(self) -> float:
        """Smallest positive number, subnormals included: half of it rounds to zero."""
        return float(jnp.finfo(self.dtype).smallest_subnormal)

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger number; rounding errs by at most half of it."""
        return float(jnp.finfo(self.dtype).eps)


def _table() -> Mapping[str, Format]:
    rows = (
        Format(name="bf16", dtype=np.dtype(jnp.bfloat16), aliases=("bfloat16",)),
        Format(name="f16", dtype=np.dtype(np.float16), aliases=("float16", "fp16")),
        Format(name="f32", dtype=np.dtype(np.float32), aliases=("float32", "fp32", "full")),
        Format(name="f64", dtype=np.dtype(np.float64), aliases=("float64", "fp64")),
    )
    return MappingProxyType({row.name: row for row in rows})


FORMATS: Mapping[str, Format] = _table()
"""The formats a policy can name, by short name.

```python
import halfstep

assert halfstep.FORMATS["f16"].max == 65504
assert halfstep.FORMATS["bf16"].eps == 2**-7
```
"""

_BY_DTYPE: Mapping[np.dtype, Format] = MappingProxyType(
    {row.dtype: row for row in FORMATS.values()}
)
_BY_NAME: Mapping[str, Format] = MappingProxyType(
    {name: row for row in FORMATS.values() for name in (row.name, *row.aliases)}
)

# A JAX user context is thread-local and part of every jit cache key: a function traced under
# "f16" is never reused under "bf16", which a module variable or a contextvar would allow.
_HALF = jax.make_user_context(np.dtype(jnp.bfloat16))


def half_dtype() -> np.dtype:
    """Return the dtype that "half precision" means: bfloat16, or the one set by `half_precision`.

    Example:
        ```python
        import halfstep

        assert halfstep.half_dtype().name == "bfloat16"
        with halfstep.half_precision("f16"):
            assert halfstep.half_dtype().name == "float16"
        ```
    """
    return _HALF.value


@contextlib.contextmanager
def half_precision(dtype: DTypeLike) -> Generator[np.dtype, None, None]:
    """Make "half precision" mean `dtype` inside this context.

    The setting is part of JAX's trace context, so a jitted function is traced anew for each value.

    Args:
        dtype: `"bf16"` or `"f16"`.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        with halfstep.half_precision("f16"):
            assert halfstep.cast_to_half_precision(jnp.ones(3)).dtype == jnp.float16
        assert halfstep.cast_to_half_precision(jnp.ones(3)).dtype == jnp.bfloat16
        ```
    """
    resolved = parse_dtype(dtype)
    if _BY_DTYPE[resolved].bits != 16:
        raise ValueError(
            f"half precision is a 16-bit format; got {dtype_name(resolved)!r}. "
            'Write half_precision("bf16") or half_precision("f16").'
        )
    with _HALF(resolved):
        yield resolved


def dtype_name(dtype: DTypeLike) -> str:
    """Return the short name of a dtype, `"bf16"` for bfloat16; NumPy's name if it has none."""
    dtype = np.dtype(dtype)
    return _BY_DTYPE[dtype].name if dtype in _BY_DTYPE else dtype.name


def parse_dtype(dtype: Any) -> np.dtype:
    """Resolve a dtype or its name to one of the formats that can be cast to.

    Args:
        dtype: A dtype, a scalar type, or a name: `"bf16"`, `"float16"`, `"full"`, `"half"` ...

    Returns:
        The NumPy dtype.

    Raises:
        ValueError: If the format is unknown, or too narrow to be cast to without a scale.
    """
    # Strings first: NumPy has its own names, and its "half" is always float16.
    if isinstance(dtype, str):
        name = dtype.strip().lower()
        if name == "half":
            return half_dtype()
        if name in _BY_NAME:
            return _BY_NAME[name].dtype
        near = difflib.get_close_matches(name, [*_BY_NAME, "half"], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown format {dtype!r}; required one of {', '.join(map(repr, FORMATS))} "
            f"(or 'half', 'full', and NumPy's names).{hint}"
        )
    try:
        resolved = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        shown = repr(dtype) if len(repr(dtype)) < 40 else f"a {type(dtype).__name__}"
        raise ValueError(f"required a dtype or its name, got {shown}.") from error
    if resolved not in _BY_DTYPE:
        why = ""
        if jnp.issubdtype(resolved, jnp.floating):
            why = (
                " Formats below 16 bits need a scale next to each array, which a cast cannot carry."
            )
        raise ValueError(
            f"cannot cast to {resolved.name}; required one of {', '.join(map(repr, FORMATS))}.{why}"
        )
    return resolved


# JAX's own `promote_types` follows the user's promotion mode and raises under the strict one.
def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """Return the dtype itself if it holds every float32 (float64 and complex do), else float32."""
    dtype = np.dtype(dtype)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if narrow else dtype


def widest(dtypes: Iterable[np.dtype]) -> np.dtype:
    """Return the narrowest format that holds every number of all given formats."""
    distinct = set(dtypes)
    if len(distinct) == 1:
        return distinct.pop()
    # Not simply the dtype with the most bytes: neither of bfloat16 and float16 holds the other.
    return max((at_least_float32(dtype) for dtype in distinct), key=lambda dtype: dtype.itemsize)
