"""Collect facts about this installation and this machine, without starting a backend."""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterator, Mapping

import jax

from halfstep._version import __version__

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
# Features of x86 and Arm processors, as Linux names them.
_BITS16 = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "bf16", "asimdhp")


# Requirements of distributions, from their metadata.

# This is a small part of PEP 440 and PEP 508, written by hand. `packaging` has all of it, but is
# not a dependency of halfstep. Neither jax, equinox, optax and jaxtyping nor their requirements
# (absl-py, jaxlib, ml-dtypes, numpy, opt-einsum, scipy, typing-extensions, wadler-lindig) install
# it, on the oldest supported versions as on the newest; the test environments have it for other
# reasons. A command that says what is missing must not need anything that may be missing. Only
# releases are compared, without pre-releases and local versions: the requirements of halfstep and
# JAX have no others.
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?\s*([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclasses.dataclass(frozen=True)
class Requirement:
    """One line of `Requires-Dist`.

    Attributes:
        name: The name of the distribution.
        extras: The extras of the distribution that are required.
        versions: The versions that are required, such as `">=0.8.0"`.
        extra: The extra that has this requirement; empty if it always holds.
    """

    name: str
    extras: tuple[str, ...]
    versions: str
    extra: str

    @classmethod
    def parse(cls, text: str) -> "Requirement | None":
        """Parse a line; `None` if it is for other machines or other versions of Python."""
        found = _REQUIREMENT.fullmatch(text.strip())
        if found is None:
            return None
        name, extras, versions, marker = (part or "" for part in found.groups())
        extra = _EXTRA.search(marker)
        # Other conditions of a marker are for an installer; no requirement of halfstep has one.
        if _EXTRA.sub("", marker).strip():
            return None
        inner = tuple(part.strip() for part in extras.split(",") if part.strip())
        return cls(name, inner, versions.strip(" ()"), extra[1] if extra else "")

    def allows(self, version: str) -> bool:
        """Return whether a version meets the requirement."""
        return all(_allows(part.strip(), version) for part in self.versions.split(",") if part)

    def __str__(self) -> str:
        inner = f"[{','.join(self.extras)}]" if self.extras else ""
        return f"{self.name}{inner}{self.versions}"


Requires = Mapping[str, tuple[Requirement, ...]]
"""The requirements of distributions, by name."""


def requires(name: str) -> tuple[Requirement, ...]:
    """List the requirements of a distribution, including those of its extras."""
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    return tuple(made for line in lines if (made := Requirement.parse(line)) is not None)


def expanded(of: Requires, name: str, extra: str) -> Iterator[Requirement]:
    """List the requirements of an extra, including those of other extras that it requires."""
    for one in of.get(name, ()):
        if one.extra == extra:
            yield one
            for inner in one.extras:
                yield from expanded(of, one.name, inner)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without any suffix: `(0, 10, 2)`."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _allows(part: str, version: str) -> bool:
    found = re.fullmatch(r"(>=|<=|==|!=|~=|>|<)\s*([\w.]+?)(\.\*)?", part)
    if found is None:
        return True
    sign, bound = found[1], release(found[2])
    has = release(version)
    if found[3]:
        same = has[: len(bound)] == bound
        return same if sign == "==" else not same
    # PEP 440 compares 1.2 and 1.2.0 as equal.
    length = max(len(has), len(bound))
    has, bound = (numbers + (0,) * (length - len(numbers)) for numbers in (has, bound))
    return {
        ">=": has >= bound,
        # The upper end of `~=` is ignored: no requirement that is read here has one.
        "~=": has >= bound,
        "<=": has <= bound,
        "==": has == bound,
        "!=": has != bound,
        ">": has > bound,
        "<": has < bound,
    }[sign]


# Facts about this installation and this machine.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """All facts that `halfstep doctor` judges.

    Attributes:
        halfstep: The version of halfstep.
        python: The version of Python.
        machine: The operating system and the processor's kind.
        versions: The versions of all distributions that are installed.
        requires: The requirements of halfstep and JAX.
        config: JAX's settings.
        variables: The environment variables that matter.
        accelerators: `"cuda"`, `"rocm"` or `"tpu"`, as far as device files show them.
        native16: The processor's features for 16-bit floats; `None` if they are not known.
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
        """The requirements of halfstep without any extra."""
        return tuple(one for one in self.requires["halfstep"] if not one.extra)

    @property
    def extras(self) -> tuple[str, ...]:
        """The names of halfstep's extras."""
        names = {one.extra for one in self.requires["halfstep"]} - {""}
        return tuple(sorted(names))


def gather() -> Facts:
    """Gather the facts without starting a backend."""
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
    """Return the version of a distribution, however its name is written."""
    return facts.versions.get(_normal(name))


def _normal(name: str) -> str:
    # PEP 503: names of distributions are compared without case, and with one kind of separator.
    return name.lower().replace("_", "-").replace(".", "-")


def _accelerators(devices: pathlib.Path) -> tuple[str, ...]:
    # Look at device files, because `jax.devices()` would start the backend, which takes a GPU's
    # memory and locks a TPU.
    marks = {"cuda": "nvidia[0-9]*", "rocm": "kfd", "tpu": "accel[0-9]*"}
    if not devices.is_dir():
        return ()
    return tuple(name for name, mark in marks.items() if any(devices.glob(mark)))


def _native16(path: pathlib.Path) -> tuple[str, ...] | None:
    # macOS has no /proc, and every Apple processor of this kind has 16-bit arithmetic.
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
