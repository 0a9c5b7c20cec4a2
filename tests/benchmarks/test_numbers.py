"""Counts of a result that are written by hand have a source, as shares and sizes have."""

from benchmarks import _numbers


def test_counts_are_numbers_too():
    page = "34 of 34 faults, and [64 kills in 16 runs](scale.md) on 2 of the 3 machines.\n"
    assert list(_numbers.found(page)) == ["34 of 34", "64 kills in 16 runs"]
    sources = {("page.md", "34 of 34"): "README.md", ("page.md", "64 kills in 16 runs"): "none.md"}
    (line,) = _numbers.wrong({"page.md": page}, sources)
    assert line == "page.md: the source of 64 kills in 16 runs, none.md, is not there"
