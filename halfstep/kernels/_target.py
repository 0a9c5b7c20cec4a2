"""Find out which GPU a program is lowered for: kernels differ between generations.

JAX tells a lowering rule the platform but not the generation. The devices are known where a program
is compiled for devices, present or described; they are not where it is exported. `preflight`
exports, and says with `compiling_for` what the program will be compiled for.
"""

import contextlib
import dataclasses
from collections.abc import Generator
from contextvars import ContextVar

import jax
from jax.interpreters import mlir
from jax.sharding import Mesh

Capability = tuple[int, int]
"""A compute capability of NVIDIA's: `(9, 0)` for Hopper."""


@dataclasses.dataclass
class Told:
    """The GPU that an export is for.

    Attributes:
        capability: Its compute capability; `None` if it is not a GPU.
        asked: Whether the program depends on it.
    """

    capability: Capability | None
    asked: bool = False


_told: ContextVar[Told | None] = ContextVar("halfstep_target", default=None)


@contextlib.contextmanager
def compiling_for(capability: Capability | None) -> Generator[Told, None, None]:
    """Say which GPU programs that are exported in this block are for.

    Args:
        capability: The compute capability; `None` for other accelerators.
    """
    told = Told(capability)
    token = _told.set(told)
    try:
        yield told
    finally:
        _told.reset(token)


def depends_on_generation() -> None:
    """Note that the program which is exported now is lowered differently for other GPUs."""
    told = _told.get()
    if told is not None:
        told.asked = True


def capability_of(ctx: mlir.LoweringRuleContext) -> Capability | None:
    """Return the compute capability that a lowering is for, or `None` if nothing says it.

    Args:
        ctx: The context of a lowering rule for CUDA.
    """
    told = _told.get()
    if told is not None:
        told.asked = True
        return told.capability
    if ctx.module_context.lowering_parameters.for_export:
        # The lowering has devices, but those of this machine, which the program is not for.
        return None
    context = ctx.module_context.axis_context
    devices = getattr(context, "device_assignment", None)
    mesh = getattr(context, "mesh", None)
    if devices is None and isinstance(mesh, Mesh):
        devices = list(mesh.devices.flat)
    if devices:
        return _parsed(devices[0])
    return _parsed(jax.devices()[0]) if jax.default_backend() == "gpu" else None


def _parsed(device: object) -> Capability | None:
    major, dot, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None
