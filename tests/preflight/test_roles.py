from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import halfstep
from halfstep._preflight.compile.lowering import lower
from halfstep._preflight.report.roles import arguments, roles

VECTOR = jax.ShapeDtypeStruct((8,), jnp.float32)
STATE = jax.eval_shape(optax.adam(1e-3).init, {"w": VECTOR})


class Train(NamedTuple):
    step: Any
    params: Any
    opt_state: Any


def found(step: Any, *args: Any, given: Any = None) -> dict[str, int]:
    leaves = lower(step, args, platform="cuda").leaves
    total = roles(arguments(step, args, leaves, given))
    return {role: count for role, count in total.items() if count}


def test_by_the_names_of_arguments():
    assert found(lambda params, batch, key: batch, VECTOR, VECTOR, VECTOR) == {
        "parameters": 32,
        "batch": 32,
        "other": 32,
    }


@pytest.mark.parametrize("name", ["x", "images", "tokens", "labels", "Batch", "input_ids"])
def test_names_of_batches(name: str):
    step = eval(f"lambda {name}: {name}")
    assert found(step, VECTOR) == {"batch": 32}


def test_an_optimizers_state_is_known_by_its_type():
    # mu and nu of 32 bytes each, and a counter.
    assert found(lambda p, o: o, {"w": VECTOR}, STATE) == {"optimizer state": 68, "other": 32}


def test_inside_of_one_state():
    state = Train(jax.ShapeDtypeStruct((), jnp.int32), {"w": VECTOR}, {"mu": {"params": VECTOR}})
    assert found(lambda state, batch: state, state, VECTOR) == {
        "parameters": 32,
        "optimizer state": 32,
        "batch": 32,
        "other": 4,
    }


def test_a_module_under_any_name_is_parameters():
    linear = eqx.filter_eval_shape(eqx.nn.Linear, 4, 4, key=jax.random.key(0))
    assert found(lambda thing: thing, linear) == {"parameters": 80}


def test_our_own_modules_are_not():
    scaling = jax.eval_shape(lambda: halfstep.DynamicLossScaling())
    assert set(found(lambda scaling: scaling, scaling)) == {"other"}


def test_what_the_user_says_wins():
    given = {"p": "parameters", "batch": "other"}
    assert found(lambda p, batch: batch, VECTOR, VECTOR, given=given) == {
        "parameters": 32,
        "other": 32,
    }


@pytest.mark.parametrize("given", [{"q": "batch"}, {"p": "weights"}])
def test_roles_that_do_not_exist(given: dict[str, str]):
    with pytest.raises(halfstep.PreflightError, match=r"arguments \['p'\] to one of"):
        found(lambda p: p, VECTOR, given=given)
