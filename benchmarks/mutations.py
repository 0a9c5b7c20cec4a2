"""Files that somebody has damaged or forged, given to all that reads files.

    python -m benchmarks.mutations --json FILE

Real files of four kinds are written once: a checkpoint, a capture, a policy, an entry of the
preflight cache. Then they are changed at random, one change at a time, and read. Damage changes
bytes and leaves the hashes alone: the answer is what was written, or the documented error.
Forgeries change bytes or what JSON says, and write the hashes anew: another value may come back,
which only a signature can find, but nothing may raise an error of another library. Nothing may take
longer than a second. The exit status is 1 if a bar is missed. Needs `halfstep[orbax]`.
"""

import copy
import dataclasses
import gzip
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import halfstep
from benchmarks._report import parser, report, table, write
from halfstep import debug
from halfstep._base import SHA256, seal, without_key_type
from halfstep._preflight.compile import compiler
from halfstep.integrations._orbax._files import HASHINGS, LISTS, is_sealed
from halfstep.integrations.orbax import CheckpointError, Checkpoints

MODULE = "benchmarks.mutations"
COUNTS: Mapping[str, int] = MappingProxyType(
    {"checkpoint": 4_000, "capture": 4_000, "policy": 52_000, "cache": 40_000}
)
"""How many changes of each kind of file: 100,000 in all."""
SLOW = 1.0
"""Seconds that nothing may take."""
SAME, REFUSED, OTHER, RAW = "as written", "refused", "another value", "another error"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of file: how it is written, read, and sealed anew."""

    write: Callable[[pathlib.Path], pathlib.Path]
    """Into a folder; returns what is changed."""
    read: Callable[[pathlib.Path], Any]
    """What it holds."""
    reseal: Callable[[pathlib.Path], None] | None
    errors: tuple[type[Exception], ...]
    """Those that are documented."""


def _like() -> dict[str, Any]:
    return {
        "w": jnp.zeros((4, 8)),
        "low": jnp.zeros(9, jnp.bfloat16),
        "scaling": halfstep.DynamicLossScaling(),
        "ledger": halfstep.Ledger(),
        "key": jax.random.key(0),
        "epoch": 0,
        "rate": 0.0,
    }


def _state() -> dict[str, Any]:
    key = jax.random.key(7)
    return {
        **_like(),
        "w": jax.random.normal(key, (4, 8)),
        "low": jax.random.normal(key, (9,), jnp.bfloat16),
        "key": key,
        "epoch": 3,
        "rate": 0.1,
    }


def _leaves(tree: Any) -> list[Any]:
    """Values that can be compared, with their types."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return str(leaf.dtype), np.asarray(without_key_type(leaf)).tobytes()
        return type(leaf).__name__, repr(leaf)

    return [plain(leaf) for leaf in jax.tree.leaves(tree)]


def _write_checkpoint(folder: pathlib.Path) -> pathlib.Path:
    with Checkpoints(folder, options={"rate": 0.1, "sizes": (1, 2)}) as checkpoints:
        checkpoints.save(1, _state())
    return folder / "1"


