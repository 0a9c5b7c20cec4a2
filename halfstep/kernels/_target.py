"""Find out which GPU a program is lowered for: kernels differ between generations.

JAX tells a lowering rule the platform but not the generation. The devices are known when a program
is compiled for devices, present or described, but not when it is exported. `preflight` exports, and
says with `compiling_for` which GPU the program will be compiled for.
"""

import contextlib
import dataclasses
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any

import jax
from jax.interpreters import mlir
from jax.sharding import Mesh

Capability = tuple[int, int]
"""A compute capability of NVIDIA's: `(9, 0)` for Hopper."""


@dataclasses.dataclass
class Told:
    """The GPU that an export is for.

    Attributes:
        capability: The compute capability of the GPU; `None` for other accelerators.
        asked: Whether the program depends on the capability.
    """

    capability: Capability | None
    asked: bool = False


_told: ContextVar[Told | None] = ContextVar("halfstep_target", default=None)


@contextlib.contextmanager
def compiling_for(capability: Capability | None) -> Generator[Told, None, None]:
    """Set the GPU that programs exported in this block are for.

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
    """Record that the program being exported is lowered differently for other GPUs."""
    told = _told.get()
    if told is not None:
        told.asked = True


def capability_of(ctx: mlir.LoweringRuleContext) -> Capability | None:
    """Return the compute capability that a lowering is for, or `None` if it is not known.

    Args:
        ctx: The context of a lowering rule for CUDA.
    """
    told = _told.get()
    if told is not None:
        told.asked = True
        return told.capability
    if ctx.module_context.lowering_parameters.for_export:
        # The lowering has devices, but they are this machine's, and the program is for others.
        return None
    context = ctx.module_context.axis_context
    devices = getattr(context, "device_assignment", None)
    mesh = getattr(context, "mesh", None)
    if devices is None and isinstance(mesh, Mesh):
        devices = list(mesh.devices.flat)
    if devices:
        return _parsed(devices[0])
    return _parsed(jax.devices()[0]) if jax.default_backend() == "gpu" else None


def is_divided(ctx: mlir.LoweringRuleContext) -> bool:
    """Return whether the compiler divides this program, so that shapes span all devices."""
    # JAX has two kinds of context: of a program that the compiler divides, and of `shard_map`.
    context: Any = ctx.module_context.axis_context
    if hasattr(context, "num_devices"):
        return context.num_devices > 1
    return set(context.manual_axes) != set(context.mesh.axis_names)


def _parsed(device: object) -> Capability | None:
    major, dot, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None
