"""Write what the command prints into its page: `python -m docs.generators.command [--check]`.

Behind `<!-- shown: WORDS -->` in `docs/command.md` goes a block with `$ halfstep WORDS`, what that
prints, and its exit status where it is not 0. `train.py` is the page's own Python block. `doctor`
is asked about a machine that is in order but for a few settings, so that the page does not depend
on where it is written.
"""

import contextlib
import io
import os
import pathlib
import re
import shlex
import sys
import tempfile
from unittest import mock

from halfstep.cli import main
from halfstep.cli._run import doctor
from tests.cli._machines import machine

PAGE = pathlib.Path(__file__).parents[1] / "command.md"
MARK = re.compile(
    r"^(<!-- shown: ([^\n]+) -->\n)(?:\n```console\n.*?^```\n)?", re.MULTILINE | re.DOTALL
)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shown(words: str, train: str) -> str:
    """What a terminal would show, in a folder with that `train.py`."""
    printed = io.StringIO()
    asked = machine(
        config={"jax_default_matmul_precision": "highest", "jax_compilation_cache_dir": None},
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pathlib.Path(folder, "train.py").write_text(train)
        # Two pages that are written in one process are about two files.
        stack.callback(sys.modules.pop, "train", None)
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(mock.patch.dict(os.environ, {"COLUMNS": "80"}))
        stack.enter_context(mock.patch.object(sys, "path", [*sys.path]))
        stack.enter_context(mock.patch.object(doctor, "gather", return_value=asked))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        try:
            status = main(shlex.split(words))
        except SystemExit as error:
            status = error.code
    end = f"$ echo $?\n{status}\n" if status else ""
    return f"```console\n$ halfstep {words}\n{printed.getvalue()}{end}```\n"


def written(page: str) -> str:
    """The page with what the command prints now."""
    train = "\n\n".join(PYTHON.findall(page))
    return MARK.sub(lambda found: f"{found[1]}\n{shown(found[2], train)}", page)


if __name__ == "__main__":
    before = PAGE.read_text()
    after = written(before)
    if "--check" in sys.argv[1:]:
        sys.exit(f"{PAGE.name} is not what the command prints." if before != after else 0)
    PAGE.write_text(after)
