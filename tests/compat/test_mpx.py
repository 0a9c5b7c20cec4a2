"""`halfstep.compat.mpx`: mpx's documented calls run, and what mpx gets wrong is right."""

import inspect
import io
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import halfstep
import halfstep.compat.mpx as compat

NAMES = {
    *("BFLOAT16_MAX", "FLOAT16_MAX", "HALF_PRECISION_DATATYPE", "DynamicLossScaling"),
    *("all_finite", "calculate_scaled_grad", "cast_function", "cast_to_bfloat16"),
    *("cast_to_float16", "cast_to_float32", "cast_to_full_precision", "cast_to_half_precision"),
    *("cast_tree", "filter_grad", "filter_value_and_grad", "force_full_precision"),
    *("half_precision_datatype", "optimizer_update", "scaled", "select_tree"),
    "set_half_precision_datatype",
}


@pytest.fixture(autouse=True)
def _restore_half() -> Iterator[None]:
    yield
    compat.set_half_precision_datatype("float16")


def make_scaling(mpx: Any = compat, scale: Any = 2.0**10, **options: Any) -> Any:
    floor = jnp.ones((), dtype=jnp.float32)
    scale = jnp.asarray(scale, jnp.float32)
    return mpx.DynamicLossScaling(loss_scaling=scale, min_loss_scaling=floor, **options)


