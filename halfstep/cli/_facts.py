"""What there is to know about this machine, without starting anything."""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import sys
from collections.abc import Mapping

import jax

from halfstep._version import __version__
from halfstep.cli._requires import Requirement, Requires, requires

CONFIG = (
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_default_matmul_precision",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_disable_jit",
    "jax_compilation_cache_dir",
)
VARIABLES = (
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)
# x86 and Arm, as Linux names what they can.
_BITS16 = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "bf16", "asimdhp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """All that `halfstep doctor` judges.

    Attributes:
        halfstep: Its version.
        python: Its version.
        machine: The operating system and the processor's kind.
        versions: Of all distributions that are installed.
        requires: What halfstep and JAX require.
        config: JAX's settings.
        variables: Those of the environment that matter.
        accelerators: `"cuda"`, `"rocm"` or `"tpu"`, as far as device files show them.
        native16: What the processor has for 16-bit floats; `None` if that is not known.
    """

    halfstep: str
    python: str
    machine: str
    versions: Mapping[str, str]
    requires: Requires
    config: Mapping[str, object]
    variables: Mapping[str, str]
    accelerators: tuple[str, ...]
    native16: tuple[str, ...] | None

    @property
    def needed(self) -> tuple[Requirement, ...]:
        """What halfstep requires without any extra."""
        return tuple(one for one in self.requires["halfstep"] if not one.extra)

    @property
    def extras(self) -> tuple[str, ...]:
        """The names of halfstep's extras."""
        names = {one.extra for one in self.requires["halfstep"]} - {""}
        return tuple(sorted(names))


def gather() -> Facts:
    """Look, and start no backend."""
    found = {
        _normal(one.metadata["Name"]): one.version for one in importlib.metadata.distributions()
    }
    return Facts(
        halfstep=__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        versions=found,
        requires={name: requires(name) for name in ("halfstep", "jax")},
        config={name: getattr(jax.config, name) for name in CONFIG},
        variables={name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
        accelerators=_accelerators(pathlib.Path("/dev")),
        native16=_native16(pathlib.Path("/proc/cpuinfo")),
    )


def version_of(facts: Facts, name: str) -> str | None:
    """The version of a distribution, however its name is written."""
    return facts.versions.get(_normal(name))


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _accelerators(devices: pathlib.Path) -> tuple[str, ...]:
    marks = {"cuda": "nvidia[0-9]*", "rocm": "kfd", "tpu": "accel[0-9]*"}
    if not devices.is_dir():
        return ()
    return tuple(name for name, mark in marks.items() if any(devices.glob(mark)))


def _native16(path: pathlib.Path) -> tuple[str, ...] | None:
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return ("asimdhp",)
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    names = {"flags", "Features"}
    flags = next((line.split(":")[1] for line in lines if line.split("\t")[0] in names), None)
    if flags is None:
        return None
    return tuple(name for name in _BITS16 if name in flags.split())
