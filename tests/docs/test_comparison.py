"""The comparison by documentation: every statement has the page that makes it."""

import dataclasses
import re

import pytest

from benchmarks import _documented
from benchmarks._documented import ABSENT, LARGE, LIBRARIES, OURS, PROBED, Row, Said, unsourced
from docs.generators import comparison

TABLES = {
    "experience": (_documented.EXPERIENCE, LARGE),
    "features": (_documented.FEATURES, LARGE),
    "smaller libraries": (_documented.SMALLER, PROBED),
}
every_table = pytest.mark.parametrize("name", TABLES)


@every_table
def test_every_cell_has_a_source(name: str):
    assert unsourced(*TABLES[name]) == []


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (None, "no statement"),
        (Said(" ", "https://example.org"), "no statement"),
        (Said("everywhere", ""), "no link to a source"),
        (Said("everywhere", "support.md"), "no link to a source"),
    ],
)
def test_a_cell_without_a_source_is_found(said: Said | None, wrong: str):
    row = _documented.EXPERIENCE[0]
    cells = {key: one for key, one in row.cells.items() if key != "maxtext"}
    if said is not None:
        cells["maxtext"] = said
    assert unsourced((Row(row.title, cells),), LARGE) == [f"{row.title}, maxtext: {wrong}"]
    ours = dataclasses.replace(row, cells={**row.cells, OURS: Said("GPUs", "")})
    assert unsourced((ours,), LARGE) == [f"{row.title}, halfstep: no page of these docs"]


def lines_without_a_link(block: str) -> list[list[str]]:
    """The lines of a table in which a cell after the first one is not a link."""
    rows = [line.split("|")[2:-1] for line in block.splitlines() if line.startswith("|")][2:]
    return [row for row in rows if not all(re.search(r"\]\(\S+\)", cell) for cell in row)]


@every_table
def test_every_row_of_the_page_links_its_sources(name: str):
    text = comparison.PAGE.read_text()
    block = text.partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name} -->")[0]
    assert block.count("](https://") > 8
    assert lines_without_a_link(block) == []
    bare = block.replace("](https://", " ", 1)
    assert len(lines_without_a_link(bare)) == 1


def test_what_is_not_documented_is_never_a_no():
    for rows, libraries in TABLES.values():
        for row in rows:
            for key in libraries:
                text = row.cells[key].text
                assert text not in ("no", "-", "")
                assert key == OURS or text != "none", (row.title, key)
    assert any(said.text == ABSENT for row in _documented.FEATURES for said in row.cells.values())


def test_every_version_is_named_with_its_page():
    text = comparison.read()
    assert _documented.READ in text
    for key, library in LIBRARIES.items():
        if key != OURS:
            assert f"[{library.name}]({library.page}): {library.read}" in text


def test_links_to_files_name_a_commit():
    """A branch would change under the statement."""
    pages = {said.page for rows, _ in TABLES.values() for r in rows for said in r.cells.values()}
    pages |= {library.page for library in LIBRARIES.values()}
    for page in pages:
        if page.startswith("https://github.com/"):
            assert re.search(r"/((blob|commit)/[0-9a-f]{40}(/|$)|pull/\d+$)", page), page
