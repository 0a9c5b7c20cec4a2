"""Wrong arguments as a benchmark: calls are counted, and one bad answer misses the bar."""

import pytest

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("flax")

from benchmarks import wrong_arguments


def run(**changed: object) -> dict[str, object]:
    made = {
        "functions": 2,
        "parameters": 3,
        "objects": 4,
        "calls": {"halfstep": 10, "quant": 2},
        "complaints": [],
    }
    return {**made, **changed}


@pytest.mark.parametrize(
    ("result", "held"),
    [
        (run(), [True, True]),
        (run(calls={"halfstep": 11}), [False, True]),
        (run(complaints=["x(y=zero): raised in jax.py"]), [True, False]),
    ],
)
def test_bars(result: dict[str, object], held: list[bool]):
    assert list(wrong_arguments.bars(result, 12).values()) == held


def test_the_text_counts():
    said = wrong_arguments.text(run(complaints=["one"]))
    assert said.startswith("12 calls of 2 functions and methods, with 4 objects")
    assert "3 arguments. 1 raised" in said
    assert said.index("| halfstep | 10") < said.index("| quant    | 2")


@pytest.mark.usefixtures("standard_promotion")
def test_one_function():
    names = [name for name, _, _ in wrong_arguments.wrong.public_functions()]
    others = [name for name in names if "all_finite" not in name]
    made = wrong_arguments.measure(("None", "a text"), others)
    assert made["functions"] == 1
    assert made["complaints"] == []
