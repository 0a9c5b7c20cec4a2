"""What was asked of a training benchmark is on its page, and so is what it missed."""

import json

import pytest

from benchmarks import render
from benchmarks._bars import Bar, bars_text, parsed
from benchmarks._f8_tables import cosine_bars

TRAINED = (
    "training",
    "optim_training",
    "optim_training_4_bits",
    "fp8_training",
    "fp8_outliers",
)


@pytest.mark.parametrize("name", TRAINED)
def test_every_missed_bar_is_on_the_page(name: str):
    made = json.loads((render.RESULTS / f"{name}.json").read_text())
    text = bars_text(made)
    assert text in render.RENDERERS[name](made)
    assert ("All bars were met." in text) == made["passed"]
    ends = text.partition("**Missed**: ")[2]
    for bar, met in made["bars"].items():
        one = parsed(bar, made["tasks"])
        assert f"`{one.policy}`" in text
        if not met:
            assert f"{one.asked}, on {one.task}, by " in ends
            assert f"`{one.policy}`" in ends


def test_a_name_of_a_policy_may_have_commas():
    name = "a task, flash_adamw, 24 bits, held-out loss: within 0.5 % of optax.adamw, f32"
    asked = "held-out loss within 0.5 % of optax.adamw, f32"
    assert parsed(name, ["a task", "other"]) == Bar("a task", "flash_adamw, 24 bits", asked)


def test_fp8_on_the_vit_misses_its_bar_and_the_page_says_so():
    made = json.loads((render.RESULTS / "fp8_training.json").read_text())
    assert not made["passed"]
    page = (render.DOCS / "fp8.md").read_text()
    assert "**Missed**: final loss within 0.25 % of bf16, on ViT on Fashion-MNIST, by `f8`," in page
    assert "final loss within 1.5 % of bf16, on ViT on Fashion-MNIST, by `nvfp4`" in page


def test_means_and_single_batches_below_a_bar():
    rows = [
        {"policy": "good", "bar": 0.9, "linen": [0.95, 0.95]},
        {"policy": "once", "bar": 0.9, "linen": [0.95, 0.89]},
        {"policy": "bad", "bar": 0.9, "linen": [0.8, 0.8]},
        {"policy": "none", "bar": None, "linen": [0.1]},
    ]
    text = cosine_bars(rows)
    assert "**Missed** by `bad`." in text
    assert "Single batches of `once`, `bad` are below it." in text
    assert "All recipes with a bar met it." in cosine_bars(rows[:2])