def assert_same_bits(actual: Any, expected: Any) -> None:
    assert jtu.tree_structure(actual) == jtu.tree_structure(expected)
    for a, b in zip(jtu.tree_leaves(actual), jtu.tree_leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# The names.


def test_public_names():
    assert set(compat.__all__) == NAMES
    for name in NAMES:
        assert getattr(compat, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'FLOAT8_MAX'"):
        _ = compat.FLOAT8_MAX  # pyright: ignore[reportAttributeAccessIssue]


def test_names_and_signatures_are_those_of_mpx():
    mpx = pytest.importorskip("mpx")
    public = {name for name, value in vars(mpx).items() if not isinstance(value, types.ModuleType)}
    lazy = {name for name, value in vars(type(mpx)).items() if isinstance(value, property)}
    assert {name for name in public | lazy if not name.startswith("_")} == NAMES
    for name in NAMES:
        if inspect.isfunction(theirs := getattr(mpx, name)) or inspect.isclass(theirs):
            ours = inspect.signature(getattr(compat, name)).parameters.values()
            both = zip(inspect.signature(theirs).parameters.values(), ours, strict=False)
            for wanted, got in both:
                assert (got.name, got.kind) == (wanted.name, wanted.kind), name
                if name != "force_full_precision":  # Its default is one of mpx's defects.
                    assert got.default == wanted.default, name
            extra = list(ours)[len(inspect.signature(theirs).parameters) :]
            assert all(p.kind is p.VAR_KEYWORD for p in extra), name
    for name in ("FLOAT16_MAX", "BFLOAT16_MAX"):
        assert_same_bits(getattr(compat, name), getattr(mpx, name))
    assert mpx.half_precision_datatype() is compat.half_precision_datatype() is jnp.float16


def test_constants():
    assert compat.FLOAT16_MAX == 65504
    assert compat.FLOAT16_MAX.dtype == compat.BFLOAT16_MAX.dtype == jnp.float32
    assert float(compat.BFLOAT16_MAX) == halfstep.FORMATS["bf16"].max
    assert float(jax.jit(lambda: compat.FLOAT16_MAX)()) == 65504


# The training step of mpx's documentation, in small: a vision transformer's block on a mesh.


class Block(eqx.Module):
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    layer_norm: eqx.nn.LayerNorm
    num_heads: int
    mpx: Any = eqx.field(static=True)

    def attention(self, q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.T
        scores /= jnp.sqrt(q.shape[-1])
        scores = self.mpx.force_full_precision(jax.nn.softmax, scores.dtype)(scores, axis=-1)
        return scores @ v

    def __call__(self, inputs: Any) -> Any:
        normed = jax.vmap(self.mpx.force_full_precision(self.layer_norm, inputs.dtype))(inputs)
        tokens, width = inputs.shape
        qkv = jax.vmap(self.qkv)(normed).reshape(tokens, 3, self.num_heads, -1)
        q, k, v = jnp.moveaxis(qkv, (1, 2), (0, 1))
        mixed = jax.vmap(self.attention)(q, k, v)
        mixed = jax.vmap(self.out)(jnp.moveaxis(mixed, 0, 1).reshape(tokens, width))
        return inputs + mixed


class Transformer(eqx.Module):
    embed: eqx.nn.Linear
    block: Block
    head: eqx.nn.Linear

    def __init__(self, mpx: Any, key: Any):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Linear(12, 16, key=keys[0])
        self.block = Block(
            qkv=eqx.nn.Linear(16, 48, key=keys[1]),
            out=eqx.nn.Linear(16, 16, key=keys[2]),
            layer_norm=eqx.nn.LayerNorm(16),
            num_heads=2,
            mpx=mpx,
        )
        self.head = eqx.nn.Linear(16, 5, key=keys[3])

    def __call__(self, image: Any) -> Any:
        tokens = self.block(jax.vmap(self.embed)(image))
        return self.head(self.block.mpx.force_full_precision(jnp.mean, image.dtype)(tokens, axis=0))


def loss_and_accuracy(
    model: Transformer, batch: dict, sharded: Any, replicated: Any, key: Any, decay: float = 0.0
) -> tuple[Any, Any]:
    mpx = model.block.mpx
    batch, model = eqx.filter_shard(batch, sharded), eqx.filter_shard(model, replicated)
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    logits = jax.vmap(model)(batch["input"])
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    losses = mpx.force_full_precision(cross_entropy, logits.dtype)(logits, batch["target"])
    hits = (jnp.argmax(logits, axis=-1) == batch["target"]).astype(losses.dtype)
    mean = mpx.force_full_precision(jnp.mean, losses.dtype)
    arrays = jtu.tree_leaves(eqx.filter(model, eqx.is_array))
    weights = jnp.concatenate([x.flatten() for x in arrays])
    size = mpx.force_full_precision(jnp.mean, jnp.float32)(jnp.abs(weights))
    return mean(losses) + decay * size, mean(hits)


@eqx.filter_jit
def make_step(
    model: Any, optimizer: Any, state: Any, scaling: Any, mixed: bool, batch: dict, *rest: Any
) -> tuple[Any, ...]:
    mpx = model.block.mpx
    (loss, accuracy), scaling, grads_finite, grads = mpx.filter_value_and_grad(
        loss_and_accuracy, scaling=scaling, has_aux=True, use_mixed_precision=mixed
    )(model, batch, *rest)
    model, state = mpx.optimizer_update(model, optimizer, state, grads, grads_finite)
    return model, state, scaling, loss, accuracy, grads_finite, grads


def train(mpx: Any, optimizer: Any, scaling: Any, mixed: bool, mesh: Any, steps: int) -> list:
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    replicated = NamedSharding(mesh, PartitionSpec())
    model = eqx.filter_jit(Transformer)(mpx, jax.random.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    model, state, scaling = eqx.filter_shard((model, state, scaling), replicated)
    images = jax.random.normal(jax.random.key(1), (8, 4, 12))
    batch = jax.device_put({"input": images, "target": jnp.arange(8) % 5}, sharded)
    key = jax.random.key(2)
    history = []
    for _ in range(steps):
        model, state, scaling, loss, _, finite, grads = make_step(
            model, optimizer, state, scaling, mixed, batch, sharded, replicated, key, 0.1
        )
        history.append((loss, finite, jtu.tree_leaves(grads), scaling))
    assert all(x.dtype == jnp.float32 for x in jtu.tree_leaves(eqx.filter(model, eqx.is_array)))
    return history


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "half", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow), None], ids=str
)
def test_documented_training_step(half: str | None, mesh: jax.sharding.Mesh):
    if half is not None:
        compat.set_half_precision_datatype(half)
    scaling = make_scaling(scale=compat.FLOAT16_MAX, period=2000)
    history = train(compat, optax.adamw(1e-2), scaling, half is not None, mesh, steps=20)
    assert all(finite.dtype == bool and bool(finite) for _, finite, _, _ in history)
    assert history[-1][0] < 0.5 * history[0][0]
    last = history[-1][3]
    assert (last.loss_scaling, last.counter) == (2**15, 0 if half is None else 20)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_documented_training_step_has_the_bits_of_mpx(mesh: jax.sharding.Mesh):
    runs = []
    for library in (pytest.importorskip("mpx"), compat):
        history = train(library, optax.sgd(0.1), make_scaling(library), True, mesh, steps=4)
        runs.append([(*rest, scaling.loss_scaling) for *rest, scaling in history])
    assert_same_bits(runs[1], runs[0])


def square(params: dict, x: Any, scale: Any = 1.0) -> Any:
    return jnp.mean((params["w"] * x) ** 2) * scale


def square_aux(params: dict, x: Any, scale: Any = 1.0) -> tuple[Any, Any]:
    return square(params, x, scale), {"mean": jnp.mean(x), "n": 3}


@pytest.mark.rows(1)
@pytest.mark.parametrize("transform", ["filter_grad", "filter_value_and_grad"])
@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16, None])
@pytest.mark.usefixtures("standard_promotion")
def test_order_of_returns_and_same_bits(
    transform: str, has_aux: bool, half: Any, monkeypatch: pytest.MonkeyPatch
):
    func = square_aux if has_aux else square
    params, x = {"w": jnp.array([0.3, -1.7, 4.1])}, jnp.array([1.1, 0.7, -0.3])

    def run(library: Any) -> dict[str, Any]:
        scaling = make_scaling(library)
        wrapped = getattr(library, transform)(func, scaling, has_aux, half is not None)
        out = wrapped(params, x, scale=0.5)
        names = ["value", "scaling", "finite", "grads"]
        if transform == "filter_grad":
            names = [*names[1:], "aux"] if has_aux else names[1:]
        parts: dict[str, Any] = dict(zip(names, out, strict=True))
        if has_aux and transform == "filter_value_and_grad":
            parts["value"], parts["aux"] = parts["value"]
        assert isinstance(parts["finite"], jax.Array)
        assert isinstance(parts["scaling"], library.DynamicLossScaling)
        return parts

    if half is not None:
        compat.set_half_precision_datatype(half)
    ours = run(compat)
    assert ours["finite"].dtype == bool
    assert ours["grads"]["w"].dtype == jnp.float32
    if has_aux:
        assert ours["aux"]["n"] == 3
        assert ours["aux"]["mean"].dtype == jnp.float32  # mpx: float16.
    mpx = pytest.importorskip("mpx")
    monkeypatch.setattr(mpx._dtypes, "HALF_PRECISION_DATATYPE", half)
    theirs = run(mpx)
    for name in set(theirs) - {"aux", "scaling"}:
        assert_same_bits(ours[name], theirs[name])
    for name in ("loss_scaling", "counter"):
        assert_same_bits(getattr(ours["scaling"], name), getattr(theirs["scaling"], name))


