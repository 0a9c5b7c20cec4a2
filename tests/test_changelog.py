"""CHANGELOG.md has the form of Keep a Changelog, and begins with this version."""

import datetime
import pathlib
import re

import pytest

import halfstep

ROOT = pathlib.Path(__file__).parents[1]
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
RELEASE = re.compile(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d{2}-\d{2})")


def problems(text: str, version: str) -> list[str]:
    """What is not as it should be."""
    found: list[str] = []
    if not text.startswith("# Changelog\n"):
        found.append("it begins with `# Changelog`")
    for required in ("keepachangelog.com", "semver.org"):
        if required not in text.partition("\n## ")[0]:
            found.append(f"its introduction links to {required}")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    if not headings or headings[0] != "[Unreleased]":
        found.append("its first section is `## [Unreleased]`")
    releases = [(heading, RELEASE.fullmatch(heading)) for heading in headings[1:]]
    found += [f"`## {heading}` is `## [1.2.3] - 2026-01-31`" for heading, m in releases if not m]
    versions = [tuple(map(int, m.groups()[:3])) for _, m in releases if m]
    if versions != sorted(set(versions), reverse=True):
        found.append("versions fall from top to bottom, each once")
    dates = [datetime.date.fromisoformat(m[4]) for _, m in releases if m]
    if dates != sorted(dates, reverse=True):
        found.append("so do dates")
    if not versions or ".".join(map(str, versions[0])) != version:
        found.append(f"the newest release is {version}")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        kinds = re.findall(r"^### (.+)$", section, re.MULTILINE)
        if [kind for kind in KINDS if kind in kinds] != kinds:
            found.append(f"{title}: kinds are {', '.join(KINDS)}, each once and in this order")
        for part in re.split(r"^### ", section, flags=re.MULTILINE)[1:]:
            if not re.search(r"^- ", part, re.MULTILINE):
                found.append(f"{title}, {part.splitlines()[0]}: there is nothing in it")
    return found


def test_its_form():
    assert problems((ROOT / "CHANGELOG.md").read_text(), halfstep.__version__) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("## [Unreleased]\n", "", "its first section is `## [Unreleased]`"),
        ("- 2026-", "- yesterday, 2026-", "is `## [1.2.3] - 2026-01-31`"),
        ("### Changed", "### Improved", "kinds are Added, Changed"),
        ("## [0.1.0]", "## [0.0.9]", "the newest release is 0.1.0"),
        ("semver.org", "example.org", "links to semver.org"),
    ],
)
def test_another_form_is_noticed(old: str, new: str, problem: str):
    text = (ROOT / "CHANGELOG.md").read_text()
    assert old in text
    found = problems(text.replace(old, new), "0.1.0")
    assert any(problem in each for each in found), found