def _read_checkpoint(step: pathlib.Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Checkpoints(step.parent, options={"rate": 0.1, "sizes": (1, 2)}) as checkpoints:
            return _leaves(checkpoints.restore(_like(), 1)[1])


def _reseal_checkpoint(step: pathlib.Path) -> None:
    for name in LISTS:
        (step / "about" / name).unlink(missing_ok=True)
    seal(
        step,
        where=step / "about",
        name_of=lambda name: name if is_sealed(name) else None,
        hashing=HASHINGS[0],
    )


def _write_capture(folder: pathlib.Path) -> pathlib.Path:
    capture = debug.Capture(folder)
    capture(jnp.asarray(False), {"w": jnp.arange(6.0)}, jax.random.key(3))
    (path,) = capture.wait()
    return path


def _read_capture(path: pathlib.Path) -> Any:
    return _leaves(debug.load_capture(path, {"w": jnp.zeros(6)}, jax.random.key(0)))


def _reseal(path: pathlib.Path) -> None:
    (path / SHA256.sums).unlink(missing_ok=True)
    seal(path, where=path)


def _write_policy(folder: pathlib.Path) -> pathlib.Path:
    policy = halfstep.Policy(
        compute="bf16",
        keep=("state", "**/norm"),
        rules=("op:exp=float32", "scope:head=accumulate"),
        stores=("store:op:dot_general@mlp#3=e4m3", "store:line:model.py:12=recompute"),
    )
    policy.save(folder / "policy.toml", notes=("made by a plan",))
    return folder


def _read_policy(folder: pathlib.Path) -> Any:
    return str(halfstep.Policy.load(folder / "policy.toml"))


def _write_cache(folder: pathlib.Path) -> pathlib.Path:
    work = folder / "work"
    work.mkdir()
    answer = {"memory": {"temp_size_in_bytes": 5}, "estimates": {"flops": 2.0}}
    (work / "answer.json").write_text(json.dumps(answer))
    for name, content in (("program.hlo.gz", b"HloModule step"), ("program.pb.gz", b"program")):
        (work / name).write_bytes(gzip.compress(content))
    os.environ["HALFSTEP_CACHE_DIR"] = str(folder)
    compiler.save_answer("ab", work)
    return compiler.cache_dir() / "ab"


class _MissError(Exception):
    """There is no such entry: the program is compiled again."""


def _read_cache(entry: pathlib.Path) -> Any:
    os.environ["HALFSTEP_CACHE_DIR"] = str(entry.parents[1])
    found = compiler.load_answer(entry.name)
    if found is None:
        raise _MissError
    return found


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "checkpoint": Kind(
            _write_checkpoint,
            _read_checkpoint,
            _reseal_checkpoint,
            (CheckpointError, FileNotFoundError),
        ),
        "capture": Kind(_write_capture, _read_capture, _reseal, (ValueError,)),
        "policy": Kind(_write_policy, _read_policy, None, (ValueError, FileNotFoundError)),
        "cache": Kind(_write_cache, _read_cache, _reseal, (_MissError,)),
    }
)


# Changes.


def damage(path: pathlib.Path, chance: random.Random) -> str:
    """Change the bytes of a file, and say how."""
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content) + 1)
    how = chance.choice(("flip", "cut", "zero", "insert", "repeat", "text", "delete", "empty"))
    if how == "flip" and content:
        content[at % len(content)] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del content[at:]
    elif how == "zero":
        content[at : at + chance.randrange(1, 64)] = bytes(chance.randrange(1, 64))
    elif how == "insert":
        content[at:at] = chance.randbytes(chance.randrange(1, 32))
    elif how == "repeat":
        content += bytes(content)
    elif how == "text":
        words = (b"[", b"{", b'"', b"null", b"NaN", b"1e999", b"-1", b"../", b"#", b"=", b"\\u0000")
        content[at:at] = chance.choice(words) * chance.choice((1, 1, 1, 50_000))
    elif how == "empty":
        content.clear()
    if how == "delete":
        path.unlink()
    else:
        path.write_bytes(content)
    return how


ODD = (
    None,
    True,
    -1,
    2**80,
    1.5,
    "",
    "x",
    "../..",
    "/dev/zero",
    [],
    {},
    [[]],
    {"a": {}},
    "O",
    "f4",
)


def forge(value: Any, chance: random.Random) -> Any:
    """What JSON says, with one thing in it changed."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        made = dict(value)
        if chance.random() < 0.1:
            del made[name]
        else:
            made[name] = forge(value[name], chance)
        return made
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        return [forge(x, chance) if n == place else x for n, x in enumerate(value)]
    return copy.deepcopy(chance.choice(ODD))


def changed(folder: pathlib.Path, kind: Kind, chance: random.Random) -> tuple[str, bool]:
    """Change a copy of what was written: what was done, and whether hashes fit again."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = chance.choice(files)
    is_forged = kind.reseal is not None and chance.random() < 0.5
    how = ""
    if is_forged and path.suffix == ".json":
        path.write_text(json.dumps(forge(json.loads(path.read_text()), chance)))
        how = "json"
    elif is_forged and chance.random() < 0.1:
        path.unlink()
        target = chance.choice(("/dev/zero", "/etc/hostname", str(folder.parent)))
        path.symlink_to(target)
        how = "link"
    else:
        how = damage(path, chance)
    if is_forged and kind.reseal is not None and how != "link":
        kind.reseal(folder)
    return how, is_forged


