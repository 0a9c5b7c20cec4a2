"""The documentation is true: its names, links, and the README's diff."""

import inspect
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import yaml

import halfstep

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]

FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def without_code(text: str) -> str:
    """A page without its code, in which brackets and quotes mean other things."""
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", text))


# Names.


def documented(prefix: str) -> set[str]:
    """What the API pages render below `prefix`."""
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    return set(re.findall(rf"^::: {re.escape(prefix)}\.([\w.]+)\s*$", text, re.MULTILINE))


def test_every_public_name_is_on_an_api_page():
    things = {name: getattr(halfstep, name) for name in dir(halfstep) if not name.startswith("_")}
    public = {name for name, thing in things.items() if not inspect.ismodule(thing)}
    assert {name for name in documented("halfstep") if "." not in name} == public


@pytest.mark.parametrize("package", ["compat", "integrations"])
def test_every_module_of_a_public_package_is_on_an_api_page(package: str):
    files = (ROOT / "halfstep" / package).glob("*.py")
    modules = {path.stem for path in files if not path.stem.startswith("_")}
    assert {name.split(".")[0] for name in documented(f"halfstep.{package}")} == modules


def test_the_api_index_lists_every_name():
    listed = set(re.findall(r"`([\w.]+)`", (DOCS / "api" / "index.md").read_text()))
    names = {name for name in documented("halfstep") if "." not in name}
    packages = (halfstep.debug, halfstep.optim, halfstep.quant, halfstep.reliability)
    names |= {name for package in packages for name in dir(package) if name[0] != "_"}
    modules = (ROOT / "halfstep" / "compat").glob("[!_]*.py")
    names |= {f"halfstep.compat.{path.stem}" for path in modules}
    assert names - listed == set()


# Pages and links.


def nav_pages(nav: Any) -> Iterator[str]:
    """The pages of a `nav` entry of mkdocs.yml, in order."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from nav_pages(entry)


def test_the_nav_lists_every_page_once():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(nav_pages(config["nav"]))
    assert sorted(listed) == sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


def test_nothing_is_fetched_from_another_host():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["theme"]["font"] is False
    assert not any("//" in path for path in [*config["extra_css"], *config.get("extra_js", [])])


def anchors(page: pathlib.Path) -> set[str]:
    """The ids of a page's headings, as Python-Markdown makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", words))
    return found


def broken_links(page: pathlib.Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        if anchor in ("only-light", "only-dark"):  # A picture for one kind of screen.
            anchor = ""
        path = (page.parent / name).resolve() if name else page
        if not path.is_file() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    return broken


@every_page
def test_links_resolve(page: pathlib.Path):
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found():
    text = "[a](nowhere.md) [b](tour.md#no-such-heading) [c](tour.md#cast) `[d](code.md)`"
    expected = ["nowhere.md", "tour.md#no-such-heading"]
    assert broken_links(DOCS / "index.md", text) == expected


@every_page
def test_no_machine_paths_and_no_typographic_quotes(page: pathlib.Path):
    text = page.read_text()
    assert re.findall(r"(?<![\w.])/(?:tmp|work|home|root|Users)/[^\s`)]*", text) == []
    assert re.findall("[\u2018-\u201f\u00ab\u00bb\u2032\u2033\u00a0]", text) == []


# The README.


def readme_fences(kind: str) -> list[str]:
    return [code for found, code in FENCE.findall(README.read_text()) if found == kind]


def applied(diff: str) -> str:
    """The lines that a diff leaves."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(True) if line[0] != "-")


def test_the_readme_runs_the_result_of_its_second_diff():
    assert applied(readme_fences("diff")[1]) in readme_fences("python")[0]


@pytest.mark.usefixtures("standard_promotion")
def test_the_readme_s_first_diff_is_one_line_that_works():
    first, second = readme_fences("diff")
    before = [line[1:] for line in second.splitlines(True) if line[0] == "-"]
    assert before[0] == "".join(line[1:] for line in first.splitlines(True) if line[0] == "-")
    body = applied(first) + "".join(before[1:])
    code = readme_fences("python")[0]
    begin, end = code.index("@eqx.filter_jit"), code.index("x = jax.random")
    step = f"def step(model, opt_state, x, y):\n{body}    return model, opt_state, loss\n"
    names: dict[str, Any] = {}
    exec(f"{code[:begin]}@eqx.filter_jit\n{step}\n{code[end : code.index('for _')]}", names)
    model, state, losses = names["model"], names["opt_state"], []
    for _ in range(20):
        model, state, loss = names["step"](model, state, names["x"], names["y"])
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    assert model.layers[0].weight.dtype == np.float32


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 145
