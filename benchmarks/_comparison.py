"""The comparison with other libraries, as a table and a paragraph for each of its rows."""

import re
from collections.abc import Mapping
from typing import Any

from benchmarks._documented import LIBRARIES
from benchmarks._features import FEATURES, Feature
from benchmarks._report import table

OURS = "halfstep"
NOT_FOR: Mapping[str, str] = {"newest": "a library for JAX", "no_device": "a library for JAX"}
"""Rows that do not apply to a library that is not such a one."""
SHOWN: Mapping[str, str] = {"yes": "yes", "partly": "partly", "no": "no", "absent": "-"}


def text(made: Mapping[str, Any]) -> str:
    """Write the tables and the sections as Markdown."""
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
        "`yes`, `partly` and `no` are what a probe saw. `-`: the library's documentation does not "
        "list the feature; the section of the row links to the page that was read. `not run`: the "
        "library could not be installed.",
        f"Versions: {versions}.",
        "## Row by row",
    ]
    for key, feature in FEATURES.items():
        parts += _details(key, feature, peers)
    return "\n\n".join(parts)


def anchor(title: str) -> str:
    """Return the id that a heading gets."""
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
    """What the probe saw: libraries that gave the same answer share a line.

    Absences share one line, with a link to the page that lists what the library has.
    """
    seen: dict[str, list[str]] = {}
    absent = []
    for name, peer in peers.items():
        if peer.get("found", {}).get(key, {}).get("answer") == "absent":
            absent.append(f"[{peer['name']}]({LIBRARIES[name].page})")
            continue
        evidence = peer["found"][key]["evidence"] if "found" in peer else peer["not_run"]
        seen.setdefault(f"{_cell(peer, key)}: {evidence}", []).append(f"**{peer['name']}**")
    lines = [f"- {', '.join(names)}, {said}" for said, names in seen.items()]
    if absent:
        why = f"Not {NOT_FOR[key]}" if key in NOT_FOR else "Not documented"
        lines.append(f"- {why}: {', '.join(absent)}.")
    return [f"### {feature.title}", feature.asked, "\n".join(lines)]
