"""Checkpoints under attack: other writers, full disks, and files that a stranger made."""

import enum
import json
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep._base.sealed_folder import (
    DamagedFolderError,
    hash_text,
    read_json,
    walk,
)
from halfstep.integrations._orbax._files import HASHINGS, is_sealed
from halfstep.integrations._orbax._json_values import decoded, encoded
from halfstep.integrations._orbax._lock import NAME, WriterLock
from tests.integrations._bits import Places

pytestmark = pytest.mark.core

orbax = pytest.importorskip("halfstep.integrations.orbax")
Checkpoints, CheckpointError = orbax.Checkpoints, orbax.CheckpointError
DamagedCheckpointError = orbax.DamagedCheckpointError


def state(number: int = 0) -> dict[str, Any]:
    return {"w": jnp.arange(6.0) + number, "epoch": number, "ledger": halfstep.Ledger()}


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with the steps 1 and 2."""
    with Checkpoints(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step))
    return tmp_path / "run"


# One writer.


def test_a_second_writer_is_told_who_holds_the_folder(run: pathlib.Path):
    with Checkpoints(run) as first:
        first.restore(state())
        first.save(3, state(3))
        first.wait()
        with Checkpoints(run) as second:
            second.restore(state())
            with pytest.raises(
                CheckpointError,
                match=r"is written to by another Checkpoints of this process.* Two runs would",
            ):
                second.save(4, state(4))
    with Checkpoints(run) as third:
        assert third.restore(state())[0] == 3
        third.save(4, state(4))
    assert (run / "4").is_dir()


HOLDS = """
    import sys, time
    import jax.numpy as jnp
    from halfstep.integrations.orbax import Checkpoints

    checkpoints = Checkpoints(sys.argv[1])
    checkpoints.save(1, {"w": jnp.ones(3)})
    checkpoints.wait()
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: pathlib.Path):
    command = [sys.executable, "-c", textwrap.dedent(HOLDS), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.restore({"w": jnp.zeros(3)})
            with pytest.raises(CheckpointError, match=rf"by process {other.pid} on .*, since 2"):
                checkpoints.save(2, {"w": jnp.ones(3)})
            other.send_signal(signal.SIGKILL)
            other.wait()
            checkpoints.save(2, {"w": jnp.ones(3)})
    assert json.loads((tmp_path / NAME).read_text() or "{}") == {}


# Python and JAX warn of forks in general. This child only waits.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
def test_a_forked_worker_does_not_hold_the_lock(tmp_path: pathlib.Path):
    """As one that loads data, and lives longer than its run."""
    first, second = WriterLock(tmp_path), WriterLock(tmp_path)
    assert first.acquire() is None
    assert first.acquire() is None
    assert second.acquire() is not None
    read, write = os.pipe()
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        # Until its parent has looked.
        os.close(write)
        os.write(begins, b"1")
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    assert os.read(begun, 1) == b"1"
    first.release()
    assert second.acquire() is None
    os.close(write)
    os.waitpid(child, 0)


@pytest.mark.parametrize("said", ["", "[]", "{}", '{"pid": "x"}', "[" * 4096, "\0\xff"])
def test_a_lock_that_says_nothing_useful(tmp_path: pathlib.Path, said: str):
    lock, other = WriterLock(tmp_path), WriterLock(tmp_path)
    assert lock.acquire() is None
    (tmp_path / NAME).write_text(said)
    assert other.acquire() == "another process"


# What cannot be written.


def test_a_folder_that_cannot_be_written_to_is_said_at_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(30, "Read-only file system")

    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(type(checkpoints._directory), "write_text", refuse)
        with pytest.raises(CheckpointError, match=r"cannot be written to: .*Read-only file system"):
            checkpoints.save(1, state())


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state())
        checkpoints.wait()
        full = types.SimpleNamespace(total=9, used=9, free=0)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
        with pytest.raises(
            CheckpointError,
            match=r"nothing was saved to .* and 0 B of the disk are free. Make room",
        ):
            checkpoints.save(2, state())
        assert checkpoints.steps() == [1]


