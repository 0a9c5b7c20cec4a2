"""The comparison with other libraries, as a table and a paragraph for each of its rows."""

import re
from collections.abc import Mapping
from typing import Any

from benchmarks._features import FEATURES, Feature
from benchmarks._report import table

OURS = "halfstep"
SHOWN: Mapping[str, str] = {"yes": "yes", "partly": "partly", "no": "no", "absent": "-"}


def text(made: Mapping[str, Any]) -> str:
    """All of it, as Markdown."""
    peers = made["peers"]
    columns = {"feature": "", **{name: peer["name"] for name, peer in peers.items()}}
    parts, group = [], ""
    for feature in FEATURES.values():
        if feature.group != group:
            group = feature.group
            rows = [_row(k, f, peers) for k, f in FEATURES.items() if f.group == group]
            parts += [f"**{group}**", table(rows, columns)]
    versions = "; ".join(_versions(peer) for name, peer in peers.items() if name != OURS)
    parts += [
        "`yes`, `partly` and `no` are what a probe saw; `-`: the library has no such feature; `not "
        "run`: it could not be installed.",
        f"Versions: {versions}.",
        "## Row by row",
    ]
    for key, feature in FEATURES.items():
        parts += _details(key, feature, peers)
    return "\n\n".join(parts)


def anchor(title: str) -> str:
    """The id that a heading gets."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def _row(key: str, feature: Feature, peers: Mapping[str, Any]) -> dict[str, str]:
    row = {"feature": feature.title}
    for name, peer in peers.items():
        cell = _cell(peer, key)
        row[name] = f"[{cell}](#{anchor(feature.title)})" if name == OURS else cell
    return row


def _cell(peer: Mapping[str, Any], key: str) -> str:
    if "not_run" in peer:
        return "not run"
    found = peer["found"][key]
    return found.get("shown") or SHOWN[found["answer"]]


def _versions(peer: Mapping[str, Any]) -> str:
    if "not_run" in peer:
        return f"{peer['name']} was not run ({peer['not_run']})"
    listed = {name: version for name, version in peer["versions"].items() if name != "python"}
    return f"{peer['name']} with " + ", ".join(f"{k} {v}" for k, v in listed.items())


def _details(key: str, feature: Feature, peers: Mapping[str, Any]) -> list[str]:
    """What the probe saw: libraries that gave the same answer share a line, absences have none."""
    seen: dict[str, list[str]] = {}
    for peer in peers.values():
        if peer.get("found", {}).get(key, {}).get("answer") == "absent":
            continue
        evidence = peer["found"][key]["evidence"] if "found" in peer else peer["not_run"]
        seen.setdefault(f"{_cell(peer, key)}: {evidence}", []).append(f"**{peer['name']}**")
    lines = [f"- {', '.join(names)}, {said}" for said, names in seen.items()]
    return [f"### {feature.title}", feature.asked, "\n".join(lines)]
