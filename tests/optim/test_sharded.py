"""Groups of 32 never lie on two devices, also where JAX traces `init` and shows no sharding."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from halfstep import optim

SHAPE = (64, 256)
"""Over four devices, a column has 16 rows on each."""
MAKERS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "flash_adamw.init": lambda: optim.flash_adamw(1e-3).init,
    "flash_adamw.prepare": lambda: optim.flash_adamw(1e-3).prepare,
    "flash_lion.init": lambda: optim.flash_lion(1e-3).init,
    "compress.init": lambda: optim.compress(optax.adamw(1e-3)).init,
    "master(compress).prepare": lambda: (
        optim.master(optim.compress(optax.adamw(1e-3)), "split8").prepare
    ),
}


def by_rows() -> NamedSharding:
    return NamedSharding(jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,)), P("d"))


def placed(dtype: Any = jnp.float32, where: NamedSharding | None = None) -> Any:
    return {"w": jax.ShapeDtypeStruct(SHAPE, dtype, sharding=where or by_rows())}


def scales(state: Any) -> list[tuple[int, ...]]:
    return [coded.scale.shape for coded in optim.coded(state)]


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.usefixtures("standard_promotion")
def test_groups_are_on_one_device(name: str):
    """By shapes alone, in a compiled program and for arrays, groups are the same."""
    make, shapes = MAKERS[name](), placed()
    told = optim.sharded(make, shapes)
    found = scales(jax.eval_shape(told, shapes))
    assert found
    assert set(found) == {(64, 8)}
    arrays = {"w": jax.device_put(jnp.ones(SHAPE), by_rows())}
    assert scales(jax.jit(told)(arrays)) == scales(told(arrays)) == scales(make(arrays)) == found


def test_values_and_shardings_are_those_of_arrays():
    tx, where = optim.flash_adamw(1e-3), by_rows()
    value = jax.random.normal(jax.random.key(0), SHAPE)
    expected = tx.prepare({"w": jax.device_put(value, where)})
    got = jax.jit(optim.sharded(tx.prepare, placed()))({"w": value})
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim) or a.ndim == 0
        assert jnp.ndim(a) == 0 or a.sharding.mesh.axis_types == (AxisType.Auto,)


def test_devices_that_are_not_there():
    mesh = AbstractMesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    shapes = placed(where=NamedSharding(mesh, P(("b", "a"))))
    params, state = jax.eval_shape(optim.sharded(optim.flash_adamw(1e-3).prepare, shapes), shapes)
    assert params["w"].dtype == jnp.bfloat16
    assert state.first["w"].scale.shape == (64, 8)
    assert optim.state_shardings(state, shapes).first["w"].scale.spec == P(("b", "a"))


def test_layers_that_are_released():
    """`jax.vmap` hides the sharding of arrays too."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    params = {
        "outer": jnp.ones(3),
        "layers": jax.device_put(jnp.ones((2, *SHAPE)), NamedSharding(mesh, P(None, "d"))),
    }
    step = optim.release(
        lambda w, x, outer, batch: x,
        optim.flash_adamw(1e-3),
        first=lambda outer, batch: batch,
        last=lambda outer, x, batch: jnp.sum(x),
    )
    shapes = scales(jax.eval_shape(optim.sharded(step.init, params), params))
    assert set(shapes) == {(2, 64, 8)}


def test_models_with_functions():
    model = eqx.nn.MLP(256, 256, 64, 1, key=jax.random.key(0))
    where = by_rows()
    model = jax.tree.map(
        lambda x: jax.device_put(x, where) if eqx.is_array(x) and x.ndim == 2 else x, model
    )
    made, state = optim.sharded(optim.flash_adamw(1e-3).prepare, model)(model)
    assert made.activation is model.activation
    assert set(scales(state)) == {(64, 8), (8, 64)}


def test_a_group_on_two_devices_warns():
    tx, shapes = optim.flash_adamw(1e-3), placed(jnp.bfloat16)
    state = jax.eval_shape(tx.init, shapes)
    with pytest.warns(UserWarning, match=r"16 of 64.*optim\.sharded\(optimizer\.init, params\)"):
        optim.state_shardings(state, shapes)


def test_parameters_without_shardings():
    with pytest.raises(ValueError, match="shardings over one mesh; got no mesh"):
        optim.sharded(optim.flash_adamw(1e-3).init, {"w": jnp.ones(SHAPE)})


def test_other_parameters_are_an_error():
    init = optim.sharded(optim.flash_adamw(1e-3).init, placed())
    with pytest.raises(ValueError, match="the structure of those that `sharded` was given"):
        init({"v": jnp.ones(SHAPE)})
