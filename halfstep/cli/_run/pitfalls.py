"""Find known pitfalls of an installation: what was found, what it causes, and what to type."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from halfstep._base import TESTED_JAX, TESTED_PYTHON, known_to_work
from halfstep.cli._run.facts import Facts, release, version_of

_COMPILE_SLOWLY = "--xla_backend_optimization_level=0"


@dataclasses.dataclass(frozen=True)
class Pitfall:
    """A pitfall that was found.

    Attributes:
        level: `"wrong"` if something will fail or silently do nothing; `"note"` if it is only worth
            knowing.
        found: The finding.
        cause: The consequence.
        cure: The command or code to type.
    """

    level: Literal["wrong", "note"]
    found: str
    cause: str
    cure: str


def pitfalls(facts: Facts) -> tuple[Pitfall, ...]:
    """Return all pitfalls that are found, wrong ones first."""
    found = [
        one
        for part in (_packages, _tested, _plugins, _platforms, _settings, _flags, _cpu, _memory)
        for one in part(facts)
    ]
    return tuple(sorted(found, key=lambda one: one.level != "wrong"))


def _packages(facts: Facts) -> Iterator[Pitfall]:
    if not facts.requires["halfstep"]:
        yield Pitfall(
            "wrong",
            "halfstep has no metadata",
            "It is imported from a folder, and nothing says what it requires.",
            "pip install --editable . in that folder",
        )
    for one in facts.needed:
        version = version_of(facts, one.name)
        if version is None or not one.allows(version):
            yield Pitfall(
                "wrong",
                f"{one.name} {version or 'is not installed'}, and halfstep requires {one}",
                "Names that halfstep uses may be missing, or mean something else.",
                f'pip install --upgrade "{one}"',
            )


def _tested(facts: Facts) -> Iterator[Pitfall]:
    """Find versions that halfstep allows but that its tests have not run on."""
    jax = version_of(facts, "jax")
    oldest, newest = TESTED_JAX[0], TESTED_JAX[-1]
    required = [one for one in facts.needed if one.name == "jax"]
    if jax is not None and release(jax) > release(newest):
        yield Pitfall(
            "note",
            f"JAX {jax} is newer than {newest}, the newest tested version",
            f"halfstep is tested with {known_to_work()}. A newer JAX may have renamed what "
            "autocast, explain and debug read.",
            f'pip install "jax<={newest}" if something fails',
        )
    # A version that is not even allowed is reported as wrong, by `_packages`.
    allowed = jax is not None and all(one.allows(jax) for one in required)
    if jax is not None and allowed and release(jax) < release(oldest):
        yield Pitfall(
            "note",
            f"JAX {jax} is older than {oldest}, the oldest tested version",
            f"halfstep is tested with {known_to_work()}.",
            f'pip install --upgrade "jax>={oldest}"',
        )
    if release(facts.python)[:2] > release(TESTED_PYTHON[-1]):
        yield Pitfall(
            "note",
            f"Python {facts.python} is newer than {TESTED_PYTHON[-1]}, the newest tested version",
            f"halfstep is tested with Python {TESTED_PYTHON[0]} to {TESTED_PYTHON[-1]}.",
            f"use Python {TESTED_PYTHON[-1]} if something fails",
        )


def _plugins(facts: Facts) -> Iterator[Pitfall]:
    """Find plugins of another version than jaxlib: JAX ignores them, or fails later."""
    seen = set()
    for one in facts.requires["jax"]:
        is_plugin = "plugin" in one.name or one.name == "libtpu"
        version = version_of(facts, one.name)
        if not is_plugin or version is None or one.name in seen:
            continue
        seen.add(one.name)
        if not one.allows(version):
            # The extra without "-local" also installs the CUDA libraries of the same version.
            extra = one.extra.removesuffix("-local")
            yield Pitfall(
                "wrong",
                f"{one.name} {version}, and JAX {version_of(facts, 'jax')} requires {one.versions}",
                "JAX leaves the plugin out and computes on the CPU, or fails when it compiles.",
                f'pip install --upgrade "jax[{extra}]"',
            )
    cuda = [name for name in ("jax-cuda12-plugin", "jax-cuda13-plugin") if version_of(facts, name)]
    if len(cuda) > 1:
        yield Pitfall(
            "wrong",
            f"{' and '.join(cuda)} are both installed",
            "Both register the platform cuda, and one of them fails.",
            f"pip uninstall {cuda[0]} {cuda[0].replace('plugin', 'pjrt')}",
        )


def _platforms(facts: Facts) -> Iterator[Pitfall]:
    asked = facts.variables.get("JAX_PLATFORMS", "")
    platforms = {name.strip() for name in asked.split(",") if name.strip()}
    there = {
        "cuda": bool(_installed(facts, "jax-cuda12-plugin", "jax-cuda13-plugin")),
        "rocm": bool(_installed(facts, "jax-rocm60-plugin", "jax-rocm7-plugin")),
        "tpu": bool(_installed(facts, "libtpu")),
    }
    types = {"cuda": "cuda12", "rocm": "rocm7-local", "tpu": "tpu"}
    for name, plugin in there.items():
        if (name in platforms or (name in facts.accelerators and not asked)) and not plugin:
            where = "JAX_PLATFORMS asks for it" if name in platforms else "the machine has one"
            yield Pitfall(
                "wrong",
                f"no plugin for {name} is installed, and {where}",
                "JAX fails when it starts." if name in platforms else "JAX computes on the CPU.",
                f'pip install "jax[{types[name]}]"',
            )
        if plugin and not asked and name not in facts.accelerators:
            yield Pitfall(
                "note",
                f"a plugin for {name} is installed, and no such device is seen",
                "Every start of JAX tries it, complains, and goes on with the CPU.",
                "export JAX_PLATFORMS=cpu",
            )
        if asked and name in facts.accelerators and not platforms & {name, "gpu"}:
            yield Pitfall(
                "note",
                f"JAX_PLATFORMS={asked}, and this machine has a {name} device",
                "It is not used.",
                "unset JAX_PLATFORMS",
            )


def _settings(facts: Facts) -> Iterator[Pitfall]:
    config = facts.config
    if config["jax_enable_x64"]:
        yield Pitfall(
            "wrong",
            "jax_enable_x64 is on",
            "New arrays are float64, and a policy leaves float64 as it is: nothing is lowered.",
            "unset JAX_ENABLE_X64, or make parameters and batches with dtype=jnp.float32",
        )
    precision = config["jax_default_matmul_precision"]
    if precision in ("high", "highest", "float32", "tensorfloat32"):
        yield Pitfall(
            "wrong",
            f"jax_default_matmul_precision is {precision}",
            "Every product then asks for that precision, and autocast leaves it in float32.",
            "unset JAX_DEFAULT_MATMUL_PRECISION, and give precision= where it is meant",
        )
    elif precision not in (None, "default"):
        yield Pitfall(
            "note",
            f"jax_default_matmul_precision is {precision}",
            "It changes products that stay in float32, also in a run that is compared with.",
            "unset JAX_DEFAULT_MATMUL_PRECISION",
        )
    for name in ("jax_debug_nans", "jax_debug_infs"):
        if config[name]:
            yield Pitfall(
                "wrong",
                f"{name} is on",
                "An overflow raises, in a step that loss scaling would have skipped.",
                f"unset {name.upper()}, and look with halfstep.debug.first_nonfinite",
            )
    if config["jax_disable_jit"]:
        yield Pitfall(
            "wrong",
            "jax_disable_jit is on",
            "Every operation runs alone: slowly, and with more memory.",
            "unset JAX_DISABLE_JIT",
        )
    if config["jax_numpy_dtype_promotion"] == "strict":
        yield Pitfall(
            "note",
            "jax_numpy_dtype_promotion is strict",
            "halfstep works with it. Optax, Flax and others mix dtypes and raise.",
            'with jax.numpy_dtype_promotion("standard"): around their code',
        )
    if not config["jax_compilation_cache_dir"]:
        yield Pitfall(
            "note",
            "no compilation cache",
            "Every start of a program compiles all of it again.",
            "export JAX_COMPILATION_CACHE_DIR=~/.cache/jax",
        )


def _flags(facts: Facts) -> Iterator[Pitfall]:
    flags = facts.variables.get("XLA_FLAGS", "").split()
    known = {
        "--xla_allow_excess_precision=false": (
            "Every operation in 16 bits is rounded, and fewer are fused: slower, and other bits.",
            "leave it out, except to compare numerics",
        ),
        _COMPILE_SLOWLY: (
            "Programs compile sooner and run slowly.",
            "leave it out of what is measured",
        ),
        "--xla_gpu_autotune_level=0": (
            "Matrix products on a GPU are not tuned, and 16 bits gain less than they could.",
            "leave it out of what is measured",
        ),
    }
    for flag, (cause, cure) in known.items():
        if flag in flags:
            yield Pitfall("note", f"XLA_FLAGS has {flag}", cause, cure)
    for flag in flags:
        name, _, value = flag.partition("=")
        if name == "--xla_force_host_platform_device_count" and value != "1":
            yield Pitfall(
                "note",
                f"XLA_FLAGS has {flag}",
                f"The CPU is shown as {value} devices, which share its cores.",
                "leave it out, except to try meshes",
            )
        if name == "--xla_dump_to":
            yield Pitfall(
                "note",
                f"XLA_FLAGS has {flag}",
                "Every compile writes its programs there, which takes time and space.",
                "leave it out, except to look at programs",
            )


def _cpu(facts: Facts) -> Iterator[Pitfall]:
    if facts.native16 == ():
        yield Pitfall(
            "note",
            "the processor has no 16-bit arithmetic",
            "On it 16 bits are computed in float32, and are slower, not faster.",
            "measure speed on an accelerator; numerics can be tried here",
        )


def _memory(facts: Facts) -> Iterator[Pitfall]:
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if name in facts.variables:
            yield Pitfall(
                "note",
                f"{name}={facts.variables[name]}",
                "A GPU's memory is shared out otherwise than preflight assumes, 75 % to JAX.",
                "give preflight the same share: --memory-fraction",
            )


def _installed(facts: Facts, *names: str) -> list[str]:
    return [name for name in names if version_of(facts, name)]
