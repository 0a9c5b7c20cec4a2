"""Every code example of the five documents that halfstep was made from runs, by its import alone.

The texts are in `_seed_examples.py`, with the reasons why some are not run. Names that an example
leaves undefined (a model, a batch, an optimizer) are given here, with small data; `...` in an
example stands for what the reader writes.
"""

import functools
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep
from halfstep.compat import flashoptim_jax, jaxamp, mpfj, mpx
from tests._jaxprs import contractions
from tests.compat._seed_examples import ARTICLE, COUNTS, EXAMPLES, MPFJ, NOT_RUN

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]


def executed(title: str, names: dict[str, Any], *, changes: Any = ()) -> dict[str, Any]:
    """Run an example with the names that it leaves undefined, and return all names after it."""
    code = EXAMPLES[title].code.replace(
        "from flashoptim_jax", "from halfstep.compat.flashoptim_jax"
    )
    for before, after in changes:
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    exec(compile(code, title, "exec"), names)
    return names


# Which examples there are.

RUN: dict[str, Callable[[], None]] = {}
"""Tests by the titles of their examples."""


def runs(title: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Name the example that a test runs."""

    def added(test: Callable[[], None]) -> Callable[[], None]:
        RUN[title] = test
        return test

    return added


def test_every_example_is_run_or_says_why_not():
    assert set(RUN) | set(NOT_RUN) == set(EXAMPLES)
    assert not set(RUN) & set(NOT_RUN)
    found = [example.document for example in EXAMPLES.values()]
    assert {document: found.count(document) for document in COUNTS} == COUNTS
    assert (COUNTS[MPFJ], COUNTS[ARTICLE]) == (0, 0)
    assert (len(RUN), len(NOT_RUN)) == (16, 8)


@pytest.mark.parametrize("title", [title for title, why in NOT_RUN.items() if "not Python" in why])
def test_an_example_that_is_not_python(title: str):
    with pytest.raises(SyntaxError, match=r"positional argument|invalid syntax|\*|default"):
        compile(EXAMPLES[title].code, title, "exec")


# The paper of MPX.


def regression() -> dict[str, Any]:
    """The names of a step of Equinox: a model, a batch, a loss and an optimizer."""
    x = jax.random.normal(jax.random.key(0), (64, 8))
    model = eqx.nn.MLP(8, 1, width_size=32, depth=1, key=jax.random.key(1))
    optimizer = optax.adam(1e-2)

    def loss(model: Any, batch: Any) -> Any:
        x, y = batch
        error = jax.vmap(model)(x) - y
        return mpx.force_full_precision(jnp.mean, jnp.float32)(error**2)

    return {
        "eqx": eqx,
        "model": model,
        "batch": (x, jnp.sum(x, axis=1, keepdims=True)),
        "loss": loss,
        "optimizer": optimizer,
        "optimizer_state": optimizer.init(eqx.filter(model, eqx.is_array)),
    }


def trained(title: str, **given: Any) -> tuple[dict[str, Any], list[float]]:
    """The names after 20 steps, compiled as the paper advises, and the loss before each."""
    known: dict[str, Any] = regression() | given
    changing = ("model", "optimizer_state", *given)

    @eqx.filter_jit
    def step(state: dict[str, Any]) -> tuple[Any, ...]:
        before = known["loss"](state["model"], known["batch"])
        names = executed(title, {**known, **state, "mpx": mpx})
        return {name: names[name] for name in changing}, names["grads"], before

    losses = []
    for _ in range(20):
        made, known["grads"], before = step({name: known[name] for name in changing})
        known |= made
        losses.append(float(before))
    return known, losses


@pytest.mark.slow
@runs("a step in full precision")
def test_a_step_in_full_precision():
    known, losses = trained("a step in full precision")
    assert losses[-1] < 0.5 * losses[0]
    assert known["grads"].layers[0].weight.dtype == jnp.float32


@runs("a step in mixed precision")
def test_a_step_in_mixed_precision():
    _, exact = trained("a step in full precision")
    scaling = mpx.DynamicLossScaling(mpx.FLOAT16_MAX, 1.0)
    known, losses = trained("a step in mixed precision", loss_scaling=scaling)
    assert losses[-1] < 0.5 * losses[0]
    # A step that overflows is left out, so that the loss before the next is the same.
    skipped = losses.count(losses[0]) - 1
    np.testing.assert_allclose(losses[skipped:], exact[: 20 - skipped], rtol=0.02)
    assert losses[skipped:] != exact[: 20 - skipped]
    assert known["loss_scaling"].loss_scaling == 2.0 ** (15 - skipped)
    assert known["grads"].layers[0].weight.dtype == jnp.float32
    half, static = eqx.partition(mpx.cast_to_half_precision(known["model"]), eqx.is_array)
    batch = mpx.cast_to_half_precision(known["batch"])
    products = contractions(lambda m, b: known["loss"](eqx.combine(m, static), b), half, batch)
    assert set(products) == {"float16"}


# As the paper's text writes them.
SIGNATURES = MappingProxyType(
    {
        "cast_tree": "(tree, dtype)",
        "cast_to_half_precision": "(x)",
        "cast_to_float16": "(x)",
        "cast_to_bfloat16": "(x)",
        "cast_to_float32": "(x)",
        "cast_function": "(func, dtype, return_dtype=None)",
        "filter_grad": "(func, scaling, has_aux=False, use_mixed_precision=True)",
        "filter_value_and_grad": "(func, scaling, has_aux=False, use_mixed_precision=True)",
    }
)


def plain_signature(func: Any) -> str:
    """A signature without types."""
    parameters = inspect.signature(func).parameters.values()
    made = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(made))


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_in_the_text_of_the_paper(name: str):
    assert plain_signature(inspect.unwrap(getattr(mpx, name))) == SIGNATURES[name]


def test_methods_and_steps_in_the_text_of_the_paper():
    scaling = mpx.DynamicLossScaling(2.0**15, 1.0)
    x = {"f": jnp.float16(3.0), "i": jnp.int32(3)}
    scaled = scaling.scale(x)
    assert (scaled["f"], scaled["i"]) == (3 * 2**15, 3)
    assert scaling.unscale(scaled)["f"].dtype == jnp.float32
    assert scaling.unscale(scaled)["f"] == 3
    assert scaling.adjust(jnp.asarray(False)).loss_scaling == 2**14
    names = list(inspect.signature(inspect.unwrap(mpx.optimizer_update)).parameters)
    assert names[:5] == ["model", "optimizer", "optimizer_state", "grads", "grads_finite"]


# The README of MPfJ has no example. These are the ten steps of its text, with its five names.


@pytest.mark.slow
def test_the_steps_of_mpfj():
    known = regression()
    model, state, batch = known["model"], known["optimizer_state"], known["batch"]
    half = mpfj.cast_to_half_precision((model, batch))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(eqx.filter(half, eqx.is_array))} == {
        "float16"
    }
    full = mpfj.cast_to_full_precision(half)
    assert full[0].layers[0].weight.dtype == jnp.float32
    assert mpfj.force_full_precision(jnp.sum, jnp.float32)(jnp.full(4, 60000, jnp.float16)) == 240e3
    scaling = mpfj.DynamicLossScaling(2.0**15, 1.0)
    before = known["loss"](model, batch)

    @eqx.filter_jit
    def step(model: Any, state: Any, scaling: Any) -> tuple[Any, ...]:
        scaling, finite, grads = mpfj.filter_grad(known["loss"], scaling)(model, batch)
        return *mpfj.cond_update(model, known["optimizer"], state, grads, finite), scaling

    for _ in range(20):
        model, state, scaling = step(model, state, scaling)
    assert known["loss"](model, batch) < 0.5 * before
    assert scaling.loss_scaling <= 2**15


# The project page of flashoptim-jax.

STEPS = 5


def weights() -> dict[str, Any]:
    """Parameters of which one is large enough to be compressed, and the data to fit."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w": jax.random.normal(keys[0], (64, 128)), "b": jnp.zeros(128)}
    target = jax.random.normal(keys[1], (64, 128))
    x = jax.random.normal(keys[2], (32, 64))
    return {"params": params, "batch": (x, x @ target)}


