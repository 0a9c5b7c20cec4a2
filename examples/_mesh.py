"""Processes and meshes: where a run is, and which part of it is where."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P


@contextlib.contextmanager
def processes(coordinator: str | None, count: int, index: int) -> Iterator[None]:
    """Be one of several processes, or the only one if there is no coordinator.

    Args:
        coordinator: `address:port` of process 0, which listens there and nowhere else.
        count: How many processes there are.
        index: Which of them this is.
    """
    if coordinator is None:
        yield
        return
    jax.distributed.initialize(
        coordinator,
        count,
        index,
        coordinator_bind_address=coordinator if index == 0 else None,
        cluster_detection_method="deactivate",
        initialization_timeout=60,
        heartbeat_timeout_seconds=20,
    )
    try:
        yield
    except BaseException:
        # The others learn of it at once, while a regular end would wait for them.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    jax.distributed.shutdown()


def make_mesh(fsdp: int) -> Mesh:
    """All devices: `fsdp` of them share one copy of the parameters, `data` is how many copies."""
    devices = jax.device_count()
    if devices % fsdp:
        raise SystemExit(f"--fsdp must divide the {devices} devices; got {fsdp}")
    return jax.make_mesh((devices // fsdp, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def rows(mesh: Mesh) -> NamedSharding:
    """How a batch is spread: each device takes its examples."""
    return NamedSharding(mesh, P(("data", "fsdp")))


def shard_params(shapes: Any, mesh: Mesh) -> Any:
    """The shapes of parameters with a sharding each: their longest axis over `fsdp`, if it fits."""
    parts = mesh.shape["fsdp"]

    def of(leaf: Any) -> jax.ShapeDtypeStruct:
        spec: list[str | None] = [None] * leaf.ndim
        # Small ones are everywhere: to gather them would cost more than to keep them.
        if leaf.ndim > 1:
            axis = int(np.argmax(leaf.shape))
            spec[axis] = "fsdp" if leaf.shape[axis] % parts == 0 else None
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(of, shapes)


def everywhere(shapes: Any, mesh: Mesh) -> Any:
    """For each leaf that it is on every device."""
    return jax.tree.map(lambda _: NamedSharding(mesh, P()), shapes)
