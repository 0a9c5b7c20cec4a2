import gzip
import json
import os
import pathlib

import numpy as np
import pytest

from halfstep._base import DamagedFolderError
from halfstep._preflight.compile import compiler as _compiler

ANSWER = {"memory": {"temp": 1}, "estimates": {"flops": 2.0}}


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("HALFSTEP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "preflight"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """What a worker leaves."""
    made = tmp_path / "work"
    made.mkdir()
    (made / "answer.json").write_text(json.dumps(ANSWER))
    with gzip.open(made / "program.hlo.gz", "wt") as file:
        file.write("HloModule step")
    with gzip.open(made / "program.pb.gz", "wb") as file:
        file.write(b"program")
    return made


def test_round_trip(folder: pathlib.Path, cache: pathlib.Path):
    name = _compiler.cache_key({"program": "a"})
    assert _compiler.load_answer(name) is None
    _compiler.save_answer(name, folder)
    _compiler.save_answer(name, folder)
    assert _compiler.load_answer(name) == (
        ANSWER,
        "HloModule step",
        b"program",
    )
    assert [entry.name for entry in cache.iterdir()] == [name], "no half-made entry is left"


def test_a_key_is_of_everything_asked():
    asked = {"program": "a", "request": {"topology": "1x1x1"}, "flags": ("-f",), "versions": {}}
    changed = [asked | {"program": "b"}, asked | {"flags": ()}, asked | {"versions": {"jax": "1"}}]
    assert len({_compiler.cache_key(question) for question in [asked, *changed]}) == 4
    assert _compiler.cache_key(asked) == _compiler.cache_key(dict(reversed(asked.items())))


FILES = ["answer.json", "program.hlo.gz", "program.pb.gz"]


@pytest.mark.parametrize("file", [*FILES, "files.sha256"])
def test_every_flipped_bit_is_found(folder: pathlib.Path, cache: pathlib.Path, file: str):
    _compiler.save_answer("ab", folder)
    path = cache / "ab" / file
    whole = path.read_bytes()
    for bit in np.random.default_rng(0).integers(8 * len(whole), size=20):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert _compiler.load_answer("ab") is None
    path.write_bytes(whole)
    assert _compiler.load_answer("ab") is not None


@pytest.mark.parametrize(
    "answer", ["[" * 10**6, "[]", "{}", '{"memory": [], "estimates": {}}', '{"memory": {"a": "b"}}']
)
def test_an_answer_that_fits_its_hash_and_is_none(
    folder: pathlib.Path, cache: pathlib.Path, answer: str
):
    (folder / "answer.json").write_text(answer)
    _compiler.save_answer("ab", folder)
    assert (cache / "ab" / "files.sha256").exists()
    assert _compiler.load_answer("ab") is None
    with pytest.raises(DamagedFolderError, match=r"has no figures of memory|is not JSON"):
        _compiler._read(cache / "ab")


def test_a_small_file_that_holds_much(
    folder: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    _compiler.save_answer("ab", folder)
    monkeypatch.setattr(_compiler, "_LARGEST", 2**20)
    assert _compiler.load_answer("ab") is not None
    (folder / "program.hlo.gz").write_bytes(gzip.compress(b"0" * 2**21))
    _compiler.save_answer("cd", folder)
    assert (cache / "cd" / "program.hlo.gz").stat().st_size < 2**20
    assert _compiler.load_answer("cd") is None
    with pytest.raises(DamagedFolderError, match=r"`program.hlo.gz` holds more than 1,048,576"):
        _compiler._read(cache / "cd")


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_entry_is_none(folder: pathlib.Path, cache: pathlib.Path, file: str):
    _compiler.save_answer("ab", folder)
    whole = (cache / "ab" / file).read_bytes()
    (cache / "ab" / file).write_bytes(whole[: len(whole) // 2])
    assert _compiler.load_answer("ab") is None
    (cache / "ab" / file).unlink()
    assert _compiler.load_answer("ab") is None


def test_the_oldest_go_first(
    folder: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_compiler, "_KEPT", 2)
    for age, name in enumerate(("aa", "bb")):
        _compiler.save_answer(name, folder)
        os.utime(cache / name, (age, age))
    assert _compiler.load_answer("aa") is not None, "which makes it the one used last"
    _compiler.save_answer("cc", folder)
    assert {entry.name for entry in cache.iterdir()} == {"aa", "cc"}


def test_a_cache_that_cannot_be_written_is_none(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HALFSTEP_CACHE_DIR", str(tmp_path / "file"))
    _compiler.save_answer("ab", folder)
    assert _compiler.load_answer("ab") is None


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HALFSTEP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.join("some", "where"))
    assert _compiler.cache_dir() == pathlib.Path("some", "where", "halfstep", "preflight")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert _compiler.cache_dir() == pathlib.Path.home() / ".cache" / "halfstep" / "preflight"
