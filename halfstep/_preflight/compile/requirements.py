"""Check that the compilers are installed and belong to this JAX."""

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Mapping

from halfstep._preflight.preflight_errors import PreflightError


def compiler_versions(platform: str) -> Mapping[str, str]:
    """Return the versions of all packages that take part in a compile for a platform.

    Raises:
        PreflightError: If a package is missing, or versions do not go together. The message has the
            command that installs them.
    """
    extra = "cuda-preflight" if platform == "cuda" else "tpu-preflight"
    command = f'Install it with: pip install "halfstep[{extra}]"'
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    if importlib.util.find_spec("flatbuffers") is None:
        raise PreflightError(
            "to hand a program to a compiler, JAX needs the package flatbuffers, which is not "
            f"installed. {command}"
        )
    if platform == "tpu":
        version = _version("libtpu")
        if version is None:
            raise PreflightError(
                "compiling for a TPU needs XLA's TPU compiler, the package libtpu, which is not "
                f"installed. {command} (about 200 MB, no TPU needed)."
            )
        return {**found, "libtpu": version}
    plugins = ("jax-cuda12-plugin", "jax-cuda13-plugin")
    plugin, version = next(
        ((name, version) for name in plugins if (version := _version(name))), (plugins[0], None)
    )
    if version is None:
        raise PreflightError(
            "compiling for an NVIDIA GPU needs XLA's GPU compiler, the package jax-cuda12-plugin, "
            f"which is not installed. {command} (about 1 GB, no GPU needed)."
        )
    if version != found["jaxlib"]:
        raise PreflightError(
            f"{plugin} must be of jaxlib's version, {found['jaxlib']}; {version} is installed. "
            f'Bring them together with: pip install "halfstep[{extra}]"'
        )
    pjrt = plugin.replace("plugin", "pjrt")
    found |= {plugin: version, pjrt: _version(pjrt) or "not installed"}
    nvcc = _version("nvidia-cuda-nvcc-cu12") or _version("nvidia-cuda-nvcc")
    if nvcc is None and shutil.which("ptxas") is None:
        raise PreflightError(
            "compiling for an NVIDIA GPU needs NVIDIA's assembler ptxas, of the package "
            f"nvidia-cuda-nvcc-cu12 or of a CUDA toolkit on the PATH; there is neither. {command}"
        )
    return {**found, "nvidia-cuda-nvcc": nvcc or "of the CUDA toolkit on the PATH"}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