def loss_fn(params: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((x @ params["w"].astype(jnp.float32) + params["b"] - y) ** 2)


def flash_names() -> dict[str, Any]:
    """What the page's examples leave undefined: bfloat16 parameters, their gradients, libraries."""
    made = weights()
    params = {**made["params"], "w": made["params"]["w"].astype(jnp.bfloat16)}
    return {
        "jax": jax,
        "jnp": jnp,
        "optax": optax,
        "flash_adamw": flashoptim_jax.flash_adamw,
        "params": params,
        "grads": jax.jit(jax.grad(loss_fn))(params, made["batch"]),
    }


@functools.cache
def baseline() -> dict[str, Any]:
    """The page's own baseline, in float32 from the same weights, after `STEPS` steps."""
    names = flash_names()
    names["params"] = jax.tree.map(lambda p: p.astype(jnp.float32), names["params"])
    names["grads"] = jax.tree.map(lambda g: g.astype(jnp.float32), names["grads"])
    executed("baseline of JAX", names)
    for _ in range(STEPS - 1):
        names["params"], names["opt_state"] = names["step"](
            names["params"], names["opt_state"], names["grads"]
        )
    return names["params"]


def assert_near_baseline(params: Any, state: Any) -> None:
    """The steps taken differ by moments of 8 bits and a master of 24: by a few hundredths each."""
    full = flashoptim_jax.reconstruct_weights(params, state.ecc)
    start, exact = flash_names()["params"], baseline()
    assert (params["w"].dtype, params["b"].dtype) == (jnp.bfloat16, jnp.float32)
    for name in ("w", "b"):
        first = start[name].astype(jnp.float32)
        moved, right = full[name] - first, exact[name] - first
        assert np.linalg.norm(right) > 1e-3
        assert np.linalg.norm(moved - right) <= 0.08 * np.linalg.norm(right)


@runs("baseline of JAX")
def test_the_baseline():
    names = flash_names()
    names["params"] = weights()["params"]
    names["grads"] = jax.grad(loss_fn)(names["params"], weights()["batch"])
    executed("baseline of JAX", names)
    before = loss_fn(weights()["params"], weights()["batch"])
    assert loss_fn(names["params"], weights()["batch"]) < before


@pytest.mark.slow
@runs("timing in JAX")
def test_timing():
    names = flash_names()
    tx = flashoptim_jax.flash_adamw(learning_rate=1e-3)
    names |= {"time": time, "statistics": statistics}
    names |= {"opt_state": tx.init(names["params"]), "warmup": 1, "steps": 3, "steps_per_sync": 2}
    names["step"] = jax.jit(tx.step, donate_argnums=(0, 1))
    executed("timing in JAX", names)
    assert names["opt_state"].count == (1 + 3) * 2
    assert len(names["samples"]) == 3
    assert min(names["samples"]) <= names["median_us"] <= max(names["samples"])


class LateNames(dict[str, Any]):
    """Names of which one is asked for later than it is made.

    The example reads `new_param`, which it never sets: the parameter that it has just updated.
    """

    def __missing__(self, name: str) -> Any:
        if name != "new_param":
            raise KeyError(name)
        return self["param_f32"]


@runs("the core of the unfused path")
def test_the_core_of_the_unfused_path():
    for use_ecc in (True, False):
        check_the_core(use_ecc)


def check_the_core(use_ecc: bool) -> None:
    numbers = {"b1": 0.9, "b2": 0.999, "lr": 1e-3, "weight_decay": 1e-2, "eps": 1e-8}
    numbers |= {"bc1": 1 - 0.9**3, "bc2": 1 - 0.999**3}
    shown = ("reconstruct_leaf", "dequantize_momentum", "dequantize_variance")
    shown += ("quantize_momentum", "quantize_variance")
    known: dict[str, Any] = {name: getattr(flashoptim_jax, name) for name in shown}
    known |= numbers | {"jnp": jnp, "sqrt": jnp.sqrt, "use_ecc": use_ecc, "group_size": 32}

    @jax.jit
    def core(exact: Any, first: Any, second: Any, grad: Any) -> dict[str, Any]:
        param, ecc = flashoptim_jax.split_leaf(exact, master_weight_bits=32)
        mu = flashoptim_jax.quantize_momentum(first, 32)
        nu = flashoptim_jax.quantize_variance(second, 32)
        given = {"param": param, "ecc": ecc, "mu": mu, "nu": nu, "grad_f32": grad}
        names = LateNames(known | given)
        exec(compile(EXAMPLES["the core of the unfused path"].code, "core", "exec"), {}, names)
        made = ("param", "param_f32", "update", "mu_f32", "nu_f32", "new_mu", "new_nu")
        read = {
            "read_mu": flashoptim_jax.dequantize_momentum(names["new_mu"], 32),
            "read_nu": flashoptim_jax.dequantize_variance(names["new_nu"], 32),
        }
        return {name: names[name] for name in made} | read

    key = jax.random.split(jax.random.key(0), 4)
    exact, first, grad = (jax.random.normal(one, (8, 64)) for one in key[:3])
    second = 0.01 * jnp.square(jax.random.normal(key[3], (8, 64))) + 1e-3
    first = 0.1 * first
    names = core(exact, first, second, grad)
    param = names["param"]
    mu = 0.9 * np.float64(first) + 0.1 * np.float64(grad)
    nu = 0.999 * np.float64(second) + 0.001 * np.float64(grad) ** 2
    moved = 1e-3 / (1 - 0.9**3) * mu / (np.sqrt(nu / (1 - 0.999**3)) + 1e-8)
    start = np.float64(exact) if use_ecc else np.float64(param.astype(jnp.float32))
    expected = start * (1 - 1e-5) - moved
    # Codes of 8 bits err by a part of their group's largest value.
    assert np.linalg.norm(names["param_f32"] - expected) <= 0.02 * np.linalg.norm(moved)
    rounded = names["param_f32"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(names["update"], rounded - param)
    for moment in ("mu", "nu"):
        assert isinstance(names[f"new_{moment}"], flashoptim_jax.QuantizedArray)
        right = names[f"{moment}_f32"]
        error = np.linalg.norm(names[f"read_{moment}"] - right)
        assert 0 < error <= 0.02 * np.linalg.norm(right)


@runs("a step with donation")
def test_a_step_with_donation():
    names = flash_names()
    names["tx"] = flashoptim_jax.flash_adamw(learning_rate=1e-3)
    step = executed("a step with donation", names)["train_step"]
    params: Any = names["params"]
    state: Any = names["tx"].init(params)
    given = params["w"]
    for _ in range(STEPS):
        params, state = step(params, state, names["grads"])
    assert given.is_deleted()
    assert state.count == STEPS
    assert_near_baseline(params, state)


def check_both_steps(title: str) -> None:
    """Without donation, as typed up to there, and with it."""
    results = []
    for donated in (False, True):
        names = flash_names()
        last = "step = jax.jit(train_step, donate_argnums=(0, 1))"
        executed(title, names, changes=() if donated else [(last, "")])
        params, state = names["params"], names["state"]
        given = params["w"]
        for _ in range(STEPS):
            params, state = names["step"](params, state, names["grads"])
        assert given.is_deleted() is donated
        assert_near_baseline(params, state)
        results.append(params)
    jax.tree.map(np.testing.assert_array_equal, *results)


@runs("unfused")
def test_unfused():
    check_both_steps("unfused")


@runs("fused, with a delta")
def test_fused_with_a_delta():
    check_both_steps("fused, with a delta")


@runs("fused, with direct writes")
def test_fused_with_direct_writes():
    check_both_steps("fused, with direct writes")


@runs("the final API")
def test_the_final_api():
    names: dict[str, Any] = {**flash_names(), "loss_fn": loss_fn}
    batch = weights()["batch"]
    executed("the final API", names)
    params, state = names["params"], names["opt_state"]
    losses = [float(loss_fn(params, batch))]
    for _ in range(STEPS):
        params, state = names["train_step"](params, state, batch)
        losses.append(float(loss_fn(params, batch)))
    assert losses == sorted(losses, reverse=True)
    assert params["w"].dtype == jnp.bfloat16
    assert state.count == STEPS


# The README of jaxamp.

# What the reader writes for `...`: a classifier of points by their nearest corner.
BODY = """\
  x, y = minibatch
  logits = jnp.tanh(x @ model_state["up"]) @ model_state["down"]
  loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))
  accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == y)
"""


def points(count: int) -> tuple[Any, Any]:
    x = np.random.default_rng(count).normal(size=(64, 2)).astype(np.float32)
    return x, (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).astype(np.int32)


def amp_names() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0))
    optimizer = optax.adam(3e-2)
    model = {
        "up": jax.random.normal(keys[0], (2, 32)),
        "down": jax.random.normal(keys[1], (32, 4)) / 6,
    }
    metrics: list[tuple[float, float]] = []
    return {
        "jax": jax,
        "jnp": jnp,
        "optax": optax,
        "jaxamp": jaxamp,
        "model_state": model,
        "optimizer": optimizer,
        "opt_state": optimizer.init(model),
        "dataloader": [points(number) for number in range(30)],
        "metrics": metrics,
        "log_metrics": lambda loss, accuracy: metrics.append((float(loss), float(accuracy))),
    }


