"""Copies that differ are found, and named."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from halfstep.reliability import ReplicaError, replica_check


def mesh_of(*shape: int) -> jax.sharding.Mesh:
    return jax.make_mesh(
        shape, ("data", "fsdp")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape)
    )


def copies(array: np.ndarray, sharding: NamedSharding, bad: int | None, bit: int = 0) -> jax.Array:
    """An array each of whose shards is placed by itself; that of one device has a flipped bit."""
    shards = []
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        part = np.array(array[index])
        if device.id == bad:
            raw = part.view(np.uint8).reshape(-1)
            raw[bit // 8] ^= 1 << bit % 8
        shards.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


ARRAY = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32"])
def test_one_flipped_bit_is_named(dtype: str):
    array = ARRAY.astype(jnp.dtype(dtype))
    sharding = NamedSharding(mesh_of(4), P())
    state = {"good": copies(array, sharding, None), "w": [copies(array, sharding, 2, bit=13)]}
    message = r"copies differ after step 7: `w/0` on device 2 of process 0 \(data=2\)\. Go back"
    with pytest.raises(ReplicaError, match=message):
        replica_check(state, step=7)
    replica_check({"good": state["good"], "none": None, "name": "run", "x": jnp.ones(3)})


def test_a_part_of_an_array_and_two_copies():
    mesh = mesh_of(2, 2)
    divided = copies(ARRAY, NamedSharding(mesh, P("fsdp")), 3)
    # Two copies: nobody can say which is right.
    message = (
        r"`w` on device 1 of process 0 \(data=0, fsdp=1\), device 3 of process 0 \(data=1, fsdp=1\)"
    )
    with pytest.raises(ReplicaError, match=message):
        replica_check({"w": divided})
    everywhere = copies(ARRAY, NamedSharding(mesh, P()), 1)
    with pytest.raises(ReplicaError, match=r"`w` on device 1 of process 0 \(data=0, fsdp=1\)\."):
        replica_check({"w": everywhere})
    # No copies, nothing to compare.
    replica_check({"w": copies(ARRAY, NamedSharding(mesh, P("data", "fsdp")), 1)})


def test_many_are_counted():
    sharding = NamedSharding(mesh_of(4), P())
    state = {f"w{n}": copies(ARRAY, sharding, 0, bit=n) for n in range(7)}
    with pytest.raises(ReplicaError, match=r"`w4` on device 0 .* and 2 more arrays\. Go back"):
        replica_check(state)


def test_keys(getkey: Any):
    everywhere = NamedSharding(mesh_of(4), P())
    replica_check({"key": jax.device_put(getkey(), everywhere)})
