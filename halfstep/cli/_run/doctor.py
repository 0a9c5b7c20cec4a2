"""Run `halfstep doctor`."""

import argparse
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from halfstep._base import TESTED_JAX, TESTED_PYTHON, aligned
from halfstep.cli._command import answer, kept_apart
from halfstep.cli._run.facts import Facts, expanded, gather, version_of
from halfstep.cli._run.pitfalls import Pitfall, pitfalls

ENABLES: Mapping[str, str] = MappingProxyType(
    {
        "cuda-preflight": "halfstep preflight for NVIDIA GPUs, without a GPU",
        "examples": "what the examples need",
        "flax": "halfstep.integrations.flax and nnx",
        "haiku": "training with dm-haiku",
        "live": "halfstep.debug.Live on a terminal",
        "orbax": "halfstep.integrations.orbax: checkpoints",
        "plot": "plots of preflight and debug",
        "tpu-preflight": "halfstep preflight for TPUs, without a TPU",
    }
)
"""The purpose of each extra, which metadata does not say."""

_TESTED = tuple(zip(TESTED_JAX, TESTED_PYTHON, strict=True))


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    with kept_apart(arguments):
        facts = gather()
        devices = [str(device) for device in jax.devices()] if arguments.devices else None
    found = pitfalls(facts)
    answer(
        arguments,
        report(facts, found, devices),
        json.dumps(_made(facts, found, devices), indent=2),
    )
    return 1 if any(one.level == "wrong" for one in found) else 0


def report(facts: Facts, found: Sequence[Pitfall], devices: Sequence[str] | None) -> str:
    """Write the report as text."""
    listed = "not asked; halfstep doctor --devices starts JAX and lists them"
    if devices is not None:
        listed = ", ".join(devices)
    rows = [
        ["halfstep", facts.halfstep],
        ["Python", facts.python],
        ["tested with", f"JAX {', '.join(f'{jax} (Python {on})' for jax, on in _TESTED)}"],
        ["machine", facts.machine],
        ["accelerators", ", ".join(facts.accelerators) or "none seen"],
        ["devices", listed],
        *([name, value] for name, value in facts.variables.items()),
    ]
    packages = [["package", "version", "required"]]
    for name, (version, required) in _packages(facts).items():
        packages.append([name, version or "-", required])
    extras = [["extra", "installed", "enables", "to get it"]]
    for name, one in _extras(facts).items():
        state = "yes" if one["installed"] else f"lacks {', '.join(one['missing'])}"
        extras.append([name, state, one["enables"], "" if one["installed"] else one["type"]])
    wrong = sum(one.level == "wrong" for one in found)
    parts = [
        aligned(rows, [False, False]),
        aligned(packages, [False, False, False]),
        aligned(extras, [False] * 4),
        f"pitfalls: {wrong} wrong, {len(found) - wrong} to know",
    ]
    parts += [f"{one.level}: {one.found}\n  {one.cause}\n  Cure: {one.cure}" for one in found]
    return "\n\n".join(parts)


def _made(facts: Facts, found: Sequence[Pitfall], devices: Sequence[str] | None) -> dict[str, Any]:
    return {
        "halfstep": facts.halfstep,
        "python": facts.python,
        "tested": [{"jax": jax, "python": python} for jax, python in _TESTED],
        "machine": facts.machine,
        "accelerators": list(facts.accelerators),
        "native16": facts.native16 if facts.native16 is None else list(facts.native16),
        "devices": devices,
        "variables": dict(facts.variables),
        "config": dict(facts.config),
        "packages": {name: version for name, (version, _) in _packages(facts).items()},
        "extras": _extras(facts),
        "healthy": all(one.level != "wrong" for one in found),
        "pitfalls": [vars(one) for one in found],
    }


def _packages(facts: Facts) -> dict[str, tuple[str | None, str]]:
    """List the requirements of halfstep and JAX, and the plugins that are installed."""
    found: dict[str, tuple[str | None, str]] = {}
    for one in (*facts.needed, *(one for one in facts.requires["jax"] if not one.extra)):
        found.setdefault(one.name, (version_of(facts, one.name), one.versions))
    for one in facts.requires["jax"]:
        version = version_of(facts, one.name)
        # Requirements of JAX's extras matter only if they are plugins that are installed.
        if one.extra and version and ("plugin" in one.name or one.name == "libtpu"):
            found.setdefault(one.name, (version, one.versions))
    return found


def _extras(facts: Facts) -> dict[str, dict[str, Any]]:
    found = {}
    for extra in facts.extras:
        missing = [
            one.name
            for one in expanded(facts.requires, "halfstep", extra)
            if not (version := version_of(facts, one.name)) or not one.allows(version)
        ]
        found[extra] = {
            "enables": ENABLES.get(extra, ""),
            "installed": not missing,
            "missing": list(dict.fromkeys(missing)),
            "type": f'pip install "halfstep[{extra}]"',
        }
    return found
