"""The records of one run: a JSON line each, and the newest on a progress bar."""

import json
import os
import pathlib
from types import TracebackType
from typing import Any

from tqdm import tqdm

Record = dict[str, Any]


class Log:
    """Writes `path` line by line. Use it in a `with` statement.

    Args:
        path: The file. With `start` it must be there, and its records up to that step are kept.
        name: The name of the progress bar.
        steps: How many steps the run has.
        start: How many of them were done before.
        active: Whether to write and show anything: one of several processes does.

    Attributes:
        records: All records of the run, those before `start` included.
    """

    records: list[Record]

    def __init__(
        self,
        path: pathlib.Path,
        *,
        name: str,
        steps: int,
        start: int = 0,
        active: bool = True,
    ):
        # A killed run may have logged beyond its last checkpoint, and the last line in part.
        lines = path.read_text().split("\n")[:-1] if start and active else []
        self.records = [record for record in map(json.loads, lines) if record["step"] <= start]
        self._file = (path if active else pathlib.Path(os.devnull)).open("w")
        self._file.writelines(json.dumps(record) + "\n" for record in self.records)
        self._file.flush()
        self._bar = tqdm(desc=name, total=steps, initial=start, unit="step", disable=not active)

    def __enter__(self) -> "Log":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
        self._file.close()

    def tick(self) -> None:
        """One more step is done."""
        self._bar.update()

    def write(self, record: Record) -> None:
        """Add a record to the file and show it, with the last tested one, next to the bar."""
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        shown = {"loss": f"{record['loss']:.3f}"}
        for name, key, form in (
            ("accuracy", "test_accuracy", "{:.2%}"),
            ("held out", "held_out_loss", "{:.3f}"),
        ):
            tested = [r[key] for r in self.records if key in r]
            shown |= {name: form.format(tested[-1])} if tested else {}
        shown |= {
            "scale": f"{record['loss_scale']:g}",
            "skipped": str(record["skipped"]),
        }
        self._bar.set_postfix(shown)
