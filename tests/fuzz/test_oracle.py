"""The oracle finds what is planted, and its parts agree with JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fuzz._evaluate import Evaluator, at_random, constants_of, moved
from tests.fuzz._oracle import (
    Failure,
    Reference,
    Skipped,
    _same_function,
    as_users_have_it,
    make_case,
)
from tests.fuzz._program import Program, Statement
from tests.fuzz._run import found, outcome
from tests.fuzz._shrink import shrunk

SEEDS = range(40, 52)


@pytest.mark.rows(1)
@pytest.mark.parametrize("by", [0.1, 0.01])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_planted_errors_are_found(kind: str, by: float) -> None:
    results = [found(seed, kind, by, ("function",)) for seed in SEEDS]
    counted = [result for result in results if result is not None]
    assert len(counted) >= len(SEEDS) // 3
    assert all(result == "another function" for result in counted), results


@pytest.mark.slow
def test_half_of_planted_errors_are_found_by_running_alone() -> None:
    results = [found(seed, "forward", 0.1, ("rounding",)) for seed in SEEDS]
    counted = [result for result in results if result is not None]
    assert sum(result == "rounding" for result in counted) >= len(counted) / 2, results


@pytest.mark.parametrize("seed", range(6))
def test_without_rounding_it_is_what_jax_computes(seed: int) -> None:
    case = make_case(seed)
    with as_users_have_it():
        function = case.program.function()
        want = jax.jit(function)(*case.values)
        got = Evaluator()(jax.make_jaxpr(function)(*case.values), case.values)
    for mine, theirs in zip(got, want, strict=True):
        if jnp.issubdtype(theirs.dtype, jnp.floating) and theirs.size:
            theirs = np.asarray(theirs.astype(jnp.float32), np.float64)
            size = max(np.abs(theirs).max(), 1e-3)
            # Programs have casts to 16 bits of their own.
            np.testing.assert_allclose(mine / size, theirs / size, atol=2.0**-7)


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "SAME"},
        {"padding": [(1, 2), (-1, 3)], "window_strides": (2, 1)},
        {"padding": [(0, 1), (2, 0)], "lhs_dilation": (2, 3), "rhs_dilation": (1, 2)},
        {"padding": "VALID", "feature_group_count": 2},
        {"padding": "VALID", "batch_group_count": 2},
        {"padding": "VALID", "rhs_dilation": (3, 1)},
        {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")},
    ],
)
def test_convolutions_are_those_of_jax(options: dict[str, Any]) -> None:
    options = {"window_strides": (1, 1), **options}
    left, right = np.random.default_rng(0).integers(-3, 4, (2, 4, 4, 6, 5)).astype(np.float32)
    right = right[:, : 4 // options.get("feature_group_count", 1), :3, :2]
    if "dimension_numbers" in options:
        left, right = left.transpose(0, 2, 3, 1), right.transpose(2, 3, 1, 0)

    def function(left: Any, right: Any) -> Any:
        return jax.lax.conv_general_dilated(left, right, **options)

    (got,) = Evaluator()(jax.make_jaxpr(function)(left, right), [left, right])
    # Small integers: every order of a sum is exact.
    np.testing.assert_array_equal(got, function(left, right))


def test_bits_in_a_shard_map_are_held_in_float64() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    def function(x: Any) -> Any:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return 2 * x - jax.lax.bitcast_convert_type(bits, jnp.float32)

    x = np.arange(4, dtype=np.float32)
    (got,) = Evaluator()(jax.make_jaxpr(function)(x), [x])
    np.testing.assert_array_equal(got, x)


def test_bits_that_keep_their_dtype_are_not_rounded() -> None:
    def function(x: Any) -> Any:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.bfloat16)

    x = np.asarray([1.001, 2.003], np.float32)
    (got,) = Evaluator()(jax.make_jaxpr(function)(x), [x])
    np.testing.assert_array_equal(got, x)


def test_random_rounding_stays_within_a_unit_and_is_fair() -> None:
    values = np.linspace(1, 2, 1000)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn):
        unit = float(jnp.finfo(dtype).eps)
        samples = np.stack([at_random(seed)(values, np.dtype(dtype), 1) for seed in range(64)])
        assert np.abs(samples - values).max() <= unit
        np.testing.assert_array_equal(samples, samples.astype(dtype).astype(np.float64))
        assert abs(np.mean(samples - values)) < unit / 20


def test_numbers_beyond_the_range_become_infinite() -> None:
    made = at_random(0)(np.asarray([7e4, -7e4, 1.0, np.nan]), np.dtype(np.float16), 1)
    np.testing.assert_array_equal(np.isinf(made), [True, True, False, False])
    assert np.isnan(made[3])


def test_a_small_change_is_small() -> None:
    made = moved(3)(np.ones(1000), np.dtype(np.float32), 1)
    assert 0 < np.abs(made - 1).max() <= 1e-13


def test_a_program_is_made_small() -> None:
    program = make_case(3).program
    wanted = next(line.text for line in program.statements if "tanh" not in line.text)

    def fails(smaller: Program) -> bool:
        smaller.source()
        return any(line.text == wanted for line in smaller.statements)

    small = shrunk(program, fails, 30)
    assert fails(small)
    assert small.size() < program.size()


def test_a_failure_shows_a_program_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # An autocast whose results are twice as large.
    import halfstep
    from tests.fuzz import _oracle

    def wrong(function, policy, **options):
        def run(parameters, *data):
            made = halfstep.autocast(function, policy, **options)(parameters, *data)
            return [leaf * 2 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf for leaf in made]

        return run

    fake = type("halfstep", (), {"autocast": staticmethod(wrong), "Policy": halfstep.Policy})
    monkeypatch.setattr(_oracle, "halfstep", fake)
    made = outcome(2, ("function",), shrink=6)
    assert made.failed
    assert "another function" in made.text
    assert made.program.startswith("def program(a0")
    compile(made.program, "program", "exec")


@pytest.mark.parametrize(
    ("offs", "error", "match"),
    [((1e-9, 1e-3), Failure, "result 0 differs by 0.001"), ((1e-9, 0.0), Skipped, "a constant")],
)
def test_a_rounded_constant_hides_no_error(offs: Any, error: Any, match: str) -> None:
    class Exact(Reference):
        """Whose results are ones, however often it is evaluated."""

        def __init__(self) -> None:
            self.exact = [np.ones(3), np.ones(3)]
            self.program: Any = "plain"

        def evaluated(self, low: Any, rounding: Any = None) -> list[Any]:
            return self.exact if low == "plain" else got

        def names(self) -> list[str]:
            return ["the loss", "result 0"]

    got = [np.ones(3) + off for off in offs]
    low: Any = "cast"
    with pytest.raises(error, match=match):
        _same_function(Exact(), low, got)


def test_a_statement_reads_as_python() -> None:
    aval = jax.ShapeDtypeStruct((2,), jnp.float32)
    inner = Program((aval,), [Statement("jnp.tanh({0})", (0,), (aval,))], [1])
    line = Statement("jax.jit({f})({0})", (0,), (aval,), (inner,), is_tuple=True)
    assert Program((aval,), [line], [1]).source() == (
        "def program(a0):\n"
        "    def f0_0(b0):\n"
        "        b1 = jnp.tanh(b0)\n"
        "        return (b1, )\n"
        "    a1, = jax.jit(f0_0)(a0)\n"
        "    return (a1, )"
    )


def test_an_array_of_the_program_counts_as_it_was_before_it_was_rounded() -> None:
    numbers = jnp.asarray([0.3, -1.1], jnp.float32)
    narrow = numbers.astype(jnp.float16)
    with as_users_have_it():
        plain = jax.make_jaxpr(lambda x: x * numbers)(jnp.ones(2))
        low = jax.make_jaxpr(lambda x: x * narrow)(jnp.ones(2))
    want = np.asarray(numbers, np.float64)
    (rounded,) = Evaluator()(low, [jnp.ones(2)])
    (exact,) = Evaluator(constants=constants_of(plain))(low, [jnp.ones(2)])
    np.testing.assert_array_equal(exact, want)
    assert np.abs(rounded - want).max() > 1e-5
