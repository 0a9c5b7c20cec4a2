"""A call with an option that a function does not have is answered by name, with what to type."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import halfstep
from halfstep import optim

pytestmark = [pytest.mark.core, pytest.mark.wheel]

W, X = jnp.ones((4, 2)), jnp.ones((3, 4))


def loss(weights: Any, images: Any, flip: bool = False) -> Any:
    return jnp.mean((images @ weights) ** 2) * (-1 if flip else 1)


# Each row: a call as it is written by habit, and parts of its answer.
UNKNOWN: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "argnums": (
        lambda: halfstep.filter_value_and_grad(loss, argnums=0),  # type: ignore[call-arg]
        (
            r"`filter_value_and_grad` has no option 'argnums'; got 0\.",
            r"Choose from scaling, policy, has_aux",
            r"differentiates with respect to the first argument",
        ),
    ),
    "argnums of filter_grad": (
        lambda: halfstep.filter_grad(loss, argnums=(0, 1)),
        (r"`filter_grad` has no option 'argnums'; got \(0, 1\)", "the first argument: pass"),
    ),
    "argnums of autocast": (
        lambda: halfstep.autocast(loss, "bf16", argnums=1),  # type: ignore[call-overload]
        (r"`autocast` has no option 'argnums'; got 1\.", r"`params=`"),
    ),
    "argnums of explain": (
        lambda: halfstep.explain(loss, argnums=1),  # type: ignore[call-arg]
        (r"`explain` has no option 'argnums'", r"`params=`"),
    ),
    "static_argnums": (
        lambda: halfstep.autocast(loss, "bf16", static_argnums=2),  # type: ignore[call-overload]
        (r"`autocast` has no option 'static_argnums'; got 2\.", "not arrays are static"),
    ),
    "donate_argnums": (
        lambda: halfstep.filter_grad(loss, donate_argnums=0),
        ("`filter_grad` has no option 'donate_argnums'", r"jax\.jit\(step, donate_argnums="),
    ),
    "has_aux of autocast": (
        lambda: halfstep.autocast(loss, has_aux=True),  # type: ignore[call-overload]
        ("`autocast` has no option 'has_aux'; got True", "returns what the function returns"),
    ),
    "dtype": (
        lambda: halfstep.autocast(loss, dtype=jnp.bfloat16),  # type: ignore[call-overload]
        ("`autocast` has no option 'dtype'", "policy='bf16'"),
    ),
    "enabled": (
        lambda: halfstep.autocast(loss, enabled=False),  # type: ignore[call-overload]
        ("`autocast` has no option 'enabled'", "policy='f32'"),
    ),
    "loss_scale": (
        lambda: halfstep.filter_grad(loss, loss_scale=2.0**15),
        ("`filter_grad` has no option 'loss_scale'", r"scaling=halfstep\.DynamicLossScaling\(\)"),
    ),
    "a misspelled option": (
        lambda: halfstep.filter_value_and_grad(loss, polcy="bf16"),  # type: ignore[call-arg]
        (r"has no option 'polcy'; got 'bf16'\. Did you mean `policy`\?",),
    ),
    "a misspelled option of an optimizer": (
        lambda: optim.flash_adamw(1e-3, weight_decy=0.1),  # type: ignore[call-arg]
        (r"`flash_adamw` has no option 'weight_decy'; got 0\.1\. Did you mean `weight_decay`\?",),
    ),
    "an unknown option of preflight": (
        lambda: halfstep.preflight(loss, (W, X), targets="h100", static_argnums=2),  # type: ignore[call-arg]
        ("`preflight` has no option 'static_argnums'; got 2", "not arrays are static"),
    ),
    "arguments next to the function": (
        lambda: halfstep.filter_value_and_grad(loss, None, W, X),  # type: ignore[call-arg]
        (
            r"`filter_value_and_grad` takes `func` and `scaling` by position; got 4 arguments\.",
            r"It returns a function: write filter_value_and_grad\(loss, \.\.\.\)\(weights, images,",
        ),
    ),
    "arguments next to the function, explain": (
        lambda: halfstep.explain(loss, W, X),  # type: ignore[call-arg]
        (r"write explain\(loss, \.\.\.\)\(weights, images, flip\)",),
    ),
    "arguments that are not one tuple": (
        lambda: halfstep.preflight(loss, W, X, targets="h100"),  # type: ignore[call-arg]
        (
            r"`preflight` takes `step` and `args` by position; got 3 arguments\.",
            r"as one tuple: preflight\(loss, \(weights, images, flip\), \.\.\.\)",
        ),
    ),
    "too many": (
        lambda: halfstep.cast_tree(W, "bf16", ("w",)),  # type: ignore[call-arg]
        (r"`cast_tree` takes `tree` and `dtype` by position; got 3 arguments\. .*: keep, float64",),
    ),
    "no verdict": (
        lambda: halfstep.optimizer_update(W, optax.sgd(0.1), (), W),  # type: ignore[call-arg]
        (r"`optimizer_update` also needs `grads_finite`: pass it\. `grads_finite`: The verdict",),
    ),
    "no target": (
        lambda: halfstep.preflight(loss, (W, X)),  # type: ignore[call-arg]
        (r"`preflight` also needs `targets`: pass it\. `targets`: ",),
    ),
    "a policy in place of the function": (
        lambda: halfstep.autocast("bf16"),  # type: ignore[call-overload]
        (r"`func` of `autocast`.* got 'bf16'.*@halfstep\.autocast\(policy='bf16'\)",),
    ),
    "a called function": (
        lambda: halfstep.autocast(loss(W, X)),  # type: ignore[call-overload]
        (r"`func` of `autocast` must be a function.* got float32\[\].*autocast\(func\)\(\*args\)",),
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_option_is_answered_by_name(name: str):
    call, parts = UNKNOWN[name]
    for part in parts:
        with pytest.raises(TypeError, match=part):
            call()


# The same, where the option is passed with the arguments of the user's function.
MISPLACED: dict[str, tuple[Callable[[], Any], str]] = {
    "has_aux": (
        lambda: halfstep.filter_value_and_grad(loss)(W, X, has_aux=True),
        r"`has_aux` is an option of `filter_value_and_grad`, and `loss` has no such parameter: "
        r"write filter_value_and_grad\(loss, has_aux=True\)\(\.\.\.\)",
    ),
    "scaling": (
        lambda: halfstep.filter_grad(loss)(W, X, scaling=halfstep.NoLossScaling()),
        r"`scaling` is an option of `filter_grad`, .*: write filter_grad\(loss, scaling=NoLoss",
    ),
    "policy": (
        lambda: halfstep.autocast(loss)(W, X, policy="f16"),
        r"`policy` is an option of `autocast`, .*: write autocast\(loss, policy='f16'\)",
    ),
    "policy of explain": (
        lambda: halfstep.explain(loss)(W, X, policy="f16"),
        r"`policy` is an option of `explain`",
    ),
    "keep": (
        lambda: halfstep.cast_function(loss, "bf16")(W, X, keep=("images",)),
        r"`keep` is an option of `cast_function`",
    ),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_an_option_in_the_wrong_call(name: str):
    call, message = MISPLACED[name]
    with pytest.raises(TypeError, match=message):
        call()


def test_options_that_are_the_functions_own():
    """A parameter of the user's function is not a mistake, whatever its name."""

    def mine(w: Any, policy: Any, **others: Any) -> Any:
        return jnp.sum(w) * policy * others["has_aux"]

    grads = halfstep.filter_grad(mine)(W, policy=2.0, has_aux=3.0)[2]
    assert (grads == 6.0).all()


