"""The README as a list of what a new user does: files with commands and snippets, in its order.

`new_user.py README.md` writes them into the working directory, and prints a line `kind file` for
each: `install` (one `[extras]` a line), `console` or `python`.
"""

import pathlib
import re
import sys

FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
INSTALL = re.compile(r"^(?:\$ )?pip install \"?halfstep(\[[\w,-]+\])?\"?")
INLINE = re.compile(
    r"`(?:pip install )?\"(halfstep\[[\w,-]+\])\"`|`pip install \"(halfstep\[[\w,-]+\])\"`"
)


def actions(text: str) -> list[tuple[str, str]]:
    """What is done, in order: kind and content.

    An extra that the prose in front of a snippet tells to install is installed before it.
    """
    found: list[tuple[str, str]] = []
    end = 0
    for match in FENCE.finditer(text):
        prose, end = text[end : match.start()], match.end()
        extras = [name for pair in INLINE.findall(prose) for name in pair if name]
        if extras:
            found.append(("install", "".join(f"{x.removeprefix('halfstep')}\n" for x in extras)))
        kind, content = match[1], match[2]
        if kind == "python":
            found.append(("python", content))
        elif kind == "console":
            lines = [line for line in content.splitlines() if line and not line.startswith("#")]
            installs = [m[1] or "" for line in lines if (m := INSTALL.match(line))]
            commands = [line.removeprefix("$ ") for line in lines if not INSTALL.match(line)]
            found += [("install", "".join(f"{x}\n" for x in installs))] if installs else []
            found += [("console", "\n".join(commands) + "\n")] if commands else []
    return found


def main(readme: pathlib.Path) -> None:
    """Write the files and print the list."""
    endings = {"install": "txt", "console": "sh", "python": "py"}
    for number, (kind, content) in enumerate(actions(readme.read_text())):
        path = pathlib.Path(f"{number:02d}_{kind}.{endings[kind]}")
        path.write_text(content)
        print(kind, path)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
