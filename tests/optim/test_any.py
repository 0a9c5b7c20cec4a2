"""Any optimizer of Optax: with its state in codes, and with 16-bit parameters."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from halfstep import optim, quant
from tests.optim._values import by_updates

pytestmark = pytest.mark.usefixtures("standard_promotion")
SHAPE = (128, 64)
RATE = 1e-3
# Each with the dtypes of what is coded.
SIGNED, ROOT = "int8", "uint8"
OPTIMIZERS: Any = {
    "adam": (lambda: optax.adam(RATE), [SIGNED, ROOT]),
    "adamw": (lambda: optax.adamw(RATE), [SIGNED, ROOT]),
    "amsgrad": (lambda: optax.amsgrad(RATE), [SIGNED, ROOT, ROOT]),
    "adabelief": (lambda: optax.adabelief(RATE), [SIGNED, ROOT]),
    "adan": (lambda: optax.adan(RATE), [SIGNED, SIGNED, ROOT]),
    "adafactor": (lambda: optax.adafactor(RATE), [ROOT]),
    "adadelta": (lambda: optax.adadelta(RATE), [ROOT, ROOT]),
    "ademamix": (lambda: optax.contrib.ademamix(RATE), [SIGNED, ROOT]),
    "lion": (lambda: optax.lion(RATE), [SIGNED]),
    "muon": (lambda: optax.contrib.muon(RATE), [SIGNED]),
    "novograd": (lambda: optax.novograd(RATE), [SIGNED]),
    "prodigy": (lambda: optax.contrib.prodigy(), [SIGNED, ROOT]),
    "rmsprop": (lambda: optax.rmsprop(RATE), [ROOT]),
    "sgd with momentum": (lambda: optax.sgd(RATE, 0.9), [SIGNED]),
    "adagrad, whose sum only grows": (lambda: optax.adagrad(RATE), []),
    "centered rmsprop, a difference": (lambda: optax.rmsprop(RATE, centered=True), []),
    "chain": (
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE)),
        [SIGNED, ROOT],
    ),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=RATE),
        [SIGNED, ROOT],
    ),
    "masked": (lambda: optax.masked(optax.adamw(RATE), {"w": True, "b": False}), [SIGNED, ROOT]),
}


def start() -> Any:
    return {"w": jax.random.normal(jax.random.key(0), SHAPE), "b": jnp.ones(3)}


def grads(number: int, params: Any) -> Any:
    key = jax.random.key(100 + number)
    return {n: jax.random.normal(key, p.shape, jnp.float32) for n, p in params.items()}


def trained(tx: Any, params: Any) -> tuple[Any, Any]:
    return by_updates(tx, params, grads, 5)


@pytest.mark.rows(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_compressed(name: str):
    make, coded = OPTIMIZERS[name]
    before = start()
    ours, state = trained(optim.compress(make()), before)
    theirs, plain = trained(make(), before)
    assert [x.codes.dtype.name for x in optim.coded(state)] == coded
    way, off = theirs["w"] - before["w"], ours["w"] - theirs["w"]
    # Codes are within 1/254 of a group's largest, a few times its others.
    assert jnp.linalg.norm(off) <= 0.05 * jnp.linalg.norm(way)
    saved = optim.stored_bytes(plain) - optim.stored_bytes(state)
    # Of 4 bytes each, 1 and a thirty-second of 2 stay; and a count of its own is added.
    assert saved == pytest.approx(len(coded) * (3 - 2 / 32) * 128 * 64, abs=8)


@pytest.mark.parametrize("code", ["int8", "int4", "f8"])
def test_another_code(code: str):
    tx = optim.compress(optax.sgd(RATE, 0.9), codes={"**/trace": code})
    before = start()
    ours, state = trained(tx, before)
    theirs, _ = trained(optax.sgd(RATE, 0.9), before)
    (coded,) = optim.coded(state)
    assert coded.codes.dtype == quant.CODES[code].dtype
    way, off = theirs["w"] - before["w"], ours["w"] - theirs["w"]
    # A step of a code: of 7 positions near the largest, of 127, and of three bits of mantissa.
    bound = {"int4": 1 / 4, "int8": 1 / 64, "f8": 1 / 8}[code]
    assert jnp.linalg.norm(off) <= bound * jnp.linalg.norm(way)


def test_a_part_that_is_to_stay():
    tx = optim.compress(optax.adamw(RATE), codes={"**/nu": None})
    assert [x.codes.dtype.name for x in optim.coded(tx.init(start()))] == [SIGNED]


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ({"**/mux": "int8"}, r"'\*\*/mux' in `codes` selects nothing"),
        ({"**/mu": "int7"}, "a value of `codes` must be one of int8, .* or None; got 'int7'"),
    ],
)
def test_wrong_codes(codes: Any, message: str):
    with pytest.raises(ValueError, match=message):
        optim.compress(optax.adamw(RATE), codes=codes).init(start())


def test_stochastic_codes_differ_from_step_to_step_and_not_from_run_to_run():
    tx = optim.compress(optax.adamw(RATE), rounding="stochastic")
    first, second = trained(tx, start()), trained(tx, start())
    for ours, theirs in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    other, _ = trained(optim.compress(optax.adamw(RATE), rounding="stochastic", seed=1), start())
    assert np.any(np.asarray(first[0]["w"] != other["w"]))


def full(params: Any, state: Any) -> Any:
    rest = state.rest["w"]
    return rest if rest.dtype == jnp.float32 else quant.join(params["w"], rest)


@pytest.mark.rows(4)
@pytest.mark.parametrize("kind", ["split16", "float32"])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "lion"])
def test_a_master_of_32_bits_is_float32(name: str, kind: Any):
    """Bit for bit, step by step, as float32 parameters go with the same gradients."""
    make, _ = OPTIMIZERS[name]
    tx, plain = optim.master(make(), kind), make()
    exact: Any = start()
    params, state = tx.prepare(exact)
    plain_state = plain.init(exact)
    for number in range(3):
        given = grads(number, params)
        # Each operation by itself: a compiler may contract a product and a sum in one of them.
        params, state = tx.step(params, state, given, finite=True)
        updates, plain_state = plain.update(given, plain_state, exact)
        exact = optax.apply_updates(exact, updates)
    np.testing.assert_array_equal(full(params, state), exact["w"])
    assert params["w"].dtype == jnp.bfloat16
    assert params["b"].dtype == jnp.float32


def test_a_master_of_24_bits_and_compressed_state_is_5_bytes():
    tx = optim.master(optim.compress(optax.adamw(RATE)), "split8")
    shapes = jax.eval_shape(lambda: {"w": jnp.zeros((4096, 4096))})
    made = jax.eval_shape(tx.prepare, shapes)
    assert optim.stored_bytes(made) / 4096**2 <= 5.125 + 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_master_at_all(dtype: str):
    """Steps far below a unit in the last place add up by chance."""
    tx = optim.master(optax.sgd(1e-4), "stochastic", dtype=dtype)
    params, state = tx.prepare({"w": jnp.full(SHAPE, 1.0)})
    assert params["w"].dtype == dtype
    step = jax.jit(tx.step)
    for _ in range(100):
        params, state = step(params, state, {"w": jnp.ones(SHAPE)})
    far = 1 - np.asarray(params["w"], np.float32)
    unit = float(jnp.finfo(dtype).eps)
    # The mean of 8192 walks of 100 steps, each off by less than a unit.
    assert abs(far.mean() - 1e-2) < 5 * unit * 10 / np.sqrt(far.size)


@pytest.mark.parametrize("kind", ["split16", "split8", "float32", "stochastic"])
def test_a_skipped_step(kind: Any):
    tx = optim.master(optax.adamw(RATE), kind)
    params, state = tx.prepare(start())
    new = jax.jit(tx.step)(params, state, grads(0, params), jnp.asarray(False))
    for got, was in zip(jax.tree.leaves(new), jax.tree.leaves((params, state)), strict=True):
        np.testing.assert_array_equal(got, was)


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        ("split8", "float16", "float16 with kind='float32' or 'stochastic'"),
        ("float32", "float64", "dtype must be bfloat16"),
    ],
)
def test_wrong_masters(kind: Any, dtype: Any, message: str):
    with pytest.raises(ValueError, match=message):
        optim.master(optax.adamw(RATE), kind, dtype=dtype)


def test_float16_has_no_split():
    with pytest.raises(ValueError, match=r"got a parameter of float16\[128, 64\]"):
        optim.master(optax.adamw(RATE)).init({"w": jnp.ones(SHAPE, jnp.float16)})
    with pytest.raises(ValueError, match=r"\['w'\]: float16\[128, 64\]"):
        optim.flash_adamw(RATE).init({"w": jnp.ones(SHAPE, jnp.float16)})


def test_a_state_of_another_kind():
    params, state = optim.master(optax.adamw(RATE), "split8").prepare(start())
    with pytest.raises(
        optim.StateError, match=r"the rest of a parameter of .* int16 for kind='split16'.*has int8"
    ):
        optim.master(optax.adamw(RATE), "split16").step(params, state, start())


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    "optimizer",
    [optim.compress(optax.adamw(RATE)), optim.master(optax.adamw(RATE)), optim.flash_adamw(RATE)],
    ids=["compress", "master", "flash"],
)
def test_whole_models(optimizer: optim.Transformation):
    """Models of Equinox have functions, sizes and texts among their leaves."""
    model: Any = eqx.nn.MLP(128, 1, 64, 1, key=jax.random.key(0))
    x = jnp.ones((8, 128))

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    trained = eqx.filter(model, eqx.is_inexact_array)
    ready, state = optimizer.prepare(model)
    wanted, wanted_state = optimizer.prepare(trained)
    assert eqx.tree_equal(eqx.filter(ready, eqx.is_inexact_array), wanted)
    assert eqx.tree_equal(state, wanted_state)
    grads = eqx.filter_grad(loss)(model, x)
    ready, state = optimizer.step(ready, state, grads)
    wanted, wanted_state = optimizer.step(wanted, wanted_state, grads)
    assert eqx.tree_equal(eqx.filter(ready, eqx.is_inexact_array), wanted)
    assert eqx.tree_equal(state, wanted_state)
    assert ready.activation is model.activation
    assert jax.tree.structure(optimizer.init(model)) == jax.tree.structure(optimizer.init(trained))


def _clip(limit: float) -> optax.GradientTransformation:
    return optax.clip_by_global_norm(limit)


CHAINED: Any = {
    "flash": lambda: optim.flash_adamw(RATE),
    "compress": lambda: optim.compress(optax.adamw(RATE)),
    "master": lambda: optim.master(optax.adamw(RATE)),
}


@pytest.mark.parametrize("name", CHAINED)
def test_a_chain_steps_with_what_its_front_makes_of_gradients(name: str):
    params = {"w": jax.random.normal(jax.random.key(0), SHAPE)}
    grads = {"w": jax.random.normal(jax.random.key(1), SHAPE)}
    # A sum over steps, so that it matters how much of each is clipped, which Adam would not see.
    front = (_clip(1.0), optax.trace(0.9))
    chained, alone = optim.chain(*front, CHAINED[name]()), CHAINED[name]()
    before = optax.chain(*front)
    low, state = chained.prepare(params)
    wanted, wanted_state = alone.prepare(params)
    first = before.init(wanted)
    for number in range(3):
        given = jax.tree.map(lambda g, n=number: (n + 1) * g, grads)
        low, state = chained.step(low, state, given)
        changed, first = before.update(given, first, wanted)
        wanted, wanted_state = alone.step(wanted, wanted_state, changed)
    assert eqx.tree_equal((low, state), (wanted, optim.ChainState(first, wanted_state)))
    # A bad step changes nothing, and a good one is what it is without being told.
    bad = jax.tree.map(lambda g: g * jnp.nan, grads)
    assert eqx.tree_equal(chained.step(low, state, bad, finite=jnp.asarray(False)), (low, state))
    told = chained.step(low, state, grads, finite=jnp.asarray(True))
    assert eqx.tree_equal(told, chained.step(low, state, grads))
    # As Optax's, by updates.
    updates, _ = chained.update(grads, state, low)
    assert eqx.tree_equal(optax.apply_updates(low, updates), told[0])
    assert optim.stored_bytes(state) > optim.stored_bytes(wanted_state)


def test_chains_that_are_none():
    with pytest.raises(TypeError, match=r"last of a chain must be an optimizer of halfstep.optim"):
        optim.chain(_clip(1.0), optax.adamw(RATE))
    with pytest.raises(TypeError, match=r"last of a chain must be .*; got NoneType"):
        optim.chain()
    with pytest.raises(TypeError, match="only the last of a chain may be an optimizer"):
        optim.chain(optim.flash_adamw(RATE), optim.flash_adamw(RATE))
