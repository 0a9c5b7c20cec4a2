"""A machine that is in order, for `halfstep doctor`."""

from typing import Any

from halfstep.cli._run.facts import Facts, Requirement

HALFSTEP = (
    "equinox>=0.13.2",
    "jax>=0.10",
    "tqdm>=4.66; extra == 'live'",
    "rich>=13.9; extra == 'live'",
    "matplotlib>=3.9; extra == 'plot'",
    "jax[tpu]; extra == 'tpu-preflight'",
)
JAX = (
    "jaxlib<=0.12.0.1,>=0.11.2",
    "libtpu==0.0.50.*; extra == 'tpu'",
    "jax-cuda12-plugin<=0.12.0.1,>=0.12.0.1; extra == 'cuda12-local'",
)


def _parsed(lines: tuple[str, ...]) -> tuple[Requirement, ...]:
    return tuple(made for line in lines if (made := Requirement.parse(line)) is not None)


def machine(**changes: Any) -> Facts:
    """One that is in order, but for what is given; `versions` and `config` are added to."""
    versions = {"equinox": "0.13.8", "jax": "0.12.0.1", "jaxlib": "0.12.0.1", "tqdm": "4.67.1"}
    config = {
        "jax_enable_x64": False,
        "jax_numpy_dtype_promotion": "standard",
        "jax_default_matmul_precision": None,
        "jax_debug_nans": False,
        "jax_debug_infs": False,
        "jax_disable_jit": False,
        "jax_compilation_cache_dir": "~/.cache/jax",
    }
    given: dict[str, Any] = {
        "halfstep": "0.1.0",
        "python": "3.13.0",
        "machine": "Linux x86_64, 8 cores",
        "requires": {"halfstep": _parsed(HALFSTEP), "jax": _parsed(JAX)},
        "variables": {},
        "accelerators": (),
        "native16": ("avx512_bf16",),
        **changes,
        "versions": versions | changes.get("versions", {}),
        "config": config | changes.get("config", {}),
    }
    return Facts(**given)