def test_the_advice_holds():
    """Non-arrays are static; a tuple in the first place is differentiated; f32 changes nothing."""
    assert halfstep.autocast(loss, "bf16")(W, X, True) == -16.0
    assert halfstep.filter_value_and_grad(loss)(W, X, True)[0] == -16.0

    def both(trained: Any) -> Any:
        return loss(*trained)

    first, second = halfstep.filter_grad(both)((W, X))[2]
    assert first.shape == W.shape
    assert second.shape == X.shape
    assert halfstep.autocast(loss, policy="f32")(W, X) == loss(W, X)


OTHER_SHAPES = {"w": jnp.ones((3, 3)), "b": jnp.ones(2)}
MODEL = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
ADAM, LION = optax.adam(1e-3), optim.flash_lion(1e-3)
MASTER, COMPRESS = optim.master(ADAM), optim.compress(ADAM)


@pytest.mark.parametrize(
    ("optimizer", "state", "message"),
    [
        (MASTER, ADAM.init(MODEL), "`optimizer_state` must be a MasterState.*got tuple.*init"),
        (MASTER, LION.init(MODEL), "`optimizer_state` must be a MasterState.*got FlashState"),
        (MASTER, None, "`optimizer_state` must be a MasterState.*got NoneType"),
        (COMPRESS, ADAM.init(MODEL), "`optimizer_state` must be a CompressedState.*got tuple"),
        (COMPRESS, MASTER.init(MODEL), "must be a CompressedState.*got MasterState"),
        (MASTER, MASTER.init({"v": W}), r"`optimizer_state` must be the state .*; got PyTreeDef"),
        (
            ADAM,
            ADAM.init(OTHER_SHAPES),
            r"the state of this optimizer for this model: 0/mu/b must be float32\[64\]; got",
        ),
        (MASTER, MASTER.init(OTHER_SHAPES), r"mu/b must be float32\[64\]; got float32\[2\]\. Make"),
        (COMPRESS, COMPRESS.init(OTHER_SHAPES), r"`optimizer_state` must be|must be stored"),
    ],
)
def test_a_wrong_optimizer_state_is_named(optimizer: Any, state: Any, message: str):
    with pytest.raises(ValueError, match=message):
        halfstep.optimizer_update(MODEL, optimizer, state, MODEL, True)


@pytest.mark.parametrize("optimizer", [MASTER, COMPRESS])
def test_a_wrong_state_of_update(optimizer: Any):
    with pytest.raises(optim.StateError, match=r"`optimizer_state` must be a .*State, as"):
        optimizer.update(MODEL, ADAM.init(MODEL), MODEL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"params": "weight"},
            r"`params` names 'weight', which `loss` does not take\. Choose from weights, images",
        ),
        ({"params": (0, 7)}, r"`params` names 7, which `loss` does not take\. Choose from weights"),
    ],
)
def test_parameters_that_the_function_does_not_have(options: Any, message: str):
    for transform in (halfstep.autocast, halfstep.filter_grad):
        with pytest.raises(ValueError, match=message):
            transform(loss, **options)(W, X)
    # Arguments that are left out, or taken by any name, are no reason to complain.
    halfstep.autocast(loss, params=("weights", "flip", 2))(W, X)
    halfstep.autocast(lambda w, **more: w, params=("w", "frozen"))(W)
    halfstep.autocast(lambda *args: args[0], params=(0, 3))(W)


def test_the_hint_has_the_users_own_names():
    with pytest.raises(ValueError, match=r"Pass a batch .* or leave `images` out of `batch`"):
        halfstep.filter_grad(loss, microbatches=2, batch=("images",))(W, X)
