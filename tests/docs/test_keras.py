"""The step with a model of Keras, which is shown on its page and needs Keras to run."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "migrating" / "keras.md"


def shown() -> str:
    """The one block of the page that is a whole program of Keras."""
    (block,) = re.findall(r"^```text\n(import os\n.*?)^```", PAGE.read_text(), re.M | re.S)
    return block


def test_the_program_is_one():
    compile(shown(), "keras.py", "exec")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs keras")
def test_the_step_of_the_page_trains():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, "-c", shown()], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