@pytest.mark.parametrize("mixed", [False, True])
def test_calculate_scaled_grad(mixed: bool, standard_promotion: None):
    params, x = {"w": jnp.array([0.3, -1.7, 4.1])}, jnp.array([1.1, 0.7, -0.3])

    def run(library: Any) -> Any:
        scaling = make_scaling(library, 2.0**4)
        return library.calculate_scaled_grad(square_aux, scaling, True, mixed)(params, x)

    (value, aux), grads = run(compat)
    plain = square(compat.cast_tree(params, jnp.float16), x.astype(jnp.float16))
    assert value == (16 * plain.astype(jnp.float32) if mixed else square(params, x))
    assert grads["w"].dtype == (jnp.float16 if mixed else jnp.float32)
    assert aux["n"] == 3
    assert_same_bits(grads, run(pytest.importorskip("mpx"))[1])


def test_scaled():
    scaling = make_scaling(scale=8.0)
    assert compat.scaled(lambda x: x * 2, scaling)(jnp.float32(3)) == 48
    assert compat.scaled(lambda x: (x, "aux"), scaling, has_aux=True)(jnp.float32(3)) == (24, "aux")


# Casting.


def test_casts():
    tree = {"w": jnp.ones(2), "n": np.ones(2, np.float32), "i": jnp.arange(2), "s": "text"}
    for cast, dtype in (
        (compat.cast_to_half_precision, jnp.float16),
        (compat.cast_to_float16, jnp.float16),
        (compat.cast_to_bfloat16, jnp.bfloat16),
        (compat.cast_to_full_precision, jnp.float32),
        (compat.cast_to_float32, jnp.float32),
        (lambda tree: compat.cast_tree(tree, jnp.bfloat16), jnp.bfloat16),
    ):
        out = cast(compat.cast_to_bfloat16(tree))
        assert out["w"].dtype == out["n"].dtype == dtype
        assert out["i"].dtype == jnp.int32
        assert out["s"] == "text"