def looped(names: dict[str, Any]) -> list[tuple[float, float]]:
    parts = ("model_state", "opt_state", "optimizer", "dataloader")
    model, _ = names["train_loop"](*(names[part] for part in parts))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model)} == {"float32"}
    return names["metrics"]


def usual_loop() -> dict[str, Any]:
    return executed("the usual loop", amp_names(), changes=[("  ...\n", BODY)])


@runs("usage in short")
def test_usage_in_short():
    names: dict[str, Any] = {**amp_names(), "minibatch": points(0)}
    names["model"] = names["model_state"]
    body = BODY.replace("model_state", "model") + "  return loss\n"
    executed("usage in short", names, changes=[("  ...\n", body)])
    exact = jax.grad(names["loss"])(names["model"], names["minibatch"])
    for name in exact:
        error = np.linalg.norm(names["grad"][name] - exact[name])
        assert 0 < error <= 8 * halfstep.FORMATS["f16"].eps * np.linalg.norm(exact[name])
    assert (names["scaler_state"].scaler, names["scaler_state"].count) == (2**15, 1)
    # In the text: "Replace `loss_fn(model, minibatch)` with `jaxamp.amp(loss_fn)(model,minibatch)`"
    value = eval("jaxamp.amp(loss)(model,minibatch)", names)
    np.testing.assert_allclose(value, names["loss"](names["model"], names["minibatch"]), rtol=1e-3)


