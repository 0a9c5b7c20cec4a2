"""The environments that other libraries are installed in, each apart from ours and the others'.

They are made by `uv` when they are first asked for, with exact versions, and kept in
`.cache/peers`. Where packages come from is what `uv` is told by its own settings; that of torch for
CPUs is in PyTorch's index of those, or in a folder named by `UV_FIND_LINKS`.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "peers"
JAX = ("jax==0.10.2", "jaxlib==0.10.2")


class MissingEnvironmentError(RuntimeError):
    """An environment cannot be made on this machine; the message says why."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """What is installed together."""

    requires: tuple[str, ...]
    settings: tuple[tuple[str, str], ...] = ()
    """Environment variables of the programs that run in it."""


ENVIRONMENTS: Mapping[str, Environment] = MappingProxyType(
    {
        "mpx": Environment(
            ("mixed-precision-for-JAX==0.1.8", "equinox==0.13.8", "optax==0.2.8", *JAX)
        ),
        "jmp": Environment(("jmp==0.0.4", "equinox==0.13.8", "optax==0.2.8", *JAX)),
        # Its interpreter needs what JAX had until 0.8.
        "jaxamp": Environment(
            ("jaxamp==0.0.4", "equinox==0.13.2", "optax==0.2.5", "jax==0.6.2", "jaxlib==0.6.2")
        ),
        "jaxamp_newest": Environment(("jaxamp==0.0.4", "equinox==0.13.8", "optax==0.2.8", *JAX)),
        "flashoptim_jax": Environment(("flashoptim-jax==0.1.0", "optax==0.2.8", *JAX)),
        "qwix": Environment(("qwix==0.1.8", "flax==0.12.8", "optax==0.2.8", *JAX)),
        "torch_amp": Environment(("torch==2.13.0+cpu", "numpy==2.4.6")),
        "keras": Environment(("keras==3.15.1", "optax==0.2.8", *JAX), (("KERAS_BACKEND", "jax"),)),
    }
)


def python_of(name: str, *, cache: pathlib.Path = CACHE) -> pathlib.Path:
    """The interpreter of an environment, which is made if it is not there.

    Raises:
        MissingEnvironmentError: It cannot be made here.
    """
    environment = ENVIRONMENTS[name]
    folder = cache / name
    python = folder / "bin" / "python"
    done = folder / "requires.txt"
    wanted = "\n".join(environment.requires)
    if done.exists() and done.read_text() == wanted:
        return python
    uv = shutil.which("uv")
    if uv is None:
        raise MissingEnvironmentError("uv is not installed: pip install uv")
    _uv(uv, "venv", "--quiet", "--clear", "--python", "3.11", str(folder))
    _uv(uv, "pip", "install", "--quiet", "--python", str(python), *environment.requires)
    done.write_text(wanted)
    return python


def packages_of(name: str, *, cache: pathlib.Path = CACHE) -> pathlib.Path:
    """The folder of an environment's packages.

    Raises:
        MissingEnvironmentError: The environment cannot be made here.
    """
    return next((python_of(name, cache=cache).parents[1] / "lib").glob("python3*/site-packages"))


def _uv(*command: str) -> None:
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        # What uv draws before its lines is left out.
        lines = [re.sub(r"^\W+", "", line).strip() for line in made.stderr.splitlines()]
        raise MissingEnvironmentError(next((line for line in lines if line), "uv failed"))


def run(
    name: str,
    module: str,
    argv: Sequence[str] = (),
    *,
    settings: Mapping[str, str] = MappingProxyType({}),
    cache: pathlib.Path = CACHE,
) -> dict[str, Any]:
    """What a module of ours prints, as JSON, when an environment's Python runs it.

    Raises:
        MissingEnvironmentError: The environment cannot be made here.
        RuntimeError: The module failed.
    """
    python = python_of(name, cache=cache)
    return run_with(
        python, module, argv, settings={**settings, **dict(ENVIRONMENTS[name].settings)}
    )


def run_with(
    python: str | os.PathLike[str],
    module: str,
    argv: Sequence[str] = (),
    *,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """What a module of ours prints, as JSON, when this Python runs it.

    Raises:
        RuntimeError: The module failed.
    """
    made = subprocess.run(
        [str(python), "-m", module, *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **settings, "PYTHONPATH": str(ROOT)},
    )
    if made.returncode:
        raise RuntimeError(f"{module} failed:\n{made.stderr[-3000:]}")
    # Libraries greet people on standard output, too: the report is the last line.
    return json.loads(made.stdout.strip().splitlines()[-1])
