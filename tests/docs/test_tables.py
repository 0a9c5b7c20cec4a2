"""The generated tables of the docs are those that the library computes with."""

import pathlib
import types

import pytest

import halfstep
from docs.generators import comparison, home, operations, support
from halfstep._autocast import TABLE
from halfstep._preflight import ACCELERATORS

GENERATORS = [comparison, home, operations, support]
every_generator = pytest.mark.parametrize("generator", GENERATORS, ids=lambda g: g.__name__)


def cells(text: str) -> list[list[str]]:
    """The lines of a Markdown table, without the one below its heading."""
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines if not line[0].startswith("--")]


@every_generator
def test_the_page_is_up_to_date(generator: types.ModuleType):
    assert generator.main(["--check"]) == 0


@every_generator
def test_a_changed_page_is_noticed(
    generator: types.ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    page = tmp_path / generator.PAGE.name
    page.write_text(generator.PAGE.read_text())
    monkeypatch.setattr(generator, "PAGE", page)
    name = {
        comparison: "Users that it names",
        home: "Mixed-precision",
        operations: "`exp` ",
        support: "| native ",
    }[generator]
    page.write_text(page.read_text().replace(name, "something else", 1))
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0
    assert page.read_text() == (support.ROOT / "docs" / page.name).read_text()


def test_every_primitive_is_listed_once_with_its_class():
    listed = {name.strip("`"): rule for name, rule, *_ in cells(operations.render())[1:]}
    assert {name: listed[name] for name in TABLE} == {n: rule.value for n, rule in TABLE.items()}
    assert len(cells(operations.render())) - 1 == len(listed)
    assert {"scan", "while", "cond", "custom_vjp_call", "shard_map"} <= set(listed)
    never = {line[0].strip("`") for line in cells(operations.render()) if line[3] == "never"}
    assert {"dot_general", "psum", "all_gather", "pallas_call"} <= never
    assert "exp" not in never


def test_links_of_the_readme_are_those_of_the_home_page():
    assert "](docs/" in home.README.read_text()
    assert "](docs/" not in home.render()
    assert "](my-loss-is-nan.md)" in home.render()


def test_native_is_what_has_units_for_it():
    heading, *lines = cells(support.hardware())
    found = {line[0]: dict(zip(heading, line, strict=True)) for line in lines}
    assert len(found) == len(ACCELERATORS) + 1
    fp8 = next(name for name in heading if "`f8`" in name)
    small = next(name for name in heading if "`mxfp8`" in name)
    large = next(name for name in heading if "`f8-block`" in name)
    assert found[ACCELERATORS["h100"].description][fp8] == "native"
    assert found[ACCELERATORS["a100-40gb"].description][fp8] == "emulated"
    assert found[ACCELERATORS["v5e"].description]["`bf16`"] == "native"
    assert found[ACCELERATORS["v5e"].description]["`f16`"] == "emulated"
    native = {name: found[ACCELERATORS[name].description] for name in ("h100", "b200", "l4")}
    assert [line[small] for line in native.values()] == ["emulated", "native", "emulated"]
    assert [line[large] for line in native.values()] == ["native", "native", "emulated"]
    named = [name for text in heading for name in text.replace("`", "").split(", ")]
    assert set(halfstep.RECIPES) <= set(named)


def test_frameworks_and_versions_are_those_of_the_tests():
    for feature in support.FEATURES:
        assert (support.ROOT / feature.test).is_file()
    heading, *lines = cells(support.features())
    covered = [sum(cell == "tested" for cell in line) for line in lines]
    assert covered == [4, 4, 4, 3]
    jax = heading.index("on JAX")
    newest = support.pinned("test.txt", "jax")
    assert all(line[jax].startswith(newest) for line in lines)
    assert any("," in line[jax] for line in lines)
    assert not all("," in line[jax] for line in lines)