@runs("the usual loop")
def test_the_usual_loop():
    metrics = looped(usual_loop())
    assert metrics[-1][0] < 0.5 * metrics[0][0]
    assert metrics[-1][1] > 0.9


@runs("the loop with amp")
def test_the_loop_with_amp():
    names = usual_loop()
    exact = looped(names)[:]
    executed("the loop with amp", names)
    # As typed, the loop raises for everybody: the README's `amp` is no name, ...
    with pytest.raises(NameError, match="name 'amp' is not defined"):
        looped(names)
    # ... the state is not handed to the step, and the fourth argument is not the static one.
    changes = [
        ("amp.DynamicScalerState()", "jaxamp.DynamicScalerState()"),
        ("      minibatch,\n      optimizer)", "      minibatch, dynamic_scaler_state, optimizer)"),
        ("static_argnums=3", "static_argnums=4"),
    ]
    executed("the loop with amp", names, changes=changes)
    names["metrics"].clear()
    metrics = looped(names)
    np.testing.assert_allclose(metrics[0][0], exact[0][0], rtol=1e-3)
    np.testing.assert_allclose(metrics[-1][0], exact[-1][0], rtol=0.05)
    assert metrics[-1][1] > 0.9
    amp_loss_fn = jaxamp.amp(names["loss_fn"])
    assert contractions(amp_loss_fn, names["model_state"], points(0)) == ["float16", "float16"]
    # In the text: the compute dtype is a keyword.
    spelled = eval("amp(loss_fn, compute_dtype=jnp.bfloat16)", {**names, "amp": jaxamp.amp})
    assert contractions(spelled, names["model_state"], points(0)) == ["bfloat16", "bfloat16"]


