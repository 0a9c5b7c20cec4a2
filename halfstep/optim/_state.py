"""What the compressed optimizers store."""

from typing import Any, NamedTuple

from jaxtyping import Array, Int32


class FlashState(NamedTuple):
    """The state of a compressed optimizer: plain arrays, in trees like that of the parameters.

    A leaf of a moment is a `quant.Quantized` (codes and scales), or a float32 array for parameters
    that are small or were asked to be kept, or `None` where there is nothing to store.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    """How many steps have been applied."""
    low: Any
    """The bits that bfloat16 parameters lack: int8 for a master of 24 bits, int16 for one of 32."""
    first: Any
    """First moments, or momenta."""
    second: Any
    """Second moments."""
