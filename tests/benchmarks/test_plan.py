"""What the benchmark of plans says about its rows; its models are those of their names."""

from typing import Any

import jax
import pytest

from benchmarks import plan, remat

MIB = 2**20


def row(**changes: Any) -> dict[str, Any]:
    made = {
        "model": "GPT by scan",
        "target": "h100",
        "budget_bytes": 100 * MIB,
        "peak_bytes": 90 * MIB,
        "next_bytes": 110 * MIB,
        "recomputed_flops": 10**12,
        "most_recomputed_flops": 2 * 10**12,
        "compiles": 3,
        "estimates": [[80 * MIB, 90 * MIB], [91 * MIB, 90 * MIB]],
    }
    return {**made, **changes}


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"next_bytes": None}, True),
        ({"next_bytes": 99 * MIB}, False),
        ({"next_bytes": 99 * MIB, "peak_bytes": 96 * MIB}, True),
        ({"peak_bytes": 101 * MIB}, False),
    ],
)
def test_what_a_good_plan_is(changes: dict[str, Any], good: bool):
    assert plan.is_good(row(**changes)) is good


def test_bars_and_text():
    rows = [row(), row(peak_bytes=101 * MIB, compiles=5, estimates=[[100, 110]])]
    made = plan.bars(rows)
    assert (made["plans"], made["within"], made["good"], made["most_compiles"]) == (2, 1, 1, 5)
    # The last estimate of each: 1.1 % and 9.1 %.
    assert (made["estimates"], made["estimates_within_3_percent"]) == (2, 1)
    said = plan.text({"rows": rows, "bars": made})
    assert "1 of 2 plans are within their budgets" in said
    assert "| GPT by scan" in said


def test_remat_policies_and_plans_in_one_row():
    cell = {"peak_bytes": 200 * MIB, "flops": 7 * 10**12}
    more = {"peak_bytes": 100 * MIB, "flops": 8 * 10**12}
    rows = [{"policy": "dots_saveable", "by_hand": more, "autocast": cell, "e4m3": cell}]
    planned = [{"peak_bytes": 99 * MIB, "recomputed_flops": 5 * 10**11}]
    said = remat.text({"rows": rows, "plans": planned})
    assert "100 MiB, +1.00 TFLOP" in said
    assert "99 MiB, +0.50 TFLOP" in said


def test_the_models_have_their_sizes():
    counts = {
        model.name: sum(
            leaf.size for leaf in jax.tree.leaves(model.params) if hasattr(leaf, "size")
        )
        for model in plan.models(quick=False)
    }
    # ResNet-50 and ViT-Base have 25.6 and 86.6 million parameters, GPT-2 small 124 million.
    assert 25.4e6 < counts["ResNet-50"] < 25.7e6
    assert 86e6 < counts["ViT-Base"] < 87e6
    assert 123e6 < counts["GPT by scan"] < 125e6
    assert len(counts) == 6
