"""What is in the wheel and the source distribution, and nothing else: `check_dist.py DIST`."""

import pathlib
import re
import sys
import tarfile
import zipfile
from email import message_from_bytes

REQUIRED = {
    "halfstep/__init__.py",
    "halfstep/_preflight/target/accelerators.toml",
    "halfstep/py.typed",
}


def wheel_problems(path: pathlib.Path) -> list[str]:
    """What is wrong with a wheel."""
    found: list[str] = []
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        inside = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
        inside.add(f"{info}/licenses/LICENSE")
        found += [f"{name} is missing" for name in sorted((REQUIRED | inside) - names)]
        for name in sorted(names - inside - REQUIRED):
            if not re.fullmatch(r"halfstep/[\w/]+\.py", name):
                found.append(f"{name} does not belong there")
        if found:
            return found
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
        entry = archive.read(f"{info}/entry_points.txt").decode()
    version = path.name.split("-")[1]
    for key, value in {
        "Name": "halfstep",
        "Version": version,
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Requires-Python": ">=3.11",
        "Description-Content-Type": "text/markdown",
    }.items():
        if metadata[key] != value:
            found.append(f"{key} must be {value}; got {metadata[key]}")
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    core = sorted(re.split(r"[^\w-]", need)[0] for need in needs)
    if core != ["equinox", "jax", "jaxtyping", "optax"]:
        found.append(f"it needs equinox, jax, jaxtyping and optax; got {', '.join(core)}")
    if "halfstep = halfstep.cli:main" not in entry:
        found.append(f"the command halfstep is missing: {entry!r}")
    return found


def sdist_problems(path: pathlib.Path) -> list[str]:
    """What is wrong with a source distribution."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kept = {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "pyproject.toml"}
    needed = REQUIRED | kept | {"tests/conftest.py", "tests/test_grad.py"}
    found = [f"{name} is missing" for name in sorted(needed - names)]
    for name in sorted(names - kept - {"PKG-INFO", ".gitignore"}):
        if not re.match(r"(halfstep|tests)/", name) or name.endswith(".pyc"):
            found.append(f"{name} does not belong there")
    return found


def main(folder: pathlib.Path) -> int:
    """Print what is wrong with the one wheel and the one source distribution in a folder."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    found = [f"{wheel.name}: {each}" for each in wheel_problems(wheel)]
    found += [f"{sdist.name}: {each}" for each in sdist_problems(sdist)]
    print("\n".join(found) or f"{wheel.name}, {sdist.name}: as they should be")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
