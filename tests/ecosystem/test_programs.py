"""Other people's programs: each traces, differentiates, and is as exact as 16 bits can be."""

import importlib.util
import os

import pytest

from tests.ecosystem._examples import EXAMPLES
from tests.ecosystem._measure import measure
from tests.ecosystem._programs import Example

# Their own warnings are not ours to mend, and none of them is written for strict promotion.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("standard_promotion"),
]
ROUGH = 0.6
"""A gradient that differs by more points elsewhere: the deepest of these, without a trained weight,
is at 0.35."""


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_it_is_traced_and_differentiated(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in example.modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {example.package}")
    # Keras reads it when it is imported.
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    row = measure(example, fault=False)
    raises = example.without if os.environ.get("EQX_ON_ERROR") != "nan" else ()
    for policy in ("bf16", "f16"):
        assert isinstance(row[policy], float) == (policy not in raises), row
    assert row["bf16"] < ROUGH
    if isinstance(row["bf16_inputs"], float) and row["inputs_run_low"] is True:
        # One sample of a rounding error: as good as casting inputs within its spread.
        assert row["bf16"] <= 2 * row["bf16_inputs"] + 2.0**-8, row
