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


UNREADY = (
    "for grad support, subclass <class 'jax._src.lax.control_flow.loops.Scan3'> must implement"
)
SCANS = {"scan, jit": f"plain JAX fails, too: NotImplementedError: {UNREADY} `vjp_fwd`"}


@pytest.mark.parametrize(
    ("said", "failed", "is_excused"),
    [
        ({}, {}, True),
        ({}, {"test_cond::one": "AssertionError"}, False),
        (SCANS, {}, True),
        (SCANS, {"test_structures::test_gradients[bf16-scan]": "assert []"}, True),
        (SCANS, {"test_structures::test_read": "assert {Cond} == {Cond, <structures.Scan>}"}, True),
        (SCANS, {"test_numerics::test_steps": f"ValueError: no rule: {UNREADY} it"}, True),
        (SCANS, {"test_structures::test_gradients[bf16-cond]": "assert []"}, False),
        (SCANS, {"test_leaves::test_scanned": "AssertionError"}, False),
        ({**SCANS, "cond, jit": "WRONG: 3, not 1"}, {}, False),
    ],
)
def test_a_failure_of_a_test_must_be_one_of_plain_jax(
    said: dict[str, str], failed: dict[str, str], is_excused: bool
):
    row = {"not_same": said, "conformance": {"passed": 1, "failed": failed}}
    assert flags.excused(row) == is_excused


def row(**parts: Any) -> dict[str, Any]:
    found = {"flag": "jax_scan3", "value": "true", "jax": "0.12", "calls": 2, "not_same": {}}
    return {**found, "conformance": {"passed": 3, "failed": {}}, **parts}


def test_the_table():
    failed = {"passed": 3, "failed": {"test_scan": "NotImplementedError"}}
    rows = [
        row(),
        row(jax="0.10", not_same=SCANS, conformance=failed),
        row(flag="jax_remat3", conformance=failed),
        row(flag="jax_custom_jvp3", conformance=dict(flags.UNTESTED)),
    ]
    heading, _, first, second, third = flags.text({"rows": rows}).splitlines()
    assert [cell.strip() for cell in heading.split("|")[1:-1]] == ["flag", "JAX 0.12", "JAX 0.10"]
    assert "| green: 2 calls, 3 tests " in first
    assert "| 1 of 2 calls and 3 of 4 tests as without it. plain JAX fails, too: `NotImpl" in first
    assert "| 2 of 2 calls and 3 of 4 tests as without it. test_scan: `NotImpl" in second
    assert "| no such flag " in second
    assert "| green: 2 calls " in third