def test_cast_function_returns_its_dtype_by_default():
    def func(a: Any, *, b: Any) -> dict:
        assert a.dtype == b.dtype == jnp.bfloat16
        return {"sum": a + b, "exact": jnp.ones(2, jnp.float32)}

    out = compat.cast_function(func, jnp.bfloat16)(jnp.ones(2), b=jnp.ones(2))
    assert out["sum"].dtype == out["exact"].dtype == jnp.bfloat16
    out = compat.cast_function(func, jnp.bfloat16, jnp.float32)(jnp.ones(2), b=jnp.ones(2))
    assert out["sum"].dtype == out["exact"].dtype == jnp.float32


class Pair(NamedTuple):
    first: Any
    second: Any


RESULTS: dict[str, Callable] = {
    "dict": lambda x: {"a": x},
    "list": lambda x: [x, x],
    "namedtuple": lambda x: Pair(x, x),
    "nested": lambda x: (x, {"a": [x]}),
    "array": lambda x: x,
}


@pytest.mark.parametrize("build", RESULTS.values(), ids=RESULTS)
def test_force_full_precision_casts_any_pytree(build: Callable):
    def func(x: Any) -> Any:
        assert x.dtype == jnp.float32
        return build(x)

    for dtype in (jnp.float16, jnp.bfloat16):
        # Without a return dtype, the results go back to what came in, in either mode.
        for out in (
            compat.force_full_precision(func)(jnp.ones(2, dtype)),
            compat.force_full_precision(func, dtype)(jnp.ones(2)),
        ):
            assert jtu.tree_structure(out) == jtu.tree_structure(build(0))
            assert {leaf.dtype for leaf in jtu.tree_leaves(out)} == {np.dtype(dtype)}


# What "half" means.


