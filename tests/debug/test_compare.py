"""A policy compared with float32, operation by operation."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import halfstep
from halfstep import FORMATS, debug
from halfstep.debug._compare.distance import absent, added, distance, sums, was_computed
from tests._rows import slow_unless

EPS = FORMATS["bf16"].eps


def _data():
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (8, 8)) / 3, jax.random.normal(keys[1], (4, 8))


def _plain(w, x):
    hidden = jnp.tanh(x @ w)
    return jnp.mean(jax.nn.softmax(hidden @ w) ** 2)


def _scan(w, x):
    def turn(h, scale):
        h = jnp.tanh(h @ w) * scale
        return h, jnp.sum(h)

    h, sums = jax.lax.scan(turn, x, jnp.arange(1, 4, dtype=jnp.float32), reverse=True)
    return jnp.mean(h) + jnp.mean(sums)


def _while(w, x):
    def turn(state):
        number, h = state
        return number + 1, jnp.tanh(h @ w)

    _, h = jax.lax.while_loop(lambda state: state[0] < 3, turn, (0, x))
    return jnp.mean(h)


def _cond(w, x):
    def one(h):
        return jnp.sin(h @ w)

    def other(h):
        return jax.lax.scan(lambda c, _: (jnp.cos(c @ w), None), h, None, length=2)[0]

    return jnp.mean(jax.lax.cond(jnp.sum(x) > 1e6, one, other, x))


def _remat(w, x):
    return jnp.mean(jax.checkpoint(lambda h: jnp.exp(jnp.tanh(h @ w)))(x) @ w)


def _derivatives(w, x):
    @jax.custom_vjp
    def product(h, w):
        return jnp.sin(h @ w)

    product.defvjp(lambda h, w: (product(h, w), (h, w)), lambda kept, g: (g @ kept[1].T, kept[1]))
    return jnp.mean(jax.nn.relu(product(x, w)))


def _jit(w, x):
    return jnp.mean(jax.jit(lambda h: jnp.tanh(h @ w))(x))


def _shard_map(w, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def inside(h):
        def turn(c, _):
            return jnp.tanh(c @ w), None

        return jax.lax.scan(turn, h, None, length=2)[0]

    spec = PartitionSpec("data")
    return jnp.mean(jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec)(x))


PROGRAMS = (_plain, _scan, _while, _cond, _remat, _derivatives, _jit, _shard_map)


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    "func", slow_unless(PROGRAMS, lambda func: func in (_plain, _scan, _derivatives, _shard_map))
)
def test_both_sides_are_what_they_are_alone(func):
    args = _data()
    report = debug.compare(func, "bf16", sites="ops", gradients=func is not _while)(*args)
    alone = jax.jit(func)(*args), jax.jit(halfstep.autocast(func, "bf16"))(*args)
    error = abs(alone[1] - alone[0]) / abs(alone[0])
    # What XLA fuses is not rounded in between: as far apart as one rounding to float32 of a sum of
    # 32, and of one to bfloat16 where that is left out.
    assert abs(report.results.error - error) <= 2 * EPS
    products = [site for site in report.sites if site.site.op == "dot_general"]
    assert products
    for site in products:
        assert site.dtype == "bf16"
        # Of each turn, inputs and result are rounded at most once.
        assert 0 < site.error < 8 * EPS * max(1, len(site.turns))
        assert site.cosine > 1 - 64 * EPS


@pytest.mark.rows(3)
@pytest.mark.parametrize("func", [_plain, _scan, _cond, _shard_map])
def test_what_runs_in_float32_is_not_off(func):
    policy = halfstep.Policy(compute="bf16", rules=("op:*=float32",))
    report = debug.compare(func, policy, sites="ops")(*_data())
    assert report.sites
    assert {site.error for site in report.sites} == {0.0}
    assert report.results == (0.0, 1.0, 0)
    assert report.worst == ()
    # Two programs, whose sums XLA may order differently.
    assert report.gradient.error <= 4 * FORMATS["f32"].eps


def test_every_turn():
    report = debug.compare(_scan, "bf16", sites="ops")(*_data())
    (product,) = [site for site in report.sites if site.site.op == "dot_general"]
    assert len(product.turns) == 3
    # The last turn runs first, and has nothing but roundings of its own.
    assert product.turns[2] < product.turns[0]
    assert min(product.turns) <= product.error <= max(product.turns)


def test_a_branch_that_is_not_taken_has_no_sites():
    report = debug.compare(_cond, "bf16", sites="ops")(*_data())
    names = {site.site.op for site in report.sites}
    assert "cos" in names
    assert "sin" not in names


def test_where_it_jumps(tmp_path):
    def loss(w, x):
        spread = x @ w
        with jax.named_scope("shift"):
            centered = spread - 1000.0
        return jnp.mean(jnp.tanh(centered))

    report = debug.compare(loss, "bf16")(jnp.ones(8), jnp.full((4, 8), 125.1))
    worst = report.worst[0]
    assert worst.site.scope == "shift"
    assert worst.site.source.line == loss.__code__.co_firstlineno + 3
    # 1000.8 is 1000 in bfloat16.
    assert worst.error == 1.0
    assert worst.before < EPS
    lines = str(report).splitlines()
    assert lines[0].startswith("p=f32,c=bf16,o=f32 compared with float32")
    assert "shift" in next(line for line in lines if "test_compare.py" in line)
    assert "<table" in report._repr_html_()
    assert repr(report) == str(report)
    made = json.loads(report.to_json(tmp_path / "report.json"))
    assert made == json.loads((tmp_path / "report.json").read_text())
    assert [site["error"] for site in made["sites"]] == [site.error for site in report.sites]
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_what_overflows_is_infinitely_far(tmp_path):
    policy = halfstep.Policy(compute="f16", rules=("op:exp=compute",))
    report = debug.compare(lambda w, x: jnp.sum(jnp.exp(w * x)), policy, sites="ops")(
        jnp.ones(4), jnp.asarray([1.0, 2.0, 3.0, 20.0])
    )
    (bad,) = [site for site in report.sites if site.error == np.inf and site.before < 1]
    assert bad.site.op == "exp"
    assert report.worst[0] is bad
    assert "not finite" in str(report)
    assert '"inf"' in report.to_json()
    report.plot(tmp_path / "report.png")


def test_gradients_are_those_of_training():
    args = _data()
    report = debug.compare(_plain, "f16")(*args)
    scaling = halfstep.StaticLossScaling(2.0**15)
    _, _, low = jax.jit(halfstep.filter_grad(_plain, scaling, policy="f16"))(*args)
    wide = jax.jit(jax.grad(_plain))(*args)
    error = jnp.linalg.norm(low - wide) / jnp.linalg.norm(wide)
    np.testing.assert_allclose(report.gradient.error, error, rtol=1e-4)
    (only,) = report.gradients
    assert only.error == report.gradient.error


@pytest.mark.slow
def test_modules_and_other_results():
    model = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 4))

    def loss(model, x):
        made = jax.vmap(model)(x)
        return jnp.mean(made**2), made

    report = debug.compare(loss, "bf16", has_aux=True)(model, x)
    assert {one.path for one in report.gradients} == {
        f"layers/{n}/{name}" for n in range(3) for name in ("weight", "bias")
    }
    # A function that is no loss has no gradients.
    assert debug.compare(lambda w, x: x @ w, "bf16")(*_data()).gradients == ()


@pytest.mark.slow
def test_recipes():
    keys = jax.random.split(jax.random.key(0))
    args = jax.random.normal(keys[0], (32, 32)), jax.random.normal(keys[1], (16, 32))
    scaling = halfstep.RECIPES["f8-delayed"].init(_plain, *args)
    errors = {
        policy: debug.compare(_plain, policy, scaling=state, sites="ops")(*args).gradient.error
        for policy, state in (("bf16", None), ("f8", None), ("f8-delayed", scaling))
    }
    # Three bits instead of seven.
    assert errors["f8"] > 4 * errors["bf16"]
    assert errors["f8-delayed"] > 4 * errors["bf16"]
    with pytest.raises(ValueError, match="has state, and none was given"):
        debug.compare(_plain, "f8-delayed")


def test_errors():
    with pytest.raises(
        ValueError, match="16 bits or fewer, to compare with float32; got 'p=f32,c=f32,o=f32'"
    ):
        debug.compare(_plain, "f32")


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_distance_is_that_of_numpy(magnitude):
    wide = np.asarray(jax.random.normal(jax.random.key(0), (50,)), np.float64) * magnitude
    low = wide * (1 + 0.01 * np.cos(np.arange(50)))
    wide, low = wide.astype(np.float32), low.astype(np.float32)
    found = distance(jax.jit(sums)(low, wide))
    exact = np.float64(low), np.float64(wide)
    error = np.linalg.norm(exact[0] - exact[1]) / np.linalg.norm(exact[1])
    # Fifty sums in float32.
    np.testing.assert_allclose(found.error, error, rtol=50 * 2**-23)
    cosine = np.sum(exact[0] * exact[1]) / np.linalg.norm(exact[0]) / np.linalg.norm(exact[1])
    np.testing.assert_allclose(found.cosine, cosine, rtol=50 * 2**-23)


def test_rows_add_up():
    low = np.asarray(jax.random.normal(jax.random.key(0), (3, 7)), np.float32)
    wide = low + np.asarray([[0.1], [0.0], [100.0]], np.float32)
    rows = jnp.stack([*map(sums, low, wide), absent((6,))])
    together, whole = distance(added(rows)), distance(sums(low, wide))
    np.testing.assert_allclose(together, whole, rtol=1e-5)
    np.testing.assert_allclose(distance(rows), whole, rtol=1e-5)
    assert not was_computed(np.asarray(absent((6,))))


@pytest.mark.parametrize(
    ("low", "wide", "error"),
    [
        ([np.inf, 1], [np.inf, 1], 0),
        ([np.nan, 1], [np.nan, 1], 0),
        ([np.inf, 1], [3, 1], np.inf),
        ([3, 1], [np.nan, 1], np.inf),
        ([-np.inf, 1], [np.inf, 1], np.inf),
        ([0, 0], [0, 0], 0),
        ([1, 0], [0, 0], np.inf),
        ([0, 0], [1, 0], 1),
    ],
)
def test_special_values(low, wide, error):
    row = sums(np.asarray(low, np.float32), np.asarray(wide, np.float32))
    assert distance(row).error == error


@pytest.mark.parametrize("reverse", [False, True])
def test_a_fault_that_goes_on_from_turn_to_turn_is_blamed_where_it_begins(reverse):
    """What a turn is given is the carry of the turn before, and not the first one."""

    def body(h, w):
        with jax.named_scope("mix"):
            s = h @ w
        with jax.named_scope("gate"):
            h = s / jnp.sqrt(jnp.sum(s * s, -1, keepdims=True))
        return h, None

    def looped(ws, x):
        return jnp.mean(jax.lax.scan(body, x, ws, reverse=reverse)[0])

    def written_out(ws, x):
        for w in ws:
            x, _ = body(x, w)
        return jnp.mean(x)

    ws, x = jnp.stack([jnp.eye(8)] * 3), 300 * jax.random.normal(jax.random.key(0), (4, 8))
    for func in (looped, written_out):
        report = debug.compare(func, "f16,op:*=compute", gradients=False)(ws, x)
        worst = report.worst[0]
        assert (worst.site.scope, worst.site.op) == ("gate", "div")
        assert worst.before < 0.01
        if func is looped:
            # The one that runs first.
            assert worst.turn == (2 if reverse else 0)
            assert f"div, most in iteration {worst.turn} of 3" in str(report)
