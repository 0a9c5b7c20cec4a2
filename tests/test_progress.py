"""Progress bars: cleared before the answer in a terminal, and not written into files."""

import io
import os
import subprocess
import sys

import pytest

from halfstep._base import Progress

PROGRAM = """
from halfstep._base import Progress
with Progress(2, show=True) as bar:
    for name in ("f32", "bf16"):
        bar.begin(name)
        bar.done()
print("target  fits")
"""


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of notebooks, which may run before these, import their kernel."""
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)


def counted() -> None:
    with Progress(2, show=True) as bar:
        bar.begin("h100, bf16")
        bar.done()


def test_nothing_is_written_into_a_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    counted()
    assert log.getvalue() == ""


def test_programs_without_a_console(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", None)
    counted()


def test_a_terminal_has_a_bar_that_is_cleared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    counted()
    *_, shown, cleared, after = screen.getvalue().split("\r")
    assert "h100, bf16" in shown
    assert cleared.strip() == after == ""


def test_a_notebook_has_a_bar(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", output := io.StringIO())
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    counted()
    assert "h100, bf16" in output.getvalue()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_the_answer_begins_on_a_line_of_its_own():
    # There is neither on Windows.
    import pty
    import termios

    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        stdout=slave,
        stderr=slave,
        check=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    os.close(slave)
    written = os.read(master, 100_000).decode()
    os.close(master)
    # Whatever the bar wrote, spaces have overwritten it when the table begins.
    assert written.endswith("\rtarget  fits\r\n")
    assert written.split("\r")[-3].strip() == ""