def tried(kind: Kind, place: pathlib.Path, expected: Any) -> tuple[str, float, str]:
    """What reading gives, how long it takes, and what was said."""
    begun = time.monotonic()
    said = ""
    try:
        outcome = SAME if kind.read(place) == expected else OTHER
    except kind.errors as error:
        outcome, said = REFUSED, str(error)
    except Exception as error:
        outcome, said = RAW, f"{type(error).__name__}: {error}"
    return outcome, time.monotonic() - begun, said


def measure(name: str, count: int, seed: int = 0) -> dict[str, Any]:
    """Change and read a kind of file so many times."""
    kind, chance = KINDS[name], random.Random(seed)
    outcomes: Counter[str] = Counter()
    slowest, wrong = 0.0, []
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        (root / "written").mkdir()
        made = kind.write(root / "written")
        kept = root / "kept"
        shutil.copytree(made, kept)
        expected = kind.read(made)
        for number in tqdm(range(count), desc=name):
            shutil.rmtree(made)
            shutil.copytree(kept, made)
            how, is_forged = changed(made, kind, chance)
            outcome, seconds, said = tried(kind, made, expected)
            slowest = max(slowest, seconds)
            # A policy has no hashes: another text may be another policy.
            may_differ = is_forged or kind.reseal is None
            is_bad = outcome == RAW or (outcome == OTHER and not may_differ) or seconds > SLOW
            label = outcome if not is_forged else f"{outcome}, hashes written anew"
            outcomes[label] += 1
            if is_bad:
                wrong.append({"number": number, "how": how, "outcome": outcome, "said": said[:200]})
    return {
        "kind": name,
        "changes": count,
        "outcomes": dict(outcomes),
        "slowest_seconds": round(slowest, 3),
        "wrong": wrong[:20],
        "wrong_count": len(wrong),
    }


def bars(rows: Sequence[Mapping[str, Any]], count: int) -> dict[str, bool]:
    """What must hold."""
    return {
        f"{count:,} changes": sum(row["changes"] for row in rows) >= count,
        "no other error, no silent change, nothing over a second": all(
            row["wrong_count"] == 0 for row in rows
        ),
    }


def text(result: Mapping[str, Any]) -> str:
    """The table."""
    lines = []
    for row in result["rows"]:
        line = {
            "kind": row["kind"],
            "changes": f"{row['changes']:,}",
            "slowest": f"{row['slowest_seconds']:.2f}",
        }
        for outcome in (SAME, REFUSED, OTHER, RAW):
            found = (n for label, n in row["outcomes"].items() if label.startswith(outcome))
            line[outcome] = f"{sum(found):,}"
        lines.append(line)
    columns = {
        "kind": "what was changed",
        "changes": "times",
        REFUSED: "refused, as documented",
        SAME: "read as written",
        OTHER: "read as something else",
        RAW: "error of another library",
        "slowest": "slowest, seconds",
    }
    late = [row["kind"] for row in result["rows"] if row["slowest_seconds"] > SLOW]
    missed = (
        f" **A bar is missed:** nothing was to take longer than {SLOW:g} second, and a "
        f"{' and a '.join(late)} did."
    )
    return (
        f"{table(lines, columns)}\n\nAnother value is read only from policies, which have no "
        "hashes, and where the hashes were rewritten, which a signature detects."
        f"{missed if late else ''}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--quick", action="store_true", help="a few hundred changes")
    given = options.parse_args(argv)
    share = 200 if given.quick else 1
    rows = [measure(name, count // share) for name, count in COUNTS.items()]
    total = sum(count // share for count in COUNTS.values())
    made = report(MODULE, {"rows": rows, "bars": bars(rows, total)}, packages=("orbax-checkpoint",))
    print(text(made))
    for row in rows:
        for wrong in row["wrong"]:
            print(row["kind"], wrong)
    write(made, given.json)
    return 0 if all(made["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
