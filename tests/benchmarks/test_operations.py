"""The page's table of operations is the one that is computed with."""

import pathlib

import pytest

from benchmarks import operations
from halfstep._autocast import TABLE


def test_the_page_is_up_to_date():
    assert operations.main(["--check"]) == 0


def test_every_primitive_is_shown_once_under_its_rule():
    lines = [line.split("|") for line in operations.render().splitlines()[2:]]
    shown = {name.strip(" `"): line[1].strip() for line in lines for name in line[3].split(",")}
    assert shown == {name: rule.value for name, rule in TABLE.items()}


def test_a_changed_rule_is_noticed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    page = tmp_path / "autocast.md"
    monkeypatch.setattr(operations, "PAGE", page)
    page.write_text("# No marks\n")
    assert operations.main(["--check"]) == 1
    page.write_text(f"# Page\n\n{operations.BEGIN}\n{operations.END}\n")
    assert operations.main(["--check"]) == 1
    assert operations.main([]) == 0
    assert operations.main(["--check"]) == 0
    page.write_text(page.read_text().replace("`exp`", "`expo`"))
    assert operations.main(["--check"]) == 1
