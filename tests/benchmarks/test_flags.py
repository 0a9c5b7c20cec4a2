"""The benchmark of JAX's coming defaults: its list is complete, and what its verdicts say."""

import ast
import pathlib
from typing import Any

import jax
import pytest

from benchmarks import flags


def upgrades(folder: pathlib.Path) -> set[str]:
    """The names of the flags that JAX's source marks as an upgrade."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        source = path.read_text()
        if "upgrade=True" not in source:
            continue
        for call in ast.walk(ast.parse(source)):
            given = {word.arg: word.value for word in getattr(call, "keywords", ())}
            marked, name = given.get("upgrade"), given.get("name")
            if isinstance(marked, ast.Constant) and marked.value is True:
                assert isinstance(name, ast.Constant)
                found.add(str(name.value))
    return found


def test_every_pending_upgrade_of_the_installed_jax_is_listed():
    found = upgrades(pathlib.Path(jax.__file__).parent)
    assert "jax_threefry_partitionable" in found
    assert found <= {*flags.COMING, *flags.SINCE}


WITHOUT = {"jax": 1.0, "halfstep": 1.01}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"jax": 1.0, "halfstep": 1.01}, "same"),
        ({"jax": 2.0, "halfstep": 2.0}, "plain JAX gives another value, too: 2, not 1"),
        ({"jax": 2.0, "halfstep": 3.0}, "WRONG: 3, not 1.01"),
        ({"jax": 1.0, "halfstep": 3.0}, "WRONG: 3, not 1.01"),
        ({"jax": "E: no", "halfstep": "E: no"}, "plain JAX fails, too: E: no"),
        ({"jax": 1.0, "halfstep": "E: halfstep cannot"}, "refused: E: halfstep cannot"),
        ({"jax": 1.0, "halfstep": "E: rule missing"}, "WRONG: E: rule missing"),
    ],
)
def test_verdicts(found: dict[str, Any], said: str):
    assert flags.verdict(found, WITHOUT) == said
