"""Errors of several modules that no other test comes by."""

import argparse
import inspect
import pathlib
import re
import sys
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import halfstep
from halfstep import optim
from halfstep._preflight.compile.requirements import compiler_versions
from halfstep._preflight.report import rendering as _rendering
from halfstep._preflight.target.mesh import find_mesh
from halfstep.cli import main
from halfstep.cli._command import CommandError, answer, policy
from halfstep.cli._load import load
from halfstep.debug._compare.comparison_report import draw_comparison
from halfstep.debug._record.debug_report import draw_map


@pytest.mark.parametrize(
    ("plot", "message"),
    [
        (_rendering.plot, "drawing a report needs matplotlib"),
        (draw_comparison, "drawing a comparison needs matplotlib"),
        (draw_map, r"drawing a report needs matplotlib.*\[plot\]"),
    ],
)
def test_pictures_need_matplotlib(plot: Any, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = [None] * len(inspect.signature(plot).parameters)
    with pytest.raises(ModuleNotFoundError, match=message):
        # Said before anything is looked at. Unwrapped: beartype would object to the arguments.
        inspect.unwrap(plot)(*arguments)


def test_programs_are_handed_over_by_flatbuffers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(halfstep.PreflightError, match=r"JAX needs the package flatbuffers, which"):
        compiler_versions("cuda")


def test_two_meshes():
    shardings = [
        NamedSharding(AbstractMesh((size,), ("data",)), PartitionSpec("data")) for size in (4, 8)
    ]
    message = r"sharded over one mesh; params is over \{'data': 4\} and batch over \{'data': 8"
    with pytest.raises(halfstep.PreflightError, match=message):
        find_mesh(None, list(zip(("params", "batch"), shardings, strict=True)))


def test_moments_that_are_divided_differently():
    optimizer = optim.flash_adamw(1e-3)
    params, state = optimizer.prepare({"w": jnp.ones((64, 64))})
    first = state.first["w"]
    # As if each had its groups along another axis.
    state = state._replace(first={"w": first._replace(scale=first.scale.T)})
    with pytest.raises(optim.StateError, match="the moments of w must be divided alike; got"):
        optimizer.step(params, state, params)


def test_files_of_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    message = "cannot read .*: No such file.*Give a file that Policy.save has written"
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        policy(str(tmp_path / "none.toml"))
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(CommandError, match=r"there is no file .*Give its path from this folder"):
        load(f"{tmp_path / 'folder.py'}:make_loss")
    with pytest.raises(CommandError, match="Give another file, or - for the screen"):
        answer(argparse.Namespace(json=str(tmp_path)), "text", "{}")
    assert main(["lint", "no.such.module:make_loss"]) == 2
    assert re.search("cannot import 'no.such.module': .*Install what is", capsys.readouterr().err)
