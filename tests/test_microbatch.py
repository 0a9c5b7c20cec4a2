"""Accumulation: bit-equal to the documented order, one verdict, state handed on."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import DynamicLossScaling, NoLossScaling

pytestmark = [pytest.mark.core, pytest.mark.types]

N = 4


def loss(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def problem(key):
    keys = jax.random.split(key, 3)
    x, y = jax.random.normal(keys[0], (16, 3)), jax.random.normal(keys[1], (16,))
    return jax.random.normal(keys[2], (3,)), {"x": x, "y": y}


@pytest.mark.parametrize("policy", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_documented_order_bit_for_bit(policy: str, reduction, getkey):
    """Summed in float32 in the order of the microbatches, then unscaled, then times 1/n.

    The gradient of one example is the example itself, so that nothing but the order of the sum is
    left to the compiler.
    """
    n, scale = 48, 2.0**6 if policy == "f16" else 1.0
    scaling = DynamicLossScaling(scale, period=1) if policy == "f16" else NoLossScaling()
    w, x = jnp.asarray(1.5), 10 * jax.random.normal(getkey(), (n,))
    value, new, _, grads = jax.jit(
        halfstep.filter_value_and_grad(
            lambda w, x: w * x[0],
            scaling,
            policy=f"{policy}:inputs",
            microbatches=n,
            batch=("x",),
            microbatch_reduction=reduction,
        )
    )(w, x)
    low = halfstep.cast_tree(np.asarray(x), policy)
    total = value_sum = np.float32(0)
    for example in low:
        total = total + np.float32(example) * np.float32(scale)
        value_sum = value_sum + np.float32(low.dtype.type(1.5) * example)
    factor = np.float32(1 / n if reduction == "mean" else 1)
    assert grads == total / np.float32(scale) * factor
    assert value == value_sum * factor
    if policy == "f16":
        assert new.loss_scaling == 2 * scale  # Adjusted once, not once a microbatch.


def test_the_order_matters():
    """In float32 these add up to 1 from the first to the last, and to 0 from the last."""
    gradient = halfstep.filter_grad(
        lambda w, x: w * x[0],
        policy="f32",
        microbatches=4,
        batch=("x",),
        microbatch_reduction="sum",
    )
    x = jnp.asarray([1e8, 1.0, -1e8, 1.0])
    assert jax.jit(gradient)(jnp.asarray(1.0), x)[2] == 1
    assert jax.jit(gradient)(jnp.asarray(1.0), x[::-1])[2] == 0


def test_mean_is_the_whole_batch_in_float32(getkey):
    w, batch = problem(getkey())
    exact = jax.grad(loss)(w, batch)
    _, _, grads = halfstep.filter_grad(loss, policy="f32", microbatches=N, batch=("batch",))(
        w, batch
    )
    # Another order of 16 additions, each within half an epsilon of the largest partial sum.
    bound = 16 * halfstep.FORMATS["f32"].eps * float(jnp.abs(exact).max() + jnp.abs(grads).max())
    assert float(jnp.abs(grads - exact).max()) <= bound


@pytest.mark.parametrize("bad", range(N))
def test_one_bad_microbatch_is_one_skipped_step(bad: int, getkey):
    w, batch = problem(getkey())
    batch["x"] = batch["x"].at[bad].set(jnp.nan)
    scaling, finite, _ = halfstep.filter_grad(
        loss, DynamicLossScaling(2.0**6), policy="f16", microbatches=N, batch=("batch",)
    )(w, batch)
    assert not finite
    assert not bool(finite.loss_finite)
    assert scaling.loss_scaling == 2.0**5


def test_float32_sums_do_not_overflow_where_float16_would():
    """Four gradients of 40000 in float16; their sum is 160000."""
    gradient = halfstep.filter_grad(
        lambda w, x: jnp.sum(w[None] * x),
        DynamicLossScaling(1.0),
        policy="f16",
        microbatches=4,
        batch=("x",),
        microbatch_reduction="sum",
    )
    _, finite, grads = gradient(jnp.zeros(1), jnp.full((4, 1), 40000.0))
    assert finite
    assert grads[0] == 160000


@pytest.mark.parametrize(("dtype", "n"), [("bfloat16", 767), ("float16", 2051), ("float32", 5)])
def test_sums_are_float32_also_for_narrower_parameters(dtype: str, n: int):
    """In a 16-bit format, a sum of ones ends at 256 or 2048: one more changes nothing."""
    gradient = halfstep.filter_grad(
        lambda w, x: jnp.sum(w * x),
        policy="bf16:inputs",
        microbatches=n,
        batch=("x",),
        microbatch_reduction="sum",
    )
    grads = jax.jit(gradient)(jnp.ones((), dtype), jnp.ones(n))[2]
    assert grads.dtype == jnp.float32
    assert grads == n


def test_sums_are_float64_for_parameters_that_are():
    with jax.enable_x64(True):
        x = jnp.asarray([1.0, 2.0**-40])
        gradient = halfstep.filter_grad(
            lambda w, x: jnp.sum(w * x),
            policy="f32",
            microbatches=2,
            batch=("x",),
            microbatch_reduction="sum",
        )
        grads = gradient(jnp.ones(()), x)[2]
        assert grads.dtype == jnp.float64
        assert grads == 1 + 2.0**-40


def test_keys_are_split_and_the_rest_is_shared():
    def noisy(w, x, key, table):
        assert table.shape == (3,)
        return jnp.sum(w[None] * x) + jnp.sum(table), {"draw": jax.random.bits(key), "k": "static"}

    key = jax.random.key(7)
    (_, aux), *_ = halfstep.filter_value_and_grad(
        noisy, policy="f32", has_aux=True, microbatches=2, batch=("x",)
    )(jnp.ones(1), jnp.ones((4, 1)), key, jnp.ones(3))
    expected = jax.vmap(jax.random.bits)(jax.random.split(key, 2))
    assert np.array_equal(aux["draw"], expected)
    assert aux["k"] == "static"


@pytest.mark.parametrize("form", ["bare", "dict", "tuple"])
def test_carry_hands_state_from_one_microbatch_to_the_next(form: str):
    def stateful(w, x, state):
        new = {"mean": 0.5 * state["mean"] + 0.5 * jnp.mean(x).astype(jnp.float32)}
        aux = {"bare": new, "dict": {"state": new, "n": x[0]}, "tuple": (x[0], new)}[form]
        return jnp.sum(w * x), aux

    x = jnp.arange(4.0)
    state = {"mean": jnp.asarray(8.0)}
    transform = halfstep.filter_value_and_grad(
        stateful, has_aux=True, microbatches=2, batch=("x",), carry="state", keep=("state",)
    )
    (_, aux), *_ = transform(jnp.asarray(1.0), x, state)
    # The microbatches are (0, 2) and (1, 3): 8 -> 4.5 -> 3.25.
    new = {"bare": lambda: aux, "dict": lambda: aux["state"], "tuple": lambda: aux[1]}[form]()
    assert new["mean"] == 3.25
    if form == "dict":
        assert np.array_equal(aux["n"], [0, 1])


def test_a_carried_key_is_handed_on_and_not_split():
    def noisy(w, x, state):
        key, draw = jax.random.split(state["key"])
        return jnp.sum(w * x), {"state": {"key": key}, "draw": jax.random.bits(draw)}

    (_, aux), *_ = halfstep.filter_value_and_grad(
        noisy, has_aux=True, microbatches=2, batch=("x",), carry="state"
    )(jnp.asarray(1.0), jnp.ones(4), {"key": jax.random.key(0)})
    first, draw = jax.random.split(jax.random.key(0))
    assert aux["draw"][0] == jax.random.bits(draw)
    last, draw = jax.random.split(first)
    assert aux["draw"][1] == jax.random.bits(draw)
    assert (jax.random.key_data(aux["state"]["key"]) == jax.random.key_data(last)).all()


def test_equinox_state_is_carried():
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(1, "batch", mode="ema")

    def stateful(w, x, state):
        out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            x[:, None], state
        )
        return jnp.mean(out * w), state

    (_, new), *_ = halfstep.filter_value_and_grad(
        stateful, policy="f32", has_aux=True, microbatches=2, batch=("x",), carry="state"
    )(jnp.asarray(1.0), jnp.arange(8.0), state)
    expected = state
    for i in range(2):
        expected = stateful(jnp.asarray(1.0), jnp.arange(8.0)[i::2], expected)[1]
    assert eqx.tree_equal(new, expected)


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        ({}, ("x",), r"needs to know what to split: pass batch=\(\.\.\.\) with names out of x"),
        ({"batch": ("x",)}, (jnp.ones(5),), r"multiple of 2; `x` is float32\[5\], with a leading"),
        ({"batch": ("x",)}, (jnp.ones(()),), r"`x` is float32\[\], with no leading axis"),
        ({"batch": ("y",)}, (jnp.ones(4),), r"'y' in `batch` selects nothing.*'x'"),
        ({"batch": ("w",)}, (jnp.ones(4),), "`w`, which belongs to the first argument"),
        ({"batch": ("x",), "carry": "z"}, (jnp.ones(4),), "carry='z' is not an argument after"),
        ({"batch": ("x",), "carry": "x"}, (jnp.ones(4),), "carry='x' is also split"),
    ],
)
def test_errors(options, args, message):
    def func(w, x):
        return jnp.sum(w * x), None

    with pytest.raises(ValueError, match=message):
        halfstep.filter_grad(func, microbatches=2, has_aux=True, **options)(jnp.ones(2), *args)


def test_carry_that_does_not_come_back():
    def func(w, x, state):
        return jnp.sum(w * x), {"other": (state, state)}

    with pytest.raises(ValueError, match=r"carry='state'.*exactly one entry.*found 0"):
        halfstep.filter_grad(func, microbatches=2, has_aux=True, batch=("x",), carry="state")(
            jnp.asarray(1.0), jnp.ones(4), {"m": jnp.ones(2)}
        )


def test_sharded_batch_is_not_moved(mesh: jax.sharding.Mesh):
    """Strided splitting keeps every example on its device: the only collective is the sum."""
    spec = jax.sharding.PartitionSpec
    sharded = jax.sharding.NamedSharding(mesh, spec("data"))
    replicated = jax.sharding.NamedSharding(mesh, spec())
    gradient = jax.jit(
        lambda w, batch: halfstep.filter_grad(loss, policy="f32", microbatches=N, batch=("batch",))(
            w, batch
        )[2],
        in_shardings=(replicated, sharded),
    )
    w, batch = problem(jax.random.key(0))
    text = gradient.lower(w, batch).compile().as_text()
    assert text is not None
    assert "all-reduce" in text
    for moved in ("all-gather", "all-to-all", "collective-permute"):
        assert moved not in text


def test_one_scan_body_not_one_copy_a_microbatch():
    w, batch = problem(jax.random.key(0))

    def equations(n):
        transform = halfstep.filter_grad(loss, policy="f32", microbatches=n, batch=("batch",))
        return str(jax.make_jaxpr(lambda w, b: transform(w, b)[2])(w, batch)).count("dot_general")

    assert equations(8) == equations(2)


def test_keys_of_the_old_style():
    """Each microbatch would have the same randomness, so it is said."""

    def noisy(w, batch, key):
        return jnp.mean(batch["x"] @ w) + jax.random.uniform(key)

    w, batch = problem(jax.random.key(0))
    options = {"policy": "f32", "microbatches": N, "batch": ("batch",)}
    gradient = halfstep.filter_value_and_grad(noisy, **options)
    with pytest.warns(UserWarning, match=r"`key` is uint32\[2\], as PRNG keys of the old style"):
        gradient(w, batch, jax.random.PRNGKey(0))
    gradient(w, batch, jax.random.wrap_key_data(jax.random.PRNGKey(0)))