@pytest.mark.parametrize("bfloat16", ["bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)])
def test_set_half_precision_datatype_works(bfloat16: Any):
    traces = []

    @jax.jit
    def cast(x: Any) -> Any:
        traces.append(compat.half_precision_datatype())
        return compat.cast_to_half_precision(x)

    assert cast(jnp.ones(2)).dtype == jnp.float16
    compat.set_half_precision_datatype(bfloat16)
    assert compat.half_precision_datatype() is compat.HALF_PRECISION_DATATYPE is jnp.bfloat16
    assert cast(jnp.ones(2)).dtype == jnp.bfloat16
    scaling, finite, _ = compat.filter_grad(
        lambda w: jnp.sum(w.astype(jnp.float32)) if w.dtype == jnp.bfloat16 else 1 / 0,
        make_scaling(),
    )(jnp.ones(2))
    assert finite
    compat.set_half_precision_datatype("float16")
    assert cast(jnp.ones(2)).dtype == jnp.float16
    assert traces == [jnp.float16, jnp.bfloat16]
    assert scaling.counter == 1


def test_half_is_its_own_in_each_thread_and_beside_the_core():
    compat.set_half_precision_datatype("bfloat16")
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(compat.half_precision_datatype()))
    thread.start()
    thread.join()
    assert seen == [jnp.float16]
    with halfstep.half_precision("f16"):
        assert compat.half_precision_datatype() is jnp.bfloat16
    compat.set_half_precision_datatype("float16")
    assert halfstep.half_dtype() == jnp.bfloat16


def test_set_half_precision_datatype_refuses():
    with pytest.raises(ValueError, match=r"required .*; got 'int8'"):
        compat.set_half_precision_datatype("int8")
    with pytest.raises(ValueError, match="'float32', which has 32 bits"):
        compat.set_half_precision_datatype("float32")
    with pytest.raises(TypeError, match='required "float16" or "bfloat16"'):
        compat.set_half_precision_datatype(jnp.int32)
    assert compat.half_precision_datatype() is jnp.float16


# Loss scaling.


def test_scale_of_the_documentation_reports_the_loss():
    scaling = make_scaling(scale=compat.FLOAT16_MAX)
    assert scaling.loss_scaling == 2**15
    loss = jnp.asarray(2.21, jnp.float16)  # 2.21 * 2**15 is above 65504.
    value, _, finite, grads = compat.filter_value_and_grad(lambda w: 1.0 * w, scaling)(loss)
    assert value == loss.astype(jnp.float32)
    assert finite
    assert grads == 1


def test_growth_step_changes_neither_value_nor_gradients():
    params, x = {"w": jnp.array([1.0, 2.0])}, jnp.array([3.0, 4.0])
    grown = make_scaling(scale=8.0, period=1)
    still = make_scaling(scale=8.0, period=2000)
    results = [compat.filter_value_and_grad(square, s)(params, x) for s in (grown, still)]
    assert [float(result[1].loss_scaling) for result in results] == [16, 8]
    assert_same_bits((results[0][0], results[0][3]), (results[1][0], results[1][3]))
    assert_same_bits(
        compat.filter_grad(square, grown)(params, x)[2],
        compat.filter_grad(square, still)(params, x)[2],
    )
    assert results[0][0] == square(params, x)


def test_scale_stays_a_power_of_two_at_its_limit():
    scaling = make_scaling(scale=2.0**15, period=1)
    for _ in range(3):
        scaling = scaling.adjust(jnp.asarray(True))
    assert scaling.loss_scaling == 2**15
    for _ in range(5):
        scaling = scaling.adjust(jnp.asarray(False))
    assert scaling.loss_scaling == 2**10


def test_constructor():
    scaling = compat.DynamicLossScaling(jnp.float16(100.0), np.float32(3.0), 4, 7, jnp.int32(5))
    assert isinstance(scaling, halfstep.DynamicLossScaling)
    assert (scaling.loss_scaling, scaling.min_loss_scaling) == (64, 2)
    assert (scaling.factor, scaling.period, scaling.counter) == (4, 7, 5)
    assert scaling.adjust(True).counter == 6
    assert make_scaling(scale=compat.BFLOAT16_MAX).loss_scaling == 2**15
    with pytest.raises(ValueError, match=r"`loss_scaling` must be a power of two.*got 0"):
        compat.DynamicLossScaling(0.0, 1.0)
    with pytest.raises(TypeError, match=r"`min_loss_scaling` must be known.*outside jit"):
        jax.jit(lambda x: compat.DynamicLossScaling(2.0**15, x))(1.0)


def test_state_survives():
    scaling = make_scaling(scale=2.0**7, period=11, counter=3)

    def fields(s: Any) -> tuple:
        return (float(s.loss_scaling), int(s.counter), s.min_loss_scaling, s.period, s.factor)

    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, scaling)
    buffer.seek(0)
    copies = (
        pickle.loads(pickle.dumps(scaling)),
        jax.jit(lambda s: s)(scaling),
        eqx.filter_jit(lambda s: s)(scaling),
        jtu.tree_unflatten(jtu.tree_structure(scaling), jtu.tree_leaves(scaling)),
        eqx.tree_deserialise_leaves(buffer, make_scaling(period=11)),
    )
    for copy in copies:
        assert type(copy) is compat.DynamicLossScaling
        assert fields(copy) == fields(scaling) == (128, 3, 1, 11, 2)


@pytest.mark.rows(3)
@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("transform", ["filter_grad", "filter_value_and_grad"])
def test_without_mixed_precision(has_aux: bool, transform: str):
    func = square_aux if has_aux else square
    scaling = make_scaling()
    run = getattr(compat, transform)(func, scaling, has_aux, use_mixed_precision=False)
    first = 0 if transform == "filter_grad" else 1
    for bad in (False, True):
        x = jnp.array([1.0, jnp.inf if bad else 2.0])
        out = run({"w": jnp.ones(2)}, x)
        assert out[first] is scaling
        assert bool(out[first + 1]) is not bad  # mpx: True in both cases.
        assert bool(jnp.all(jnp.isfinite(out[first + 2]["w"]))) is not bad


def test_without_mixed_precision_nothing_is_cast():
    def func(params: dict, x: Any) -> Any:
        assert params["w"].dtype == x.dtype == jnp.bfloat16
        return jnp.sum(params["w"] * x)

    params, x = {"w": jnp.ones(2, jnp.bfloat16)}, jnp.ones(2, jnp.bfloat16)
    *_, grads = compat.filter_value_and_grad(func, make_scaling(), False, False)(params, x)
    assert grads["w"].dtype == jnp.bfloat16
    *_, grads = compat.filter_grad(func, make_scaling(), False, False)(params, x)
    assert grads["w"].dtype == jnp.float32


