"""The two runs of `first_nonfinite`: what each looks at, and that the answer stays the same."""

import itertools
import math

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from halfstep import debug
from halfstep.debug._instrument.flags import Flags, flag
from halfstep.debug._instrument.layout import instrument, layout_of
from halfstep.debug._instrument.run import run, run_for_rows
from halfstep.debug._instrument.stats import Column, Numbers, as_rows
from halfstep.debug._nonfinite import cut as cuts, passes
from halfstep.debug._nonfinite.first_nonfinite import finding
from tests._faults import FAULTS, Fault
from tests._rows import slow_unless

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]
ALL_NUMBERS = passes._by_all_numbers


@pytest.fixture
def looked_at(monkeypatch):
    """The operations of the values that each run looks at, run by run."""
    found = []

    def spy(traced, layout, measure, *, effects):
        found.append([site.op for site in layout.sites])
        return run_layout(traced, layout, measure, effects=effects)

    run_layout = passes._run
    monkeypatch.setattr(passes, "_run", spy)
    return found


def chain(x, y):
    """Eleven operations; `exp` may hide an infinity, and `div` one in its denominator."""
    a = lax.add(lax.mul(lax.sub(x, y), 2.0), 1.0)
    b = lax.exp(a)
    c = lax.sub(lax.mul(lax.add(b, y), 3.0), y)
    return lax.add(lax.mul(lax.log(lax.div(c, x)), y), 1.0)


def test_two_runs_and_few_values(looked_at):
    x, y = jnp.ones(4), jnp.zeros(4).at[1].set(-3e38)
    found = debug.first_nonfinite(chain, x, y)
    assert found is not None
    assert (found.site.op, found.kind, found.count) == ("mul", "inf", 1)
    # All in all there are thirteen: two arguments and eleven results.
    assert looked_at[0] == ["argument", "argument", "add", "exp", "div", "add"]
    # Where it began, and what that takes.
    assert looked_at[1:] == [["argument", "argument", "sub", "mul", "add"]]


def test_one_run_if_everything_is_finite(looked_at):
    assert debug.first_nonfinite(chain, jnp.ones(4), jnp.zeros(4)) is None
    assert len(looked_at) == 1


def model(params, x):
    for w in params:
        h = x @ w
        x = jax.nn.gelu((h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True)))
    return jnp.mean(x**2)


def step(params, state, x):
    loss, grads = jax.value_and_grad(model)(params, x)
    mean = [0.9 * m + 0.1 * g for m, g in zip(state[0], grads, strict=True)]
    square = [0.9 * v + 0.1 * g**2 for v, g in zip(state[1], grads, strict=True)]
    new = [w - 0.1 * m / (jnp.sqrt(v) + 1e-8) for w, m, v in zip(params, mean, square, strict=True)]
    return new, (mean, square), loss


def step_arguments(layers=3):
    params = [jnp.zeros((8, 8)) for _ in range(layers)]
    return params, (params, params), jnp.ones((4, 8))


@pytest.mark.slow
def test_the_compiled_programs_are_small(looked_at):
    args = step_arguments()
    traced = instrument(step, args, {}, sites="ops", compute=None)
    layout, arrays = traced.layout, traced.call.arrays
    coarse = layout_of(layout.body, cuts.cut)

    def count(func):
        text = jax.jit(func).lower(*arrays).compile().as_text()
        assert text is not None
        return text.count(" = ")

    flags = count(lambda *arrays: run_for_rows(coarse, arrays, Flags(packed=True), effects=True))
    measure = Numbers(traced.compute, detail=True)
    numbers = count(lambda *arrays: run(layout, layout.body, arrays, measure)[1])
    # Numbers of everything, as the single run takes them, are several times as many.
    assert 4 * flags < numbers
    found = debug.first_nonfinite(step, *args)
    assert found is not None
    assert found.site.op == "rsqrt"
    assert len(looked_at[0]) < 0.6 * len(layout.sites)
    assert len(looked_at[1]) < 0.1 * len(layout.sites)


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    "fault",
    slow_unless(FAULTS, lambda fault: FAULTS.index(fault) % 5 == 2),
    ids=lambda fault: fault.name,
)
def test_the_answer_is_that_of_all_numbers(fault: Fault):
    func, args = fault.make()
    traced = instrument(func, args, {}, sites="ops", compute=None)
    answers = []
    for how in (passes.search, ALL_NUMBERS):
        recorded = how(traced)
        assert recorded is not None
        found = finding(recorded.layout, recorded.rows, recorded.found).to_dict()
        if found["shard"] is not None:
            # Of all numbers, a range may be that of another shard in which something else is bad.
            del found["operands"]
        # Only values that were looked at.
        assert len(found.pop("chain")) > 0
        answers.append(found)
    assert answers[0] == answers[1]


def test_an_earlier_fault_in_a_later_region():
    """Two faults: `a` begins first, in a region that ends behind `b`, which hides nothing of it."""

    def func(x):
        a = lax.mul(x, 3e38)
        b = lax.exp(lax.mul(x, 100.0))
        return lax.add(lax.add(a, 1.0), b)

    found = debug.first_nonfinite(func, jnp.full(3, 2.0))
    assert found is not None
    assert (found.site.op, found.operands[1].value) == ("mul", pytest.approx(3e38))


