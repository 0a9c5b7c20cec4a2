"""Draw which device holds what, for `docs/sharding.md`: `python -m docs.generators.sharding`.

A flash state is placed on four host devices, and each array is asked where its parts lie.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import halfstep
from docs.generators._draw import Theme, bare, save_all
from halfstep import optim

DEVICES = 4
ROWS, COLUMNS, EXAMPLES = 1024, 512, 256
AXIS = "data"


def placed() -> list[tuple[str, jax.Array]]:
    """The arrays of a step: a batch, a weight and a bias with their state, and the loss scale."""
    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(AxisType.Auto,), devices=_devices())
    rows = NamedSharding(mesh, PartitionSpec(AXIS))
    whole = NamedSharding(mesh, PartitionSpec())
    params: Any = {
        "w": jax.device_put(jnp.ones((ROWS, COLUMNS)), rows),
        "b": jax.device_put(jnp.ones(COLUMNS), whole),
    }
    params, state = optim.flash_adamw(1e-3).prepare(params)
    first, second = state.first["w"], state.second["w"]
    scaling = jax.device_put(halfstep.DynamicLossScaling(), whole)
    return [
        ("batch", jax.device_put(jnp.ones((EXAMPLES, ROWS)), rows)),
        ("w", params["w"]),
        ("w, missing bits", state.low["w"]),
        ("w, momentum", first.codes),
        ("its scales", first.scale),
        ("w, 2nd moment", second.codes),
        ("its scales", second.scale),
        ("b", params["b"]),
        ("b, momentum", state.first["b"]),
        ("loss scale", scaling.loss_scaling),
    ]


def _devices() -> list[Any]:
    found = jax.devices()[:DEVICES]
    if len(found) < DEVICES:
        raise RuntimeError(
            f"{DEVICES} devices are required, and JAX has {len(found)}: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={DEVICES}"
        )
    return found


def held(array: jax.Array) -> list[tuple[float, float]]:
    """The part of its first axis that each device holds, from 0 to 1."""
    found = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        start, stop, _ = index[0].indices(array.shape[0]) if index else (0, 1, 1)
        size = array.shape[0] if array.ndim else 1
        found[device.id] = (start / size, stop / size)
    return [found[number] for number in sorted(found)]


def draw(figure: Figure, theme: Theme) -> None:
    axes: Axes = figure.subplots()
    arrays = placed()
    for place, (name, array) in enumerate(arrays):
        parts = held(array)
        everywhere = all(part == (0, 1) for part in parts)
        shade = theme.gray if everywhere else theme.blue
        for device, (start, stop) in enumerate(parts):
            left, bottom, width, height = device, -place, 0.86, 0.74
            axes.add_patch(
                Rectangle((left, bottom), width, -height, fill=False, edgecolor=theme.faint)
            )
            axes.add_patch(
                Rectangle(
                    (left, bottom - height * start), width, -height * (stop - start), color=shade
                )
            )
        dtype = {"bfloat16": "bf16", "float32": "f32"}.get(array.dtype.name, array.dtype.name)
        axes.text(-0.12, -place - 0.37, f"{name}, {dtype}", ha="right", va="center")
        size = max(shard.data.nbytes for shard in array.addressable_shards)
        said = f"{size / 2**10:,.0f} KiB" if size >= 2**10 else f"{size} B"
        axes.text(DEVICES + 0.8, -place - 0.37, said, ha="right", va="center")
    for device in range(DEVICES):
        axes.text(device + 0.43, 0.15, str(device), ha="center", va="bottom")
    axes.text(-0.12, 0.15, "device", ha="right", va="bottom")
    axes.text(DEVICES + 0.8, 0.15, "on each", ha="right", va="bottom")
    axes.set_xlim(-2.9, DEVICES + 0.85)
    axes.set_ylim(-len(arrays), 0.7)
    bare(axes)


PICTURES = {"sharding-devices": (draw, 4.6)}


def main() -> None:
    # Host devices, also where an accelerator is.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    save_all(PICTURES)


if __name__ == "__main__":
    main()
