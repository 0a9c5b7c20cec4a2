"""What a distribution requires, from its metadata, and whether that is installed."""

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterator, Mapping

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?\s*([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclasses.dataclass(frozen=True)
class Requirement:
    """One line of `Requires-Dist`.

    Attributes:
        name: Of the distribution.
        extras: Those of it that are required.
        versions: Which versions, such as `">=0.8.0"`.
        extra: For which extra it is; empty if it is always required.
    """

    name: str
    extras: tuple[str, ...]
    versions: str
    extra: str

    @classmethod
    def parse(cls, text: str) -> "Requirement | None":
        """Read a line; `None` if it is for other machines or Pythons than this."""
        found = _REQUIREMENT.fullmatch(text.strip())
        if found is None:
            return None
        name, extras, versions, marker = (part or "" for part in found.groups())
        extra = _EXTRA.search(marker)
        # What else a marker says is for an installer; nothing of ours has one.
        if _EXTRA.sub("", marker).strip():
            return None
        inner = tuple(part.strip() for part in extras.split(",") if part.strip())
        return cls(name, inner, versions.strip(" ()"), extra[1] if extra else "")

    def allows(self, version: str) -> bool:
        """Whether a version is one of those that are required."""
        return all(_allows(part.strip(), version) for part in self.versions.split(",") if part)

    def __str__(self) -> str:
        inner = f"[{','.join(self.extras)}]" if self.extras else ""
        return f"{self.name}{inner}{self.versions}"


Requires = Mapping[str, tuple[Requirement, ...]]
"""What distributions require, by name."""


def installed(name: str) -> str | None:
    """The version of a distribution; `None` if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requires(name: str) -> tuple[Requirement, ...]:
    """What a distribution requires, of itself and for its extras."""
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    return tuple(made for line in lines if (made := Requirement.parse(line)) is not None)


def expanded(of: Requires, name: str, extra: str) -> Iterator[Requirement]:
    """What an extra requires, the extras of others that it asks for included."""
    for one in of.get(name, ()):
        if one.extra == extra:
            yield one
            for inner in one.extras:
                yield from expanded(of, one.name, inner)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what is behind them: `(0, 10, 2)`."""
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
    length = max(len(has), len(bound))
    has, bound = (numbers + (0,) * (length - len(numbers)) for numbers in (has, bound))
    return {
        ">=": has >= bound,
        "~=": has >= bound,
        "<=": has <= bound,
        "==": has == bound,
        "!=": has != bound,
        ">": has > bound,
        "<": has < bound,
    }[sign]
