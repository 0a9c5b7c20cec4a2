"""Compilers' answers, kept by the content of what they were asked.

An entry is a folder of JSON and text. It is never executed, so a cache that somebody else has
written can be wrong and not dangerous.
"""

import gzip
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

_LIMIT = 1024
"""Entries kept; the ones used longest ago go first. An entry is about 100 KB."""


def cache_dir() -> pathlib.Path:
    """Where answers are kept: `$HALFSTEP_CACHE_DIR`, else `halfstep` in the user's cache."""
    own = os.environ.get("HALFSTEP_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(own if own else os.path.join(base, "halfstep")) / "preflight"


def key(question: Mapping[str, Any]) -> str:
    """A name for what is asked: the program, the target, flags and versions."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


def load(name: str) -> tuple[dict[str, Any], str] | None:
    """An answer and its program, or `None`; an entry that cannot be read counts as absent."""
    entry = cache_dir() / name
    try:
        answer = json.loads((entry / "answer.json").read_text())
        with gzip.open(entry / "program.hlo.gz", "rt") as file:
            text = file.read()
        os.utime(entry)
    except (OSError, ValueError, EOFError):
        return None
    return answer, text


def save(name: str, folder: pathlib.Path) -> None:
    """Keep the answer that lies in a worker's folder. A cache that cannot be written is none."""
    cache = cache_dir()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        staging = pathlib.Path(tempfile.mkdtemp(prefix=".new-", dir=cache))
        try:
            for file in ("answer.json", "program.hlo.gz"):
                shutil.copy(folder / file, staging / file)
            shutil.rmtree(cache / name, ignore_errors=True)
            staging.rename(cache / name)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        entries = sorted(cache.glob("[0-9a-f]*"), key=lambda entry: entry.stat().st_mtime)
        for entry in entries[: max(0, len(entries) - _LIMIT)]:
            shutil.rmtree(entry, ignore_errors=True)
    except OSError:
        return
