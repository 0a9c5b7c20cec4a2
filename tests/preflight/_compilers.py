"""Which compilers are there. Where they must be, their absence is a failure and not a skip."""

import base64
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def need(platform: str) -> None:
    """Skip a test without the compiler for a platform, unless HALFSTEP_REQUIRE_COMPILERS is set."""
    package = {"cuda": "jax-cuda12-plugin", "tpu": "libtpu"}[platform]
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        if os.environ.get("HALFSTEP_REQUIRE_COMPILERS"):
            raise
        pytest.skip(f"needs {package}")


def direct(case: str, platform: str) -> dict[str, Any]:
    """What the compiler says about a case of `_cases.py`, without halfstep in between."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.preflight._direct", case, platform],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout)
    return facts | {"proto": base64.b64decode(facts["proto"])}


@pytest.fixture
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A cache of the test's own, empty."""
    monkeypatch.setenv("HALFSTEP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "preflight"