def test_finite_is_said_of_the_gradients():
    def func(w: Any) -> Any:
        return jnp.sum(w) + jnp.asarray(jnp.inf, w.dtype)

    value, scaling, finite, _ = compat.filter_value_and_grad(func, make_scaling())(jnp.ones(2))
    assert value == jnp.inf
    assert finite
    assert (scaling.loss_scaling, scaling.counter) == (2**10, 1)
    _, finite, _ = compat.filter_grad(lambda w: jnp.sum(w) * jnp.nan, scaling)(jnp.ones(2))
    assert not finite


def test_overflow_shrinks_the_scale_and_skips():
    params, x = {"w": jnp.ones(2)}, jnp.array([200.0, 1.0])
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(params: Any, scaling: Any) -> Any:
        scaling, finite, grads = compat.filter_grad(square, scaling)(params, x)
        state = optimizer.init(params)
        return compat.optimizer_update(params, optimizer, state, grads, finite)[0], scaling

    after, scaling = step(params, make_scaling(scale=2.0**15))
    assert_same_bits(after, params)
    assert scaling.loss_scaling == 2**14


@pytest.mark.rows(1)
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("mode", "std"), [("batch", 1.0), ("ema", 400.0)])
def test_batch_norm_state_keeps_its_dtype(mode: Any, std: float):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, axis_name="batch", mode=mode)

    def func(model: Any, state: Any, x: Any) -> Any:
        if std > 255:  # The variance itself is then above 65504 and cannot be computed in float16.
            model = compat.force_full_precision(model, x.dtype)
        axes: Any = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}
        out, state = jax.vmap(model, **axes)(x, state)
        return jnp.mean(out**2), state

    x = std * jax.random.normal(jax.random.key(0), (64, 2))
    traces = []

    @eqx.filter_jit
    def step(model: Any, state: Any, scaling: Any) -> Any:
        traces.append(1)
        transform = compat.filter_value_and_grad(func, scaling, has_aux=True)
        (_, state), scaling, _, _ = transform(model, state, x)
        return state, scaling

    scaling = make_scaling(scale=2.0)
    for _ in range(3):
        state, scaling = step(norm, state, scaling)
    leaves = [leaf for leaf in jtu.tree_leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float32)}
    assert compat.all_finite(leaves)
    assert jnp.max(leaves[1]) > std**2 / 2
    assert len(traces) == 1


# Update or skip.


@pytest.mark.slow
def test_optimizer_update_passes_extra_arguments(standard_promotion: None):
    optimizer = optax.lbfgs()
    params = {"w": jnp.array([3.0, -2.0])}

    def func(params: dict) -> Any:
        return jnp.sum((params["w"] - 1.0) ** 2)

    state = optimizer.init(params)
    for _ in range(3):
        value, _, finite, grads = compat.filter_value_and_grad(
            func, make_scaling(), use_mixed_precision=False
        )(params)
        params, state = compat.optimizer_update(
            params, optimizer, state, grads, finite, value=value, grad=grads, value_fn=func
        )
    # A quadratic's minimum after one exact line search; float32's rounding of values around 1.
    np.testing.assert_allclose(params["w"], 1.0, atol=4 * halfstep.FORMATS["f32"].eps)


def test_select_tree():
    one, two = jax.random.key(1), jax.random.key(2)
    a = {"w": jnp.ones(2), "k": one, "n": np.ones(2), "s": "a", "f": jnp.tanh, "x": None}
    b = {"w": jnp.zeros(2), "k": two, "n": np.zeros(2), "s": "b", "f": jnp.sin, "x": None}
    for pred, chosen in ((True, a), (False, b)):
        out = compat.select_tree(jnp.asarray(pred), a, b)
        assert (out["s"], out["f"], out["x"]) == ("a", jnp.tanh, None)
        assert out["k"] == chosen["k"]
        assert (out["w"] == chosen["w"]).all()
        assert (out["n"] == chosen["n"]).all()  # mpx takes NumPy arrays from `a`.
    with pytest.raises(TypeError, match="boolean scalar"):
        compat.select_tree(jnp.ones(2, bool), a, b)


def test_all_finite():
    tree = {"w": jnp.ones(2), "key": jax.random.key(0), "s": "text", "n": None, "f": jnp.tanh}
    assert compat.all_finite(tree)
    assert compat.all_finite(())
    assert not compat.all_finite({**tree, "v": jnp.array([jnp.nan])})