def test_all_is_on_the_disk_before_a_step_has_its_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    flushed: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{file}"))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state())
        checkpoints.wait()
        before = len(flushed)
        assert flushed[-1] == str(tmp_path)
    # In the folder that is not yet named like a step.
    names = {name.rsplit("/", 1)[-1] for name in flushed[: before - 1]}
    written = {path.name for path in (tmp_path / "1").rglob("*") if path.is_file()}
    assert {"manifest.json", "files.blake3"} <= names
    assert written - names <= {"_CHECKPOINT_METADATA", "commit_success.txt"}
    assert all("/1.orbax-checkpoint-tmp" in name for name in flushed[: before - 1])


def test_only_own_unfinished_steps_are_removed(run: pathlib.Path):
    mine = ("3.orbax-checkpoint-tmp", "4.orbax-checkpoint-tmp-17")
    others = ("notes.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmp", "6.orbax-checkpoint-tmp-old")
    for name in mine:
        (run / name / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    for name in others:
        (run / name).mkdir()
        (run / name / "thesis.txt").write_text("of a user")
    with Checkpoints(run) as checkpoints:
        checkpoints.restore(state())
        checkpoints.save(7, state())
    assert not any((run / name).exists() for name in mine)
    assert all((run / name / "thesis.txt").exists() for name in others)


# Values come back as they are.


class Color(enum.IntEnum):
    RED = 1


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return [*map(repr, a)] == [*map(repr, b)] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


VALUES = [
    {"t": (1, 2)},
    {1: 2},
    {1: (2, 3), (1, 2): None},
    {"base64": "not bytes", "dict": {}, "tuple": [1]},
    [b"bytes", "text", 1.5, True, None, 2**80, -0.0],
    [float("nan"), float("inf"), -float("inf"), complex(1, float("nan"))],
    [np.float32(0.1), np.int64(3), np.bool_(True), np.uint8(7)],
    {},
    (),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_as_they_are(value: Any):
    assert same(decoded(json.loads(json.dumps(encoded(value, "it"))), "it"), value)


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [Color.RED]}, r"it\['a'\]\[0\] is a .*Color, which would not come back"),
        (object(), "it is a builtins.object, which would not come back"),
        (np.zeros(3), "it is a numpy.ndarray, which would not come back"),
        (jnp.bfloat16(1), "would not come back as it is"),
        ({1, 2}, "it is a builtins.set, which would not come back"),
        (10**5000, "it is an integer of more than 4000 digits"),
        (nested(200), "is nested more than 100 deep"),
    ],
    ids=["enum", "object", "array", "bfloat16", "set", "long", "nested"],
)
def test_values_that_would_change_are_refused(value: Any, message: str):
    with pytest.raises(CheckpointError, match=message):
        encoded(value, "it")


def test_options_leaves_and_iterators_come_back_as_they_are(tmp_path: pathlib.Path):
    options = {"t": (1, 2), "by": {1: float("inf")}}
    like = {"x": jnp.ones(2), "nan": float("nan"), "z": 1 + 2j, "n": 3}
    with Checkpoints(tmp_path, options=options) as checkpoints:
        checkpoints.save(1, like, Places({1: (2, 3)}))
        checkpoints.wait()
        place = Places(None)
        _, found = checkpoints.restore({**like, "nan": 0.0, "z": 0j, "n": 0}, data=place)
    assert same(place.place, {1: (2, 3)})
    assert same([found["nan"], found["z"], found["n"]], [float("nan"), 1 + 2j, 3])


