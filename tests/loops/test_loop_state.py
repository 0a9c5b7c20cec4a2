"""The state of loops is as exact as an expert's, however the loop is written.

`python -m benchmarks.loop_state` prints all rows as a table.
"""

from typing import Any

import numpy as np
import pytest

from tests._rows import slow_unless
from tests.loops._judge import POLICIES, Verdict, distance, judge
from tests.loops._loop import SPELLINGS
from tests.loops._rows import CASES, LOOPS, MEASURED, WITHOUT

pytestmark = pytest.mark.core

# On every change: every spelling, and every operation through which state passes.
FAST = {
    ("average, literal, 256", "scan", "bf16"),
    ("average, parameter, 2048", "while_loop", "bf16"),
    ("average, leaky RNN, 2048", "scan", "bf16"),
    ("sum, two terms", "unrolled", "bf16"),
    ("sum, where of a sum", "checkpointed loop", "f16"),
    ("sum, at add", "scan", "bf16"),
    ("sum, reshape", "fori_loop", "bf16"),
    ("sum, minus a minus", "while_loop", "f16"),
    ("sum, cond", "nested", "bf16"),
    ("sum, product in the body", "checkpointed step", "bf16"),
    ("sum, decay", "nested, checkpointed", "bf16"),
    ("sum, online softmax", "vmapped", "bf16"),
    ("statistic, cumulative product", "vmapped, checkpointed step", "f16"),
    ("statistic, Welford", "scan", "bf16"),
    ("attention, 128 blocks", "scan", "bf16"),
    ("gated DeltaNet", "scan", "bf16"),
    ("GRU", "scan", "bf16"),
    ("Adam, one batch", "scan", "bf16"),
}


@pytest.mark.parametrize(
    ("row", "spelling", "policy"),
    slow_unless(
        [
            (row, spelling, policy)
            for row, spelling in CASES
            if spelling != WITHOUT
            for policy in POLICIES
        ],
        lambda *case: case in FAST,
    ),
)
def test_state_outputs_and_derivatives_are_as_exact_as_by_hand(
    row: str, spelling: str, policy: str
):
    verdict = judge(row, spelling, policy)
    assert {"state", "tangent" if "_loop" in spelling else "gradient"} <= set(verdict.errors)
    assert verdict.wrong == [], verdict
    for what in verdict.errors:
        # A bound of everything would be kept by zeros.
        assert verdict.bound(what) < 1, verdict


def test_every_spelling_is_tried_on_every_change():
    assert {spelling for _, spelling, _ in FAST} == set(SPELLINGS)
    assert {row for row, _, _ in FAST} <= set(LOOPS)


@pytest.mark.slow
@pytest.mark.parametrize("row", MEASURED)
def test_rows_without_a_loop_are_measured(row: str):
    verdict = judge(row, WITHOUT, "bf16")
    assert verdict.text == "measured"
    assert np.isfinite(list(verdict.errors.values())).all()


# The judge.


def verdict_of(errors: dict[str, float], by_hand: dict[str, float]) -> Verdict:
    return Verdict("a row", "scan", "bf16", True, errors, by_hand)


@pytest.mark.parametrize(
    ("errors", "by_hand", "wrong"),
    [
        ({"state": 1e-3}, {"state": 1e-5}, []),
        ({"state": 3e-3}, {"state": 1e-5}, ["state"]),
        ({"state": 3e-3}, {"state": 1e-3}, []),
        ({"state": 1e-3, "gradient": 0.5}, {"state": 1e-3, "gradient": 0.1}, ["gradient"]),
        ({"state": np.nan}, {"state": 1e-3}, ["state"]),
        ({"state": np.inf}, {"state": 1e-3}, ["state"]),
    ],
)
def test_what_is_wrong(errors: dict[str, float], by_hand: dict[str, float], wrong: list[str]):
    verdict = verdict_of(errors, by_hand)
    assert verdict.wrong == wrong
    assert verdict.text == (f"WRONG: {', '.join(wrong)}" if wrong else "exact")
    assert not wrong or verdict.worst in wrong


def test_the_worst_leaf_counts():
    def one(*leaves: Any) -> list[np.ndarray]:
        return [np.asarray(leaf, np.float64) for leaf in leaves]

    assert distance(one([3, 4.5], 1), one([3, 4], 1)) == 0.1
    # A leaf of no norm is measured against a thousandth of the largest.
    assert distance(one([3, 4], 1e-3), one([3, 4], 0)) == pytest.approx(0.2)
    # A vmapped result has one more axis.
    assert distance(one([[3, 4], [3, 4.5]]), one([3, 4])) == pytest.approx(0.1 / 2**0.5)
    assert np.isnan(distance(one([3, np.nan]), one([3, 4])))
