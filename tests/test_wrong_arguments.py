"""Every public parameter with wrong objects: the answer names it, what came, and what to pass."""

import inspect
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep
from halfstep import debug, optim, quant
from halfstep._base import checked
from halfstep.compat import jaxamp
from tests import _wrong_arguments as wrong


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("values", "least"),
    [(wrong.FEW, 2_000), pytest.param(tuple(wrong.WRONG), 25_000, marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_an_answer_names_the_parameter(
    values: Sequence[str],
    least: int,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("orbax.checkpoint")
    pytest.importorskip("flax")
    monkeypatch.chdir(tmp_path)
    slow = () if len(values) > len(wrong.FEW) else wrong.SLOW
    left_out = (*wrong.LEFT_OUT, *slow)
    calls = wrong.harvested(tmp_path, left_out)
    found = [text for _, texts in wrong.asked(calls, values) for text in texts]
    assert [text for text in found if text] == []
    assert len(found) >= least


W = jnp.ones(4)
ADAM = optax.adam(1e-3)


def loss(w: Any) -> Any:
    return jnp.sum(w**2)


WORST: dict[str, tuple[Callable[[], Any], str]] = {
    "scaling": (
        lambda: halfstep.autocast(loss, scaling=-1),
        "`scaling` of `autocast` must be the state of a recipe, or None; got int. Pass what F8",
    ),
    "compress": (
        lambda: optim.compress(None),  # type: ignore[arg-type]
        "`tx` of `compress` must be an optimizer of Optax's .*; got None .*`tx`: The optimizer",
    ),
    "master": (lambda: optim.master(None), "`tx` of `master` must be an optimizer"),  # type: ignore[arg-type]
    "optimizer": (
        lambda: halfstep.apply_gradients(W, None, ADAM.init(W), W),  # type: ignore[arg-type]
        "`optimizer` of `apply_gradients` must be an optimizer of Optax's",
    ),
    "no state": (
        lambda: halfstep.apply_gradients(W, ADAM, None, W),
        r"`optimizer_state` must be the state of this optimizer for this model, PyTreeDef\(.*; got",
    ),
    "no gradients": (
        lambda: halfstep.apply_gradients(W, ADAM, ADAM.init(W), None),
        r"`grads` must have the structure of the model's inexact arrays, PyTreeDef\(\*\); got",
    ),
    "another model's state": (
        lambda: halfstep.optimizer_update({"a": W}, ADAM, ADAM.init({"b": W}), {"a": W}, True),
        r"`optimizer_state` must be .* Make it with optimizer\.init\(eqx\.filter\(model",
    ),
    "ledger": (
        lambda: halfstep.transaction(True, lambda x: x, W, None),  # type: ignore[arg-type]
        "`ledger` of `transaction` must be a Ledger; got None",
    ),
    "dequantize": (
        lambda: quant.dequantize(None),  # type: ignore[arg-type]
        "`array` of `dequantize` must be a Quantized; got None",
    ),
    "split": (lambda: quant.split(None), "`value` of `split` must be an array; got None"),  # type: ignore[arg-type]
    "quantize": (
        lambda: quant.quantize(W, {}),  # type: ignore[arg-type]
        "`code` of `quantize` must be a text or a Code; got {}",
    ),
    "batches": (
        lambda: debug.bisect(loss, {"a": 1}),  # type: ignore[arg-type]
        "`batches` of `bisect` must be a sequence, each a sequence; got {'a': 1}",
    ),
    "a batch of too few": (
        lambda: debug.bisect(loss, [()]),
        "`batches` must have what the function is called with, each as a tuple; got one of 0: miss",
    ),
    "period": (
        lambda: halfstep.DynamicLossScaling(period=jnp.ones(0)),  # type: ignore[arg-type]
        r"`period` of `DynamicLossScaling` must be an integer; got float32\[0\]. `period`: Good",
    ),
    "no scale": (
        lambda: halfstep.StaticLossScaling(None),
        r"`loss_scaling` must be a number, such as 2\.0\*\*15; got None",
    ),
    "a shape of texts": (
        lambda: quant.groups_for(("a",)),  # type: ignore[arg-type]
        "`shape` of `groups_for` must be a sequence, each an integer",
    ),
    "a negative shape": (
        lambda: quant.groups_for((-1,)),
        "`shape` must be integers, 0 or more; got",
    ),
    "shards of another shape": (
        lambda: quant.groups_for((64, 64), shards=(2,)),
        "`shards` must have a number for each axis of `shape`, ",
    ),
    "another function": (
        lambda: halfstep.filter_grad(loss, argnums=1),
        "`filter_grad` has no option 'argnums'; got 1. It differentiates with respect to the first",
    ),
    "no scaler": (
        lambda: jaxamp.dynamic_scale_value_and_grad(loss)(W),
        "`dynamic_scaler_state` must be a DynamicScalerState, given by name; got NoneType",
    ),
}


@pytest.mark.parametrize("name", WORST)
def test_the_worst_of_old(name: str):
    call, message = WORST[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_recipe_of_texts():
    recipe = halfstep.RECIPES["f8"]
    factors = dict.fromkeys(("forward", "input_gradient", "weight_gradient"), recipe.forward)
    with pytest.raises(TypeError, match=r"`forward` of `Recipe` must be a .*; got 'zz'"):
        halfstep.Recipe(**{**factors, "name": "mine", "forward": "zz"})


@checked
def example(number: int, *more: Any, mode: str = "plain", key: Any = None) -> Any:
    """Do something.

    Args:
        number: How often. Not more than that.
        *more: Whatever.
        mode: In which way it
            is done.
        key: Anything.
    """
    return number, more, mode, key


def test_only_what_is_surely_wrong_is_refused():
    # What comes in `*more` is not taken for an option that is declared after it.
    assert example(cast(int, np.int64(3)), 1.5, None, mode="fast", key=0) == (
        3,
        (1.5, None),
        "fast",
        0,
    )
    with pytest.raises(TypeError, match=r"`number` of `example` must be an integer.* How often\.$"):
        example(0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a text; got 3 \(int\). `mode`: In which way it is"):
        example(1, mode=3)  # type: ignore[arg-type]


def test_an_accident_is_a_complaint(tmp_path: pathlib.Path):
    """The search itself finds what it is for."""

    def careless(size: Any) -> Any:
        return np.ones(size)

    call = wrong.Call("x.careless", careless, inspect.signature(careless), {"size": 3}, tmp_path)
    texts = list(wrong.complaints([call], {"a text": "zz", "zero": 0}))
    assert "raised in" in (texts[0] or "")
    assert texts[1] is None