@runs("a precision function")
def test_a_precision_function():
    """`cast_tree` is jaxamp's own, with the dtype first; jaxamp does not export it."""
    typed = {"Type": type, "Sequence": Sequence, "Any": Any, "Dict": dict, "eqx": eqx}
    typed["cast_tree"] = lambda dtype, tree: mpx.cast_tree(tree, dtype)
    function = executed("a precision function", typed)["use_compute_precision"]
    for operands in ((jnp.ones(2), jnp.zeros(2)), (jnp.ones(2), jnp.arange(2))):
        dtypes = [x.dtype for x in operands]
        options = {"preferred_element_type": jnp.float32, "axis": 1}
        made = function(jnp.float16, dtypes, *operands, **options)
        ours = jaxamp.use_compute_precision(jnp.float16, dtypes, *operands, **options)
        assert [x.dtype for x in made[0]] == [x.dtype for x in ours[0]]
        if all(dtype == jnp.float32 for dtype in dtypes):
            assert made[1] == ours[1] == {"preferred_element_type": jnp.float16, "axis": 1}
    model, batch = amp_names()["model_state"], points(0)
    loss = usual_loop()["loss_fn"]
    for policy in (
        {jax.lax.dot_general_p: function, jax.lax.tanh_p: function},
        {jax.lax.dot_general_p: jaxamp.use_compute_precision, jax.lax.tanh_p: function},
    ):
        func = jaxamp.amp(loss, compute_dtype=jnp.bfloat16, amp_policy=policy)
        assert contractions(func, model, batch) == ["bfloat16", "bfloat16"]
        np.testing.assert_allclose(func(model, batch)[0], loss(model, batch)[0], rtol=0.02)


