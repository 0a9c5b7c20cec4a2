import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import halfstep
from halfstep._preflight.target.mesh import check_mesh, spread
from halfstep._preflight.target.targets import parse_target


@pytest.mark.parametrize(
    ("axes", "target"),
    [({}, "h100"), ({}, "tpu7x"), ({"data": 2}, "tpu7x"), ({"data": 8}, "h100:8"),
     ({"data": 64, "model": 4}, "h100:32x8"), ({"data": 256}, "v5e:16x16"),
     ({"data": 128}, "tpu7x:4x4x4"), ({"data": 1}, "h100"), ({}, "h100:1")],
)  # fmt: skip
def test_a_mesh_that_the_target_holds(axes: dict[str, int], target: str):
    check_mesh(axes, parse_target(target))


@pytest.mark.parametrize(
    ("axes", "target", "message"),
    [
        ({}, "h100:8", 'h100:8 has 8 devices, but no argument is sharded.*Write targets="h100"'),
        ({"data": 4}, "h100", r"mesh \{'data': 4\} has 4 devices, but h100 has 1.*\"h100:4\""),
        ({"data": 256}, "h100:8", 'has 256 devices, but h100:8 has 8.*"h100:32x8"'),
        ({"data": 1}, "h100:8", 'but h100:8 has 8.*"h100"'),
        ({"data": 4}, "v5e:4x4", 'but v5e:4x4 has 16.*"v5e:AxB"'),
        ({"data": 4}, "v5p:2x2x2", 'but v5p:2x2x2 has 8.*"v5p:AxBxC"'),
    ],
)
def test_a_mesh_of_another_size(axes: dict[str, int], target: str, message: str):
    with pytest.raises(halfstep.PreflightError, match=f"(?s){message}"):
        check_mesh(axes, parse_target(target))


def test_arguments_that_are_none_take_no_specification():
    """They have no arrays: the specifications of the arguments after them stay where they are."""
    args = (None, {"bias": None, "weight": np.zeros(8)}, np.zeros(8))
    found = spread((P(), {"bias": P("x"), "weight": P("data")}, None), args)
    assert found == [P("data"), None]
    assert spread((P(), P("data"), P("x")), args) == [P("data"), P("x")]