def test_what_would_change_is_refused_when_it_is_saved(tmp_path: pathlib.Path):
    with pytest.raises(CheckpointError, match=r"`options`\['color'\] is a .*Color"):
        Checkpoints(tmp_path, options={"color": Color.RED})
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"`\['color'\]` is a .*Color"):
            checkpoints.save(1, {"x": jnp.ones(2), "color": Color.RED})
        with pytest.raises(CheckpointError, match=r"the state of `data` is a builtins.object"):
            checkpoints.save(1, {"x": jnp.ones(2)}, Places(object()))
        assert checkpoints.steps() == []


# A stranger's files: consistent with one another, and wrong.


def sign_anew(step: pathlib.Path, names: dict[str, str] | None = None) -> None:
    """Write the list of hashes so that it fits the files, and names more of them."""
    found = {name: HASHINGS[0].of_file(path) for name, path in walk(step)}
    found = {name: value for name, value in found.items() if is_sealed(name)}
    lines = "".join(f"{value}  {name}\n" for name, value in (found | (names or {})).items())
    (step / "about" / "files.blake3").write_text(f"{lines}# {hash_text(lines)}\n")


def forged(change: Callable[[dict[str, Any]], Any]) -> Callable[[pathlib.Path], None]:
    def apply(step: pathlib.Path) -> None:
        path = step / "about" / "manifest.json"
        manifest = json.loads(path.read_text())
        returned = change(manifest)
        path.write_text(json.dumps(manifest if returned is None else returned))
        sign_anew(step)

    return apply


def text(said: str) -> Callable[[pathlib.Path], None]:
    def apply(step: pathlib.Path) -> None:
        (step / "about" / "manifest.json").write_text(said)
        sign_anew(step)

    return apply


def listing(name: str) -> Callable[[pathlib.Path], None]:
    return lambda step: sign_anew(step, {name: "0" * 64})


def pipe(step: pathlib.Path) -> None:
    os.mkfifo(step / "state" / "pipe")
    lines = (step / "about" / "files.blake3").read_text().partition("# ")[0]
    lines += f"{'0' * 64}  state/pipe\n"
    (step / "about" / "files.blake3").write_text(f"{lines}# {hash_text(lines)}\n")


def link(step: pathlib.Path) -> None:
    target = step / "about" / "manifest.json"
    content = target.read_text()
    target.unlink()
    (step.parent / "elsewhere.json").write_text(content)
    target.symlink_to(step.parent / "elsewhere.json")


def linked_folder(step: pathlib.Path) -> None:
    shutil.move(step / "state", step.parent / "elsewhere")
    (step / "state").symlink_to(step.parent / "elsewhere")


def large(step: pathlib.Path) -> None:
    with (step / "state" / "large").open("wb") as file:
        file.truncate(2**40)
    lines = (step / "about" / "files.blake3").read_text().partition("# ")[0]
    lines += f"{'0' * 64}  state/large\n"
    (step / "about" / "files.blake3").write_text(f"{lines}# {hash_text(lines)}\n")


def renamed(step: pathlib.Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.parent / "1", step)


def line(step: pathlib.Path) -> None:
    lines = "no hash at all\n"
    (step / "about" / "files.blake3").write_text(f"{lines}# {hash_text(lines)}\n")


def unlisted(step: pathlib.Path) -> None:
    (step / "about" / "manifest.json").unlink()
    sign_anew(step)


def no_file(step: pathlib.Path) -> None:
    (step / "about" / "files.blake3").unlink()
    (step / "about" / "files.blake3").mkdir()


def linked_afterwards(target: str) -> Callable[[pathlib.Path], None]:
    def apply(step: pathlib.Path) -> None:
        (step / "_CHECKPOINT_METADATA").unlink()
        (step / "_CHECKPOINT_METADATA").symlink_to(target)

    return apply


