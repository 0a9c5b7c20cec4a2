"""Rules that select leaves by path."""

import pytest
from hypothesis import given, strategies as st

from halfstep._base.calls import argument_names
from halfstep._base.trees import compile_rule, match_rules

pytestmark = [pytest.mark.core, pytest.mark.types]

PATHS = ["model/layers/0/weight", "model/layers/1/weight", "model/bn/running_var", "batch/x", "key"]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("model", [1, 1, 1, 0, 0]),
        ("model/layers/0", [1, 0, 0, 0, 0]),
        ("model/layers/*/weight", [1, 1, 0, 0, 0]),
        ("model/*", [1, 1, 1, 0, 0]),
        ("**/weight", [1, 1, 0, 0, 0]),
        ("**/running_var", [0, 0, 1, 0, 0]),
        ("**", [1, 1, 1, 1, 1]),
        ("**/layers/**/weight", [1, 1, 0, 0, 0]),
        ("model/**", [1, 1, 1, 0, 0]),
        ("batch/?", [0, 0, 0, 1, 0]),
        ("*/bn", [0, 0, 1, 0, 0]),
        ("**/running_*", [0, 0, 1, 0, 0]),
        ("key", [0, 0, 0, 0, 1]),
    ],
)
def test_rules(rule: str, expected: list[int]):
    assert match_rules([rule], PATHS) == [bool(e) for e in expected]


@pytest.mark.parametrize(
    "rule", ["mode", "model/layer", "weight", "odel", "batch/x/y", "model/bn/run"]
)
def test_no_partial_component_matches(rule: str):
    with pytest.raises(ValueError, match="selects nothing among 5 leaves"):
        match_rules([rule], PATHS)


@pytest.mark.parametrize(
    ("rule", "near"),
    [
        ("model/layers/0/weights", "'model/layers/0/weight'"),
        ("**/running_mean", "'model/bn/running_var'"),
        ("modl", "'model'"),
        ("stat", "'state'"),
    ],
)
def test_unmatched_rule_names_the_nearest(rule: str, near: str):
    with pytest.raises(ValueError, match=f"the rule .* in `keep` selects nothing.*{near}"):
        match_rules([rule], PATHS, roots=["model", "state", "batch", "key"])


def test_an_empty_argument_is_no_mistake():
    assert match_rules(["state"], PATHS, roots=["model", "state"]) == [False] * 5


@given(st.lists(st.text("ab", min_size=1), min_size=1))
def test_a_path_is_a_rule_for_itself(parts: list[str]):
    path = "/".join(parts)
    assert match_rules([path], [path]) == [True]
    assert compile_rule("**/" + parts[-1]).match(path + "/")


@pytest.mark.parametrize("rule", ["", "/a", "a/", 3])
def test_bad_rules(rule):
    with pytest.raises(ValueError, match="a path rule is a text such as"):
        compile_rule(rule)


def test_argument_names():
    def plain(model, batch, *rest, flag=True):
        del model, batch, rest, flag

    assert argument_names(plain, 2) == ("model", "batch")
    assert argument_names(plain, 4) == ("model", "batch", "rest/0", "rest/1")
    assert argument_names(max, 2) == ("0", "1")

    class Callable:
        def __call__(self, x, y):
            del x, y

    assert argument_names(Callable(), 2) == ("x", "y")
