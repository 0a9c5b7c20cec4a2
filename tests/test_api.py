"""The public interface is what `tests/api.txt` says, so that no change of it is by accident."""

import difflib
import pathlib
import shutil

import pytest

import halfstep
from tests._api import ROOT, SNAPSHOT, public, snapshot


def test_the_interface_is_what_was_agreed():
    agreed, found = SNAPSHOT.read_text(), snapshot()
    changes = difflib.unified_diff(agreed.splitlines(), found.splitlines(), "agreed", "now", n=0)
    assert agreed == found, "\n".join(
        [
            *changes,
            "If that is meant: python -m tests._api, and a line in CHANGELOG.md. A name that goes,",
            "or a call that no longer works, is first deprecated (docs/deprecations.md).",
        ]
    )


def test_it_has_every_name_there_is():
    static = {name for name in public("halfstep", ROOT) if name != "__version__"}
    assert static == {name for name in dir(halfstep) if not name.startswith("_")}
    assert static == set(vars(halfstep)["__all__"])
    # Each is where the table says that it is.
    for name in static:
        getattr(halfstep, name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("microbatches: int = 1", "microbatches: int = 2"),
        ("def filter_grad(", "def filter_gradient("),
    ],
)
def test_a_change_is_noticed(tmp_path: pathlib.Path, old: str, new: str):
    leave_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "halfstep", tmp_path / "halfstep", ignore=leave_out)
    path = tmp_path / "halfstep" / "_training" / "grad.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    if "gradient" in new:
        with pytest.raises(LookupError, match="grad has no filter_grad"):
            snapshot(tmp_path)
    else:
        assert snapshot(tmp_path) != snapshot()
