"""Bound the time of a step from below: no run can be faster, and most are slower."""

import dataclasses
from collections.abc import Sequence

from halfstep._preflight.hlo.analysis import Analysis, Contraction
from halfstep._preflight.hlo.traffic import memory_floor_bytes
from halfstep._preflight.target.accelerators import Accelerator

ASSUMES = (
    "contractions at the data sheet's peak rate, everything else free; each kernel moves what "
    "cannot lie in the cache at the data sheet's bandwidth; conditionals take their costliest "
    "branch; communication, launches and the host take no time"
)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A lower bound on the time of a step. No run can be faster; most are a good deal slower.

    Attributes:
        compute_seconds: The time of all contractions at their peak rates.
        memory_seconds: The time to move all bytes that no cache can hold, at the peak bandwidth.
        uncounted: Contractions whose rate the target's data sheet does not give; they add no time.
        assumes: The assumptions of the bound.
    """

    compute_seconds: float
    memory_seconds: float
    uncounted: tuple[str, ...] = ()
    assumes: str = ASSUMES

    @property
    def bound_seconds(self) -> float:
        """The larger of the two: computing and moving data may overlap."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def limit(self) -> str:
        """The limiting resource: `"compute"` or `"memory"`."""
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


def roofline(analysis: Analysis, accelerator: Accelerator) -> Roofline:
    """Compute the bound of an optimized program on an accelerator."""
    seconds, uncounted = 0.0, []
    for contraction in analysis.contractions:
        rate = peak_rate(contraction, accelerator)
        if rate is None:
            uncounted.append(f"{contraction.lhs} x {contraction.rhs}")
        else:
            seconds += contraction.flops / rate
    moved = memory_floor_bytes(analysis.kernels, accelerator.cache_bytes)
    return Roofline(seconds, moved / accelerator.bandwidth, tuple(uncounted))


def peak_rate(contraction: Contraction, accelerator: Accelerator) -> float | None:
    """Return the highest rate of such a contraction on the accelerator, in FLOP/s."""
    # The faster of both formats counts: a mixed product may run in either, and the time is a lower
    # bound.
    rates = [
        rate
        for operand in (contraction.lhs, contraction.rhs)
        for rate in _rates(operand, accelerator)
    ]
    return max(rates, default=None)


def _rates(dtype: str, accelerator: Accelerator) -> Sequence[float]:
    peaks = accelerator.peak_flops
    if dtype.startswith("float8"):
        # Without fp8 units, operands are widened to 16 bits first.
        names = ("float8", "bfloat16", "float16")
    elif dtype == "float32":
        # Under JAX's default precision float32 operands are multiplied as TF32 on NVIDIA's tensor
        # cores, and as bfloat16 on a TPU.
        names = ("float32", "tf32") if accelerator.platform == "cuda" else ("bfloat16",)
    else:
        names = (dtype,)
    return [peaks[name] for name in names if name in peaks]
