"""What saving and restoring cost: digests take no memory, and files are hashed side by side."""

import pathlib
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from halfstep._base import SHA256, digest
from tests.integrations._bits import assert_same

pytestmark = pytest.mark.core

orbax = pytest.importorskip("halfstep.integrations.orbax")
checkpoints_module = pytest.importorskip("halfstep.integrations._orbax._checkpoints")
files_module = pytest.importorskip("halfstep.integrations._orbax._files")
verification_module = pytest.importorskip("halfstep.integrations._orbax._verification")
Checkpoints, DamagedCheckpointError = orbax.Checkpoints, orbax.DamagedCheckpointError


@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit])
def test_digests_take_no_memory(kind: AxisType | None):
    sharding, out = None, None
    if kind is not None:
        mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
        sharding, out = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    shape = jax.ShapeDtypeStruct((2**20,), jnp.float32, sharding=sharding)
    program: Any = digest._compiled(out)
    memory = program.lower([shape] * 4).compile().memory_analysis()
    assert memory.argument_size_in_bytes >= 2**22
    assert memory.temp_size_in_bytes < 2**16


def test_arrays_are_in_several_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoints_module, "_FILE_BYTES", 2**16)
    state = {
        f"w{n}": jax.random.normal(jax.random.fold_in(jax.random.key(0), n), (2**14,))
        for n in range(8)
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        assert len(large_files(tmp_path)) >= 4
        assert_same(checkpoints.restore(jax.tree.map(jnp.zeros_like, state))[1], state)


def large_files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.glob("1/state/**/d/*") if path.stat().st_size > 2**14]


@pytest.mark.parametrize("key", [None, secrets.token_bytes(32)], ids=["plain", "signed"])
def test_damaged_arrays(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, key: bytes | None):
    """No array is read before all files are verified: see `verified`."""
    state, read = {"w": jnp.arange(2.0**15)}, []
    of_orbax = Checkpoints._read_arrays

    def reading(self: Any, *args: Any) -> Any:
        read.append(args)
        return of_orbax(self, *args)

    monkeypatch.setattr(Checkpoints, "_read_arrays", reading)
    with Checkpoints(tmp_path, key=key) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        (path,) = large_files(tmp_path)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
        with pytest.raises(DamagedCheckpointError, match=f"{path.name}` is not what was written"):
            checkpoints.restore(state, 1)
    assert read == []


def without_blake3(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files_module, verification_module):
        monkeypatch.setattr(module, "HASHINGS", (SHA256,))


def test_without_blake3_files_are_hashed_with_sha256(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    state = {"w": jnp.arange(3.0)}
    with monkeypatch.context() as patch:
        without_blake3(patch)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, state)
            checkpoints.wait()
            assert_same(checkpoints.restore(state)[1], state)
    assert (tmp_path / "1" / "about" / "files.sha256").exists()
    # Whoever has it reads both.
    with Checkpoints(tmp_path) as checkpoints:
        assert_same(checkpoints.restore(state)[1], state)
        checkpoints.save(2, state)
    assert (tmp_path / "2" / "about" / "files.blake3").exists()


def test_a_step_that_needs_blake3(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    state = {"w": jnp.arange(3.0)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    without_blake3(monkeypatch)
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(orbax.CheckpointError, match=r"step 1 in .* was hashed with BLAKE3, and"),
    ):
        checkpoints.restore(state)


def test_the_handler_alone_waits_for_what_it_writes(tmp_path: pathlib.Path):
    about = files_module.SaveAbout(lambda: "{}", {"at": 3})
    files_module.AboutHandler().save(tmp_path, about)
    assert (tmp_path / "data-0-of-1.json").read_text() == '{"at": 3}'
