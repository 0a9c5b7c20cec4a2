"""What a probe of a library finds, and how it is handed back: one line of JSON.

These modules run in the library's own environment, so that they import nothing of ours but one
another.
"""

import importlib
import importlib.metadata
import json
import os
import pkgutil
import platform
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

ANSWERS = ("yes", "partly", "no", "absent")


class Found(NamedTuple):
    """The answer of a probe, with what was seen."""

    answer: str
    """One of `ANSWERS`: `"no"` has it and fails, `"absent"` has no such thing."""
    evidence: str
    shown: str | None = None
    """What the table says instead of the answer."""


def decide(is_so: bool, evidence: str) -> Found:
    """Yes or no."""
    return Found("yes" if is_so else "no", evidence)


def count(good: int, of: int, evidence: str) -> Found:
    """All, some or none."""
    answer = "yes" if good == of else "partly" if good else "no"
    return Found(answer, evidence)


def error_of(call: Callable[[], Any]) -> str | None:
    """The kind of the error that a call raises, and its first line; `None` if it raises none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        return said(error)
    return None


def said(error: BaseException) -> str:
    """The kind of an error, and its first line."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[0] if len(lines[0]) <= 120 else f"{lines[0][:117]}..."
    return f"{type(error).__name__}: {line.rstrip('.:')}"


def names(*modules: ModuleType) -> set[str]:
    """Public names of modules, of the packages below them, and of their classes."""
    found: set[str] = set()
    for module in modules:
        for thing in [module, *_below(module)]:
            for name, value in vars(thing).items():
                if name.startswith("_"):
                    continue
                found.add(name)
                if isinstance(value, type) and value.__module__.startswith(module.__name__):
                    found.update(n for n in dir(value) if not n.startswith("_"))
    return found


def _below(module: ModuleType) -> Iterable[ModuleType]:
    for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if not info.name.startswith("_"):
            try:
                yield importlib.import_module(f"{module.__name__}.{info.name}")
            except ImportError:
                continue


def absent(module: ModuleType | Iterable[ModuleType], *words: str) -> Found:
    """Answer that the documentation lists no such thing.

    The page that was read is in `benchmarks/_documented.py`, and the comparison links to it. A
    public name with one of these words in it is an error: then the page has to be read again.
    """
    modules = [module] if isinstance(module, ModuleType) else list(module)
    every = names(*modules)
    hits = sorted(n for n in every if any(word in n.lower() for word in words))
    if hits:
        raise AssertionError(f"looked for {words}, and found {hits}")
    shown = ", ".join(f"`{word}`" for word in words)
    return Found("absent", f"None of its {len(every)} public names contains {shown}.")


AUTOCAST = ("autocast", "amp", "cast_function", "policy")
SCALING = ("loss_scal", "scaler", "finite")
WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("products", "carry", "branches", "sums", "shared"), AUTOCAST),
        **dict.fromkeys(("statistics", "rules"), ("rule", *AUTOCAST)),
        **dict.fromkeys(("float32_loss", "growth", "bounds", "skip", "metric"), SCALING),
        **dict.fromkeys(("names_leaf", "shards"), SCALING),
        "why": ("explain", "report", "why", "trace"),
        "limit": ("ledger", "skipped", "limit", "total"),
        "microbatches": ("accum", "micro"),
        "fp8": ("float8", "fp8", "f8", "quant"),
        "fp8_backward": ("float8", "fp8", "f8", "quant"),
        "release": ("release", "hook"),
        "memory": ("memory", "preflight", "fits", "peak"),
        "bisect": ("bisect", "debug", "search", "compare"),
    }
)
"""Words that a name would contain if a library had the feature."""
TOOLS = ("why", "limit", "microbatches", "fp8", "fp8_backward", "release", "memory", "bisect")
LOSS = ("float32_loss", "growth", "bounds", "skip", "metric", "names_leaf", "shards")


def absences(
    module: ModuleType | Iterable[ModuleType], *features: str
) -> dict[str, Callable[[], Found]]:
    """Probes of features that the documentation does not list."""
    return {
        feature: lambda feature=feature: absent(module, *WORDS[feature]) for feature in features
    }


def imports_without_a_device(package: str) -> Found:
    """Whether an import leaves JAX's devices alone: there are none that it could start."""
    # A platform that does not exist: whoever asks for a device gets an error.
    made = subprocess.run(
        [sys.executable, "-c", f"import {package}"],
        env={**os.environ, "JAX_PLATFORMS": "nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    (last, *_) = [line for line in made.stderr.splitlines() if "nowhere" in line] or [""]
    if made.returncode and not last:
        raise AssertionError(made.stderr[-2000:])
    works = "works with a platform that does not exist."
    return decide(
        not made.returncode,
        f"`import {package}` {works}"
        if not made.returncode
        else f"`import {package}`: {last[:80]}...",
    )


def report(probes: Mapping[str, Callable[[], Found]], *packages: str) -> None:
    """Run the probes that the command names, or all, and print what they found.

    An error of a probe is its answer.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, probe in probes.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                one = probe()
        except Exception as error:
            traceback.print_exc()
            one = Found("error", said(error))
        found[name] = {k: v for k, v in one._asdict().items() if v is not None}
    versions = {"python": platform.python_version()}
    versions |= {package: importlib.metadata.version(package) for package in packages}
    print(json.dumps({"versions": versions, "found": found}))