def test_runs_that_disagree_are_not_believed(monkeypatch):
    used = []
    monkeypatch.setattr(passes, "_agree", lambda *args: False)
    monkeypatch.setattr(passes, "_by_all_numbers", lambda t: used.append(1) or ALL_NUMBERS(t))
    found = debug.first_nonfinite(lambda x: jnp.log(x) + 1, jnp.zeros(3))
    assert found is not None
    assert (found.site.op, found.count, used) == ("log", 3, [1])


def test_effects_happen_once(capfd):
    def func(x):
        jax.debug.print("printed {}", x[0])
        return jnp.log(x)

    assert debug.first_nonfinite(func, jnp.zeros(3)) is not None
    jax.effects_barrier()
    assert capfd.readouterr().out.count("printed") == 1


def in_a_ref(x):
    ref = jax.new_ref(x)
    ref[...] = jnp.sin(ref[...])
    return jnp.sum(jnp.log(ref[...]) @ jnp.eye(3))


def test_what_is_made_of_a_ref_is_found():
    assert debug.first_nonfinite(in_a_ref, jnp.ones((3, 3))) is None
    found = debug.first_nonfinite(in_a_ref, jnp.zeros((3, 3)))
    assert found is not None
    assert found.site.op == "log"


def test_a_ref_is_neither_recorded_nor_compared():
    x = jnp.ones((3, 3))
    recorder = debug.record(jax.value_and_grad(in_a_ref), sites="ops")
    log, _ = recorder(recorder.init(x), x)
    assert "sin" in {site.op for site in log.sites}
    assert "new_ref" not in {site.op for site in log.sites}
    report = debug.compare(in_a_ref, "bf16", sites="ops")(x)
    assert "sin" in {deviation.site.op for deviation in report.sites}


def test_a_callback_with_results_is_called_once():
    calls = []

    def host(x):
        calls.append(1)
        return np.asarray(x) * len(calls)

    def func(x):
        y = jax.experimental.io_callback(host, jax.ShapeDtypeStruct((3,), jnp.float32), x)
        return jnp.log(y)

    found = debug.first_nonfinite(func, jnp.zeros(3))
    assert found is not None
    assert (found.site.op, len(calls)) == ("log", 1)


OPERANDS = {
    **dict.fromkeys(("add", "sub", "mul", "add_any", "concatenate", "halfstep_difference"), 2),
    "dot_general": 2,
    "div": 1,
}


def _bound(name, *operands):
    """The result of an operation of JAX for vectors."""
    one = operands[0]
    functions = {
        "add_any": lambda x, y: x + y,
        "halfstep_difference": lambda x, y: x - y,
        "one_minus_square": lambda x: 1 - x * x,
        "concatenate": lambda x, y: lax.concatenate([x, y], 0),
        "dot_general": lambda x, y: lax.dot(x, y),
        "reduce_sum": lambda x: jnp.sum(x),
        "cumsum": lambda x: lax.cumsum(x),
        "convert_element_type": lambda x: x.astype(jnp.bfloat16),
        "div": lambda x: lax.div(x, jnp.asarray([0.0, 3.0], one.dtype)),
    }
    return (functions.get(name) or getattr(lax, name))(*operands)


@pytest.mark.parametrize("name", sorted(cuts._PASSES_ALL_ON | {"div"}))
def test_what_passes_non_finite_values_on(name):
    kinds = (0.0, 1.0, -2.0, 1e-30, math.inf, -math.inf, math.nan)
    func = jax.jit(lambda *operands: jnp.isfinite(_bound(name, *operands)).all())
    for values in itertools.product(kinds, repeat=OPERANDS.get(name, 1)):
        if not all(map(math.isfinite, values)):
            assert not func(*(jnp.asarray([value, 1.0]) for value in values)), values


@pytest.mark.parametrize("packed", [True, False])
def test_flags_of_every_pattern(packed):
    values, kinds = [], []
    for dtype in (np.float16, jnp.bfloat16):
        patterns = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(-1, 1)
        with np.errstate(invalid="ignore"):
            wide = patterns.astype(np.float32)[:, 0]
        for chosen in (np.isfinite(wide), np.isinf(wide), np.isnan(wide)):
            values.append(jnp.asarray(patterns[chosen]))
            kinds.append(0.0 if chosen[0] else math.nan if np.isnan(wide[chosen][0]) else math.inf)
    # Enough of one shape that a word is full.
    values += [jnp.full((), x, jnp.float32) for x in (0.0, math.inf, math.nan) * 7]
    kinds += [0.0, math.inf, math.nan] * 7
    values.append(jnp.asarray([3 - 4j, complex(0, math.inf)]))
    kinds.append(math.inf)
    rows = np.asarray(jax.jit(lambda *xs: Flags(packed=packed).rows(xs, 0))(*values))
    np.testing.assert_array_equal(rows[:, Column.ABSMAX], kinds)
    np.testing.assert_array_equal(rows[:, Column.BAD], [kind != 0 for kind in kinds])
    alone = np.asarray(as_rows([flag(value) for value in values[:6]], 0))
    np.testing.assert_array_equal(alone, rows[:6])


def test_no_rows():
    for packed in (True, False):
        assert Flags(packed=packed).rows([], 1).shape == (0, Column.TURN + 1)
