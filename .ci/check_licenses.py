"""Licenses of what halfstep and its extras need, in the environment where they are installed.

Every such package has one of the licenses below. One that does not say so, or not so that a program
can read it, is listed by hand with what its files say.
"""

import re
import sys
from importlib import metadata

ALLOWED = (
    "Apache",
    "BSD",
    "ISC",
    "MIT",
    "MPL-2.0",
    "Mozilla Public License 2.0",
    "PSF",
    "Python Software Foundation",
    "CMU License",
    "Unlicense",
    "CC0",
    "Zlib",
)
BY_HAND: dict[str, str] = {}
# XLA's compilers and NVIDIA's assembler: free to use, not free software, and only in these extras.
TOOLS = {"cuda-preflight": {"nvidia-cuda-nvcc-cu12"}, "tpu-preflight": {"libtpu"}}


def name_of(requirement: str) -> str:
    """The package that a requirement is about."""
    return re.split(r"[^\w.-]", requirement.strip())[0].lower().replace("_", "-")


def license_of(name: str) -> str:
    """What a package says of itself: an expression, classifiers, or the first line of a text."""
    if name in BY_HAND:
        return BY_HAND[name]
    about = metadata.metadata(name)
    lines = (about.get("License") or "").strip().splitlines()
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in about.get_all("Classifier") or ()
        if line.startswith("License ::")
    ]
    return about.get("License-Expression") or ", ".join(classifiers) or (lines or ["unknown"])[0]


def needed() -> dict[str, set[str]]:
    """Every installed package that halfstep pulls in, with the extras it comes by."""
    found: dict[str, set[str]] = {}
    for requirement in metadata.requires("halfstep") or ():
        match = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        extra, waiting = match[1] if match else "", [name_of(requirement)]
        while waiting:
            name = waiting.pop()
            if extra in found.get(name, ()):
                continue
            try:
                below = metadata.requires(name) or ()
            except metadata.PackageNotFoundError:
                continue
            found.setdefault(name, set()).add(extra)
            waiting += [name_of(each) for each in below if "extra ==" not in each]
    return found


def main() -> int:
    """Print what is not allowed, or a summary."""
    bad, packages = [], needed()
    for name, extras in sorted(packages.items()):
        said = license_of(name)
        is_tool = all(name in TOOLS.get(extra, ()) for extra in extras)
        if not is_tool and not any(allowed.lower() in said.lower() for allowed in ALLOWED):
            bad.append(f"{name} ({', '.join(extra or 'core' for extra in sorted(extras))}): {said}")
    missing = {"equinox", "jax", "jaxtyping", "optax"} - set(packages)
    bad += [f"{name} is not installed, and cannot be checked" for name in sorted(missing)]
    print("\n".join(bad) or f"licenses of {len(packages)} packages: allowed")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
