"""The log: what goes into it, and what it says."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import debug
from halfstep.debug._instrument.stats import Column
from halfstep.debug._record import debug_report as _debug_report


def _step(w, x):
    def loss(w):
        h = jnp.tanh(x @ w)
        return jnp.mean(jnp.log(h + 2))

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


def _args():
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (4, 3)), jax.random.normal(keys[1], (8, 4))


def _filled(recorder, args, steps, change=lambda args, n: args):
    run, log = jax.jit(recorder), recorder.init(*args)
    for number in range(steps):
        log, _ = run(log, *change(args, number))
    return log


def _found(log):
    found = log.report().found
    assert found is not None
    return found


@pytest.mark.rows(2)
@pytest.mark.parametrize("sites", ["scopes", "ops", lambda site: site.op == "tanh"])
def test_the_step_stays_as_it_is(sites):
    args = _args()
    recorder = debug.record(_step, sites=sites)
    log, found = jax.jit(recorder)(recorder.init(*args), *args)
    for mine, bare in zip(found, jax.jit(_step)(*args), strict=True):
        np.testing.assert_array_equal(mine, bare)
    assert log.step == 1


def test_more_sites():
    count = {
        name: len(debug.record(_step, sites=name).init(*_args()).sites)
        for name in ("scopes", "ops")
    }
    assert 0 < count["scopes"] < count["ops"]
    (only,) = debug.record(_step, sites=lambda site: site.op == "tanh").init(*_args()).sites
    assert (only.op, only.stage, str(only.type)) == ("tanh", "forward", "f32[8,3]")


def test_between_lines():
    sites = debug.record(_step).init(*_args()).sites
    # What goes from step to step is recorded where it is made.
    assert [site.path for site in sites if site.path] == ["x"]
    lines = {(site.source.line, site.stage) for site in sites if not site.path}
    first = _step.__code__.co_firstlineno
    # Both lines of the loss, forward and backward, and the update.
    assert {(first + 2, "forward"), (first + 3, "forward"), (first + 6, "update")} <= lines
    assert {stage for _, stage in lines} == {"forward", "backward", "update"}


def test_it_is_a_ring():
    args = _args()
    recorder = debug.record(_step, last=3)

    def scaled(args, number):
        return args[0], args[1] * 2.0**number

    log = _filled(recorder, args, 5, scaled)
    report = log.report()
    assert report.steps == (2, 3, 4)
    (x,) = [trace for trace in report.sites if trace.site.path == "x"]
    largest = float(jnp.max(jnp.abs(args[1])))
    np.testing.assert_array_equal(x.absmax, np.float32(largest) * 2.0 ** np.arange(2, 5))
    assert report.found is None
    assert report.step == 4
    with pytest.raises(ValueError, match=r"step 1 is not in the log, which has: 2 to 4"):
        log.report(step=1)


def test_no_steps_yet():
    report = debug.record(_step).init(*_args()).report()
    assert (report.step, report.steps, str(report)) == (None, (), "nothing is recorded yet")
    report._repr_html_()


def test_the_first_bad_step(tmp_path):
    args = _args()

    def spoiled(args, number):
        return args[0], args[1].at[0, 0].set(jnp.nan if number >= 2 else 1.0)

    log = _filled(debug.record(_step), args, 4, spoiled)
    report = log.report()
    assert (report.step, report.bad_steps) == (2, (2, 3))
    assert report.found is not None
    assert report.found.site.path == "x"
    assert "not finite in step 2; also in step 3" in str(report)
    assert log.report(step=1).found is None
    made = json.loads(report.to_json(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text()) == made
    assert made["found"]["path"] == "x"
    assert made["sites"][1]["absmax"][2] == "nan"
    assert "not finite in step 2" in report._repr_html_()
    assert repr(report) == str(report)
    log.plot(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_map_of_many_sites_shows_those_that_matter(tmp_path):
    def deep(x):
        for _ in range(35):
            x = jnp.tanh(x) + 1
        return jnp.log(x - 2) + x

    recorder = debug.record(deep, sites="ops")
    x = jnp.zeros(2)
    log, _ = jax.jit(recorder)(recorder.init(x), x)
    report = log.report()
    assert report.found is not None
    assert len(report.sites) > _debug_report._SITES
    chosen = _debug_report._drawn(report)
    assert len(chosen) == _debug_report._SITES
    places = {id(trace): place for place, trace in enumerate(report.sites)}
    order = [places[id(trace)] for trace in chosen]
    assert order == sorted(set(order))
    # Where it began and what it is made of.
    assert {id(trace) for trace in report.shown} <= {id(trace) for trace in chosen}
    log.plot(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_one_of_the_operations_of_a_line():
    def step(x):
        return jnp.sum(jnp.log(jnp.tanh(x)))

    found = _found(_filled(debug.record(step), (jnp.zeros(3),), 1))
    assert found.between == ("tanh", "log", "reduce_sum")
    assert "which of tanh, log, reduce_sum" in found.advice


def test_what_is_lost_in_16_bits():
    def step(x):
        h = x.astype(jnp.float16)
        return jnp.sum(h * 2).astype(jnp.float32)

    log = _filled(debug.record(step), (jnp.array([1e-6, 1.0, 1.0, 1.0]),), 1)
    report = log.report()
    assert report.shown[0].below == (0.25,)
    assert "Nearest to what the compute dtype can hold" in str(report)
    wide = _filled(debug.record(step, compute="f32"), (jnp.array([1e-6, 1.0, 1.0, 1.0]),), 1)
    (x,) = [trace for trace in wide.report().sites if trace.site.path == "x"]
    assert x.below == (0.0,)


def test_a_branch_that_is_not_taken():
    def step(x, flag):
        return jax.lax.cond(flag, lambda x: jnp.log(x), lambda x: jnp.exp(x), x)

    args = (jnp.ones(3), jnp.asarray(True))
    log = _filled(debug.record(step, sites="ops"), args, 1)
    rows = {site.op: np.asarray(log.rows)[0, n] for n, site in enumerate(log.sites)}
    assert rows["log"][Column.ABSMAX] == 0
    assert rows["exp"][Column.ABSMAX] == -1


def test_over_devices_it_is_the_same(mesh):
    args = _args()
    recorder = debug.record(_step, sites="ops")
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    spread = (args[0], jax.device_put(args[1], rows))
    one, many = (_filled(recorder, given, 2) for given in (args, spread))
    # Sums over shards are taken in another order: what is made of them may differ in the last bit.
    np.testing.assert_allclose(one.rows, many.rows, rtol=1e-5, atol=1e-6)
    assert many.rows.sharding.is_fully_replicated


def test_it_can_be_donated_scanned_and_kept(tmp_path):
    args = _args()
    recorder = debug.record(_step, last=4)

    def body(state, _):
        log, w = state
        log, (w, value) = recorder(log, w, args[1])
        return (log, w), value

    @jax.jit
    def many(log, w):
        return jax.lax.scan(body, (log, w), length=4)

    (log, _), _ = many(recorder.init(*args), args[0])
    assert log.report().steps == (0, 1, 2, 3)
    again = jax.tree.map(lambda x: x, log)
    assert again.layout is log.layout
    assert len(repr(log)) < 200


def test_it_is_not_differentiated():
    args = _args()
    recorder = debug.record(_step)
    with pytest.raises(TypeError, match="record the whole step, with the gradient inside"):
        jax.grad(lambda w: recorder(recorder.init(*args), w, args[1])[1][1])(args[0])


def test_errors():
    args = _args()
    recorder = debug.record(_step)
    log = recorder.init(*args)
    with pytest.raises(ValueError, match=r"another function, or of arguments of other shapes"):
        recorder(log, args[0], args[1][:4])
    with pytest.raises(ValueError, match="last must be at least 1, got 0"):
        debug.record(_step, last=0)


def test_arguments_that_are_no_arrays():
    def step(w, x, *, mode):
        return jnp.sum(w * x) if mode == "dot" else x

    recorder = debug.record(step)
    args = jnp.ones(3), jnp.ones(3)
    log = recorder.init(*args, mode="dot")
    log, value = recorder(log, *args, mode="dot")
    assert value == 3


def test_nothing_is_bad():
    assert debug.first_nonfinite(_step, *_args()) is None


def test_what_is_masked_is_said_to_be():
    found = debug.first_nonfinite(lambda x: jnp.where(x > 0, jnp.log(x), 0.0), jnp.arange(3.0))
    assert found is not None
    assert not found.reaches
    assert "something masks it" in str(found)


def test_casts_of_autocast_have_lines_of_the_users():
    def loss(w, x):
        hidden = jnp.tanh(x @ w)
        return jnp.mean((hidden @ w) ** 2)

    def step(w, x):
        scaling = halfstep.StaticLossScaling(2.0**5)
        value, _, _, grads = halfstep.filter_value_and_grad(loss, scaling, policy="f16")(w, x)
        return w - grads, value

    sites = debug.record(step, sites="ops").init(jnp.ones((4, 4)), jnp.ones((8, 4))).sites
    casts = [site for site in sites if site.op == "convert_element_type"]
    assert casts
    assert {site.source.short.split(":")[0] for site in casts} == {"test_record.py"}


def test_a_site_adds_few_kernels():
    def step(x):
        for _ in range(20):
            x = jnp.exp(x) * 0.5
        return x

    x = jnp.ones((16, 64, 8))
    recorder = debug.record(step, sites="ops", last=1)
    log = recorder.init(x)
    text = jax.jit(recorder).lower(log, x).compile().as_text()
    assert text is not None
    entry = text[text.index("\nENTRY") :]
    # The value itself, a reduction over all cores, and one of the results of the cores. The numbers
    # of all sites are converted at once, and not one by one.
    assert entry.count(" fusion(") <= 3 * len(log.sites)
    assert not entry.count("f32[1]{0} fusion(")
