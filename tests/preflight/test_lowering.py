from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import halfstep
from halfstep._base.calls import argument_names
from halfstep._preflight.compile.lowering import Program, lower

VECTOR = jax.ShapeDtypeStruct((8,), jnp.float32)


def double(x: Any) -> Any:
    return x * 2


def test_arrays_and_their_descriptions_give_one_program():
    described = lower(double, (VECTOR,), platform="cuda")
    for array in (jnp.ones(8), np.ones(8, np.float32)):
        assert lower(double, (array,), platform="cuda").fingerprint == described.fingerprint


def test_the_fingerprint_is_of_what_is_computed_not_of_where_it_is_written():
    def here(x: Any) -> Any:
        return x * 2

    def elsewhere(x: Any) -> Any:
        return x * 2

    def other(x: Any) -> Any:
        return x * 3

    def fingerprint(func: Any) -> str:
        return lower(func, (VECTOR,), platform="cuda").fingerprint

    assert fingerprint(here) == fingerprint(elsewhere)
    assert fingerprint(here) != fingerprint(other)


def test_what_is_no_array_is_constant():
    class Net(eqx.Module):
        weight: Any
        activation: Any
        depth: int = 3

    def step(net: Net, x: Any, scale: float, name: str, nothing: None) -> Any:
        assert name == "step"
        assert nothing is None
        for _ in range(net.depth):
            x = net.activation(net.weight * x) * scale
        return net, x

    net = Net(VECTOR, jax.nn.relu)
    program = lower(step, (net, VECTOR, 0.5, "step", None), platform="cuda")
    assert [leaf.name for leaf in program.leaves] == ["net/weight", "x"]


@pytest.mark.parametrize(
    "dtype", ["bool", "int4", "int8", "uint32", "bfloat16", "float8_e4m3fn", "complex64"]
)
def test_dtypes_and_their_bytes(dtype: str):
    x = jax.ShapeDtypeStruct((6, 3), jnp.dtype(dtype))
    program = lower(lambda x: x, (x,), platform="tpu")
    bits = {"bool": 8, "int4": 4, "int8": 8, "uint32": 32, "bfloat16": 16, "complex64": 64}
    assert program.leaves[0].bytes == 18 * bits.get(dtype, 8) // 8
    assert program.leaves[0].dtype == dtype


def test_keys():
    def step(key: Any) -> Any:
        return jax.random.split(key)[0], jax.random.normal(key, (4,))

    key = jax.eval_shape(lambda: jax.random.key(0))
    program = lower(step, (key,), platform="cuda", donate_argnums=(0,))
    assert program.leaves[0].bytes == 8
    assert program.donated == (0,)


def test_what_a_jitted_step_donates_is_donated():
    step = jax.jit(lambda params, batch: ({k: v + batch for k, v in params.items()}, batch),
                   donate_argnums=0)  # fmt: skip
    args = ({"a": VECTOR, "b": VECTOR}, VECTOR)
    assert lower(step, args, platform="cuda").donated == (0, 1)
    assert lower(step, args, platform="cuda", donate_argnums=(1,)).donated == (0, 1, 2)


def test_static_arguments_of_a_jitted_step():
    step = jax.jit(lambda n, x: x * n if n > 1 else x, static_argnums=0, donate_argnums=1)
    program = lower(step, (3, VECTOR), platform="cuda")
    assert [leaf.name for leaf in program.leaves] == ["x"]
    assert program.donated == (0,)


def test_donation_out_of_range():
    with pytest.raises(halfstep.PreflightError, match="positions of arguments, 0 to 0; got 1"):
        lower(double, (VECTOR,), platform="cuda", donate_argnums=(1,))


def sharded(spec: Any, **options: Any) -> Program:
    def step(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x * 2, P("data"))

    x = jax.ShapeDtypeStruct((1024, 16), jnp.float32)
    return lower(step, (x,), platform="tpu", shardings=(spec,), **options)


def test_specifications_over_a_mesh_without_devices():
    program = sharded(
        P("data"), mesh=AbstractMesh((64, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    )
    assert program.axes == (("data", 64), ("model", 4))
    assert program.leaves[0].bytes == 1024 * 16 * 4 // 64


def test_a_mesh_of_real_devices(mesh: jax.sharding.Mesh):
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def step(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("data")))

    program = lower(step, (x,), platform="cuda")
    assert program.axes == (("data", 4),)
    assert program.leaves[0].bytes == 8
    on_device = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("data")))
    assert lower(step, (on_device,), platform="cuda").axes == program.axes


def test_one_specification_for_a_whole_argument():
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    args = ({"a": VECTOR, "b": {"c": VECTOR}}, VECTOR)
    program = lower(lambda p, x: x, args, platform="cuda", mesh=mesh, shardings=(P("data"), None))
    assert [leaf.bytes for leaf in program.leaves] == [8, 8, 32]


def test_shardings_of_another_tree():
    with pytest.raises(halfstep.PreflightError, match="must be a prefix of the tree of `args`"):
        lower(double, (VECTOR,), platform="cuda", shardings=(P(), P()),
              mesh=AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,)))  # fmt: skip


def test_too_few_arguments():
    match = r"`args` must be the arguments of the step, \(x\).*; got 0: missing a required argument"
    with pytest.raises(halfstep.PreflightError, match=match):
        lower(lambda x: x, (), platform="cuda")


def test_a_specification_without_a_mesh():
    with pytest.raises(
        halfstep.PreflightError, match=r"`shardings` gives x the specification .* mesh=\{"
    ):
        sharded(P("data"))


def test_a_dimension_that_the_mesh_does_not_divide():
    with pytest.raises(halfstep.PreflightError, match=r"x of shape \(1024, 16\) cannot be sharded"):
        sharded(P("data"), mesh=AbstractMesh((48,), ("data",), axis_types=(AxisType.Auto,)))


def test_two_meshes():
    a, b = (
        NamedSharding(AbstractMesh((n,), ("data",), axis_types=(AxisType.Auto,)), P("data"))
        for n in (2, 4)
    )
    args = tuple(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=s) for s in (a, b))
    with pytest.raises(halfstep.PreflightError, match=r"x is over \{'data': 2\} and y over"):
        lower(lambda x, y: x + y, args, platform="cuda")


def test_a_callback_is_refused_with_its_line():
    def step(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            jax.debug.print("{}", carry)
            return carry, None

        return jax.lax.scan(body, x, None, length=3)[0]

    with pytest.raises(halfstep.PreflightError, match=r"debug_\w+ at .*test_lowering.py:\d+"):
        lower(step, (VECTOR,), platform="cuda")


def test_a_mistake_in_the_step_is_shown_as_it_is():
    with pytest.raises(TypeError, match="incompatible shapes"):
        lower(lambda x: x + jnp.ones(3), (VECTOR,), platform="cuda")


def test_a_step_that_cannot_be_lowered():
    def step(x: Any) -> Any:
        # On CPU and TPU only: nobody has written it for NVIDIA's GPUs.
        return jax.lax.linalg.schur(x)

    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    with pytest.raises(
        halfstep.PreflightError, match=r"(?s)step could be traced but not lowered for cuda.*schur"
    ):
        lower(step, (x,), platform="cuda")


def test_names_of_arguments():
    assert argument_names(lambda a, *b, c=1: None, 3) == ("a", "b/0", "b/1")
    assert argument_names(jax.jit(double), 1) == ("x",)
    assert argument_names(eqx.filter_jit(double), 1) == ("x",)


def test_float64_is_what_jax_makes_of_it():
    assert lower(double, (np.ones(8),), platform="cuda").leaves[0].dtype == "float32"
