"""`halfstep examples`: each example as one file, which runs without the repository."""

import ast
import builtins
import json
import os
import pathlib
import subprocess
import symtable
import sys
from collections.abc import Iterator

import pytest

from halfstep.cli import main
from halfstep.cli._run.bundle import Source, bundle
from halfstep.cli._run.examples import examples

FOUND = examples()


def test_all_are_listed(capsys: pytest.CaptureFixture[str]):
    files = pathlib.Path(__file__).parents[2].glob("examples/[a-z]*.py")
    assert sorted(FOUND) == sorted(path.stem for path in files)
    assert main(["examples"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in FOUND)
    assert "halfstep[examples,flax], Fashion-MNIST" in out
    assert main(["examples", "--json", "-"]) == 0
    listed = json.loads(capsys.readouterr().out)["examples"]
    assert [one["name"] for one in listed] == list(FOUND)
    assert listed[list(FOUND).index("gpt_fsdp")]["data"] == ""


def unknown_names(table: symtable.SymbolTable, known: set[str]) -> Iterator[str]:
    """The names that some function reads, and that nothing defines."""
    for symbol in table.get_symbols():
        is_global = symbol.is_global() or table.get_type() == "module"
        if symbol.is_referenced() and is_global and symbol.get_name() not in known:
            yield symbol.get_name()
    for child in table.get_children():
        yield from unknown_names(child, known)


@pytest.mark.parametrize("name", FOUND)
def test_one_file_has_all_that_it_reads(name: str):
    text = bundle(FOUND[name].sources)
    tree = ast.parse(text)
    table = symtable.symtable(text, name, "exec")
    defined = {one.get_name() for one in table.get_symbols() if one.is_assigned()}
    defined |= {one.get_name() for one in table.get_symbols() if one.is_imported()}
    defined |= {one.get_name() for one in table.get_symbols() if one.is_namespace()}
    known = {*defined, *dir(builtins), "__name__", "__doc__"}
    assert sorted(unknown_names(table, known)) == []
    # Nothing is defined twice, and nothing comes from the repository.
    tops = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert sorted(tops) == sorted(set(tops))
    assert "from examples" not in text
    assert "-m examples" not in text
    assert f"python {name}.py" in (ast.get_docstring(tree) or "")


def test_comments_and_code_are_kept():
    text = bundle(FOUND["plain_jax"].sources)
    example = FOUND["plain_jax"].sources[-1].text
    step = example[example.index("    @jax.jit") : example.index("    @jax.jit\n    def predict")]
    assert step in text
    for source in FOUND["plain_jax"].sources:
        for line in source.text.splitlines():
            if line.lstrip().startswith("# "):
                assert line in text


def test_names_that_two_files_share():
    shared = Source(
        "_one", '"""One."""\n\nimport math\n\nSIZE = 3\n\n\ndef area():\n    return SIZE\n'
    )
    example = Source(
        "two",
        '"""Two."""\n\nfrom examples import _one\nfrom examples._one import SIZE as THEIRS\n\n'
        "SIZE = 5\n\n\ndef total(area):\n    return _one.area() + SIZE + THEIRS + area\n",
    )
    space: dict = {}
    exec(bundle([shared, example]), space)
    assert space["total"](100) == 111
    assert space["one_SIZE"] == 3


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ('"""One."""\n\nfrom numpy import sum as mean\n', "import different things as 'mean'"),
        ('"""One."""\n\nSIZE = 1\n\n\ndef f(SIZE):\n    pass\n', "has a parameter 'SIZE'"),
    ],
)
def test_what_cannot_be_one_file(shared: str, message: str):
    example = Source("two", '"""Two."""\n\nfrom statistics import mean\n\nSIZE = 2\n')
    with pytest.raises(ValueError, match=message):
        bundle([Source("_one", shared), example])


def test_it_is_written_and_runs(
    tmp_path: pathlib.Path, data: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["examples", "plain_jax", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    path = tmp_path / "plain_jax.py"
    assert f"run      python {path}" in out
    assert 'pip install "halfstep[examples]"' in out
    assert main(["examples", "plain_jax"]) == 0
    assert capsys.readouterr().out == path.read_text()
    options = ("--data", str(data), "--policy", "f16", "--steps", "5", "--batch", "16")
    # From another folder and without the repository on the path.
    root = str(pathlib.Path(__file__).parents[2])
    code = f"import sys, runpy; sys.path.append({root!r}); sys.modules['examples'] = None; "
    code += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path), *options],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "held-out accuracy" in ran.stdout
    assert (tmp_path / "runs" / "plain_jax" / "curves.png").exists()


def test_errors(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    def said(*words: str) -> str:
        assert main(["examples", *words]) == 2
        return capsys.readouterr().err

    assert "unknown example 'plain_jx'. Did you mean plain_jax?" in said("plain_jx")
    assert "unknown example 'zzzz'. Choose from cnn_batchnorm" in said("zzzz")
    assert "needs the name of an example. Choose from" in said("--out", str(tmp_path))
    nowhere = tmp_path / "no"
    assert "there is no folder" in said("plain_jax", "--out", str(nowhere))
    (tmp_path / "plain_jax.py").write_text("mine")
    assert "another file of that name. Give another folder" in said(
        "plain_jax", "--out", str(tmp_path)
    )
    assert (tmp_path / "plain_jax.py").read_text() == "mine"


def test_a_package_without_them(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys):
    path = tmp_path / "a" / "b" / "c" / "d.py"
    monkeypatch.setattr("halfstep.cli._run.examples.__file__", str(path))
    assert main(["examples"]) == 2
    assert "the examples are missing in" in capsys.readouterr().err
