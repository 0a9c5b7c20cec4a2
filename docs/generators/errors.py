"""Write the page of all errors, `docs/errors.md`: `python -m docs.generators.errors [--check]`.

Cause and cure are what the message says: first what was required and what came, then what to do.
A message without the second part does not get onto the page: `python -m docs.generators.errors`
names it and fails.
"""

import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

from docs.generators._raises import ROOT, Site, sites

PAGE = ROOT / "docs" / "errors.md"
FAQ = ROOT / "docs" / "faq.md"

HEAD = """\
# Errors

Every error that halfstep raises and every warning that it gives, by module and by class. Each
message says what was required, what came, and what to do about it. Here the first is shown as it is
raised, and the last behind it, as its cure. `<names>` stand for what is filled in, and `[...]` for
what is not always said. Search for words of the message that you see. A link leads to
[Questions](faq.md) where there is more to say.

This page is written from the code. A test looks for messages that are not on it or have no cure.
"""
INTERNAL = """\
## What no user can cause

If you see one of these, it is a bug of halfstep, or of what it reads. Please report it with the
whole traceback.
"""

_PIECE = 26
# How messages begin to say what to do.
_VERBS = (
    "add|allow|ask|bring|call|change|check|choose|convert|count|delete|did you mean|fix|give"
    "|go back|initialize|install|keep|leave|let|look|lower|make|mend|name|or name|pass|put"
    "|raise|record|reduce|register|reshape|restore|resume|return|save|select|set|shard|stack"
    "|start|take|try|unset|update|use|wait|wrap|write"
)
_ADVICE = re.compile(rf"(?:(?<=[.;:,)>\]] )|(?<=\[ )|^)(?:{_VERBS})\b", re.IGNORECASE)
_WHEN = re.compile(r"(?:^|[.\]>] )((?:If|For|With|As|Without|To)\b[^.]*)$")
# What is required is what to do, where it is said and then what came.
_LISTED = re.compile(r".*[;,] (required one of .*)")
_REQUIRED = re.compile(
    r"(.*(?:\bmust\b|\bis\b|\bare\b|\brequired\b|\bneeds?\b|\btakes?\b|\bends\b).*?)[;,] "
    r"(?:got|the saved one is|it has|the state has|the capture has|found|which)\b.*"
)


def split(template: str) -> tuple[str, str]:
    """A message's cause, and its cure; the cure is empty if it has none."""
    listed = _LISTED.fullmatch(template)
    found = _ADVICE.search(template)
    if found and not listed:
        when = _WHEN.search(template[: found.start()])
        start = when.start(1) if when else found.start()
        # A message may be nothing but an advice.
        return template[:start].strip(" [") or template, template[start:].strip(" ]")
    required = listed or _REQUIRED.fullmatch(template)
    return template, required[1] if required else ""


def module(site: Site) -> str:
    """The public module that an error belongs to."""
    first, *rest = site.file.removesuffix(".py").split("/")[1:]
    if first in ("_autocast", "_explain", "_preflight"):
        return f"halfstep.{first.strip('_')}"
    if first == "cli":
        return "The command"
    is_public = len(rest) > 1 or not "".join(rest).startswith("_")
    if first in ("compat", "integrations") and is_public:
        return f"halfstep.{first}.{rest[0].strip('_')}"
    return f"halfstep.{first}" if rest and not first.startswith("_") else "halfstep"


def questions(text: str) -> dict[str, str]:
    """The messages that the questions are listed by, and their anchors."""
    found = {}
    for heading in re.findall(r"^### `(.+)`$", text, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        found[heading] = re.sub(r"[-\s]+", "-", words)
    return found


def page(found: Iterable[Site], faq: str) -> str:
    """The whole page.

    Raises:
        ValueError: If a message has no cure.
    """
    found = list(found)
    cured = [site for site in found if not site.internal]
    bare = [f"{one.file}:{one.line}: {one.template}" for one in cured if not split(one.template)[1]]
    if bare:
        raise ValueError("these messages do not say what to do:\n" + "\n".join(bare))
    answers = questions(faq)
    lines = [HEAD]
    for name in sorted({module(site) for site in cured}, key=lambda name: (name[0] == "T", name)):
        lines.append(f"## {name}\n")
        of_module = [site for site in cured if module(site) == name]
        for kind in sorted({site.kind for site in of_module}):
            lines.append(f"**{kind}**\n")
            templates = dict.fromkeys(site.template for site in of_module if site.kind == kind)
            lines += [*_entries(templates, answers)]
    lines.append(INTERNAL)
    for why in dict.fromkeys(site.internal for site in found if site.internal):
        lines.append(f"{why[0].upper()}{why[1:]}\n")
        of_why = dict.fromkeys(site for site in found if site.internal == why)
        lines += [f"- {_code(f'{one.kind}: {one.template}')}" for one in of_why]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _entries(templates: Iterable[str], answers: dict[str, str]) -> Iterator[str]:
    for template in templates:
        cause, cure = split(template)
        more = [anchor for text, anchor in answers.items() if _says(template, text)]
        link = f" ([more](faq.md#{more[0]}))" if more else ""
        # Where no advice follows, what is required is in the message, and shown once more alone.
        how = "what it requires, " if cure in cause else ""
        yield f"- {_code(cause)}{link}<br>"
        yield f"  Cure: {how}{_code(cure)}\n"


def _says(template: str, text: str) -> bool:
    """Whether a message of this template can have that text in it."""
    plain = re.sub(r"[\[\]]", "", template)
    # The text may show what is filled in: a piece of it is enough that is no accident.
    pieces = range(max(len(text) - _PIECE, 0) + 1)
    return any(text[at : at + _PIECE] in plain for at in pieces)


def _code(text: str) -> str:
    # Backticks of the message itself need more of them around it.
    ticks = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def main(arguments: list[str], found: Iterable[Site], path: pathlib.Path = PAGE) -> int:
    """Write the page, or with `--check` say whether it is as it would be written."""
    made = page(found, FAQ.read_text())
    if "--check" in arguments:
        return int(path.read_text() != made)
    path.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sites()))
