"""The page shows what its code prints."""

import contextlib
import io
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FENCE = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.usefixtures("standard_promotion")
def test_the_page_shows_what_its_code_prints():
    namespace: dict = {"__name__": "snippet"}
    printed, shown = "", 0
    for kind, text in FENCE.findall((ROOT / "docs" / "explain.md").read_text()):
        if kind == "text":
            assert printed == text
            shown += 1
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, "train.py", "exec"), namespace)
        printed = out.getvalue()
    assert shown == 8