@runs("the structure of the state")
def test_the_structure_of_the_state():
    names: dict[str, Any] = {"NamedTuple": NamedTuple, "jax": jax, "jnp": jnp, "__name__": "readme"}
    shown = executed("the structure of the state", names)["DynamicScalerState"]()
    ours = jaxamp.DynamicScalerState()
    assert ours._fields[:4] == shown._fields
    for mine, theirs in zip(ours, shown, strict=False):
        assert (mine, mine.dtype) == (theirs, theirs.dtype)


@runs("the signature of the gradient function")
def test_the_signature_of_the_gradient_function():
    names: dict[str, Any] = {"Callable": Callable}
    shown = executed("the signature of the gradient function", names)
    ours = inspect.unwrap(jaxamp.dynamic_scale_value_and_grad)
    assert plain_signature(ours) == plain_signature(shown["dynamic_scale_value_and_grad"])


def test_scopes_in_the_text():
    """'If two or more active scopes match policies in `amp_policy` the *outermost* is used.'"""

    def func(w: Any, x: Any) -> Any:
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return x @ w

    policy = {"outer": jaxamp.use_original_precision, "inner": jaxamp.use_compute_precision}
    assert contractions(
        jaxamp.amp(func, amp_policy=policy), jnp.ones((2, 2)), jnp.ones((2, 2))
    ) == ["float32"]