FORGERIES: dict[str, tuple[Callable[[pathlib.Path], None], str]] = {
    "of another step": (renamed, "the manifest is of step 1, and its folder is named 2"),
    "of a newer format": (forged(lambda m: m.update(format=99)), "is of format 99"),
    "a format that is not a number": (forged(lambda m: m.update(format="2")), "is of format '2'"),
    "a list": (forged(lambda m: []), "the manifest is a list, not an object"),
    "no leaves": (
        forged(lambda m: m.pop("leaves") and None),
        "the manifest says nothing where there must be a 'leaves'",
    ),
    "leaves in a list": (
        forged(lambda m: m.update(leaves=[])),
        r"the manifest says \[\] where there must be a 'leaves'",
    ),
    "a leaf of no kind": (
        forged(lambda m: m["leaves"].update({"['w']": 3})),
        "is a int, not an object",
    ),
    "an unknown dtype": (
        forged(lambda m: m["leaves"]["['w']"].update(dtype="complex1")),
        "says 'complex1' where there must be a 'dtype'",
    ),
    "an object's dtype": (
        forged(lambda m: m["leaves"]["['w']"].update(dtype="O")),
        "says 'O' where there must be a 'dtype'",
    ),
    "a negative shape": (
        forged(lambda m: m["leaves"]["['w']"].update(shape=[-1])),
        r"says \[-1\] where there must be a 'shape'",
    ),
    "a number that is a text": (
        forged(lambda m: m["leaves"]["['epoch']"].update(value="2")),
        "is a str, and said to be a Python int",
    ),
    "a number that is a list": (
        forged(lambda m: m["leaves"]["['epoch']"].update(value=[2])),
        "is a list, and said to be a Python int",
    ),
    "an unknown type": (
        forged(lambda m: m["leaves"]["['epoch']"].update(python="eval")),
        "says 'eval' where there must be a 'python'",
    ),
    "an unknown form": (
        forged(lambda m: m.update(options={"eval": "1"})),
        "`options` of the manifest has something else in it: "
        "the form 'eval' \\(str\\) is not known",
    ),
    "a node of no type": (
        forged(lambda m: m["static"].update({"['ledger']": {}})),
        "says nothing where there must be a 'type'",
    ),
    "no JSON": (text("{"), "`about/manifest.json` is not JSON"),
    "deep JSON": (text("[" * 10**6), "`about/manifest.json` is not JSON"),
    "empty": (text(""), "`about/manifest.json` is not JSON"),
    "a device": (listing("/dev/zero"), "'/dev/zero', which is outside its folder"),
    "a path that leads out": (listing("../1/state"), "which is outside its folder"),
    "a missing file": (listing("state/none"), "`state/none` is missing from its folder"),
    "a line of no file": (line, "has a line that names no file: 'no hash at all'"),
    "no manifest": (unlisted, "it has no `about/manifest.json` in its list of files"),
    "a list that is a folder": (no_file, "is not a regular file in its folder"),
    "keys of no name": (
        forged(lambda m: m["leaves"]["['w']"].update(keys=3)),
        "of the manifest has keys of no name",
    ),
    "options in a list": (
        forged(lambda m: m.update(options={"tuple": []})),
        "`options` of the manifest is a tuple, not a dictionary",
    ),
    "a folder": (listing("state"), "`state` is not a regular file in its folder"),
    "a pipe": (pipe, "`state/pipe` is not a regular file in its folder"),
    "a link": (link, "`about/manifest.json` is not a regular file in its folder"),
    "a linked folder": (linked_folder, "is not a regular file in its folder|was added after"),
    "a terabyte": (large, "bytes, more than there can be"),
    # What Orbax writes when all else is there is not in the list, and Orbax reads it.
    "a link that Orbax reads": (
        linked_afterwards("/etc/hostname"),
        "`_CHECKPOINT_METADATA` is not a regular file in its folder",
    ),
    "a device that Orbax reads": (
        linked_afterwards("/dev/zero"),
        "`_CHECKPOINT_METADATA` is not a regular file in its folder",
    ),
    "a field of an unknown form": (
        forged(lambda m: m["static"]["['ledger']"].update(limit={"a": {}})),
        "a field of the state has something else in it: the form 'a'",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_passed_over(run: pathlib.Path, name: str):
    forge, message = FORGERIES[name]
    forge(run / "2")
    begun = time.monotonic()
    with Checkpoints(run) as checkpoints:
        with pytest.raises(DamagedCheckpointError, match=message):
            checkpoints.restore(state(), 2)
        with pytest.warns(UserWarning, match="step 2 in .* is passed over"):
            step, found = checkpoints.restore(state())
    assert (step, found["epoch"]) == (1, 1)
    assert time.monotonic() - begun < 5


def test_an_older_step_that_orbax_must_not_read(run: pathlib.Path):
    """Orbax reads a file of every step when a run begins to write."""
    linked_afterwards("/dev/zero")(run / "1")
    begun = time.monotonic()
    with Checkpoints(run, keep=5) as checkpoints:
        checkpoints.restore(state(), 2)
        checkpoints.save(3, state(3))
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
    assert time.monotonic() - begun < 5
    assert (run / "1.damaged-0" / "about" / "manifest.json").exists()


def test_a_field_of_another_type_is_refused(run: pathlib.Path):
    def change(manifest: dict[str, Any]) -> None:
        node = manifest["static"]["['ledger']"]
        node.update({name: 5 for name in node if name != "type"})

    forged(change)(run / "2")
    with (
        Checkpoints(run) as checkpoints,
        pytest.raises(CheckpointError, match=r"of step 2 is 5; `like` has"),
    ):
        checkpoints.restore(state(), 2)


def test_a_file_that_was_added_is_found(run: pathlib.Path):
    (run / "2" / "state" / "more").write_text("")
    with (
        Checkpoints(run) as checkpoints,
        pytest.raises(DamagedCheckpointError, match="`state/more` was added after"),
    ):
        checkpoints.restore(state(), 2)


def test_a_place_in_the_data_that_is_none(tmp_path: pathlib.Path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(1), Places(3))
        checkpoints.wait()
        (tmp_path / "1" / "about" / "data-0-of-1.json").write_text('{"eval": 1}')
        sign_anew(tmp_path / "1")
        reason = r".* the form 'eval' \(int\) is not known"
        match = f"the place in the data of step 1 in .* cannot be restored: {reason}"
        with pytest.raises(DamagedCheckpointError, match=match):
            checkpoints.restore(state(), data=Places(0))


# Signatures.


def test_a_signed_step_needs_its_key(tmp_path: pathlib.Path):
    key = secrets.token_bytes(32)
    with Checkpoints(tmp_path, key=key) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        assert checkpoints.restore(state())[0] == 1
    # Whoever has no key of their own reads it as any other.
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(state())[0] == 1
    with (
        Checkpoints(tmp_path, key=secrets.token_bytes(32)) as checkpoints,
        pytest.raises(DamagedCheckpointError, match="is not signed with the key"),
    ):
        checkpoints.restore(state(), 1)
    # Hashes written anew fit the files, and not the key.
    forged(lambda m: m["leaves"]["['epoch']"].update(value=9))(tmp_path / "1")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(state())[1]["epoch"] == 9
    with (
        Checkpoints(tmp_path, key=key) as checkpoints,
        pytest.raises(DamagedCheckpointError, match="is not signed with the key"),
    ):
        checkpoints.restore(state(), 1)


@pytest.mark.parametrize("key", [b"short", "a text of many letters"], ids=repr)
def test_keys_that_are_none(tmp_path: pathlib.Path, key: Any):
    with pytest.raises(ValueError, match="`key` must be 16 bytes or more"):
        Checkpoints(tmp_path, key=key)


def test_a_small_file_that_cannot_be_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").write_text("1")
    assert read_json(tmp_path, "a") == 1

    def fail(path: pathlib.Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(pathlib.Path, "read_bytes", fail)
    with pytest.raises(DamagedFolderError, match=r"the small file `a` cannot be read: .*Input"):
        read_json(tmp_path, "a")
