"""Run the notebooks and write their outputs anew: `python -m examples._notebooks [NAME ...]`.

Outputs are kept in the repository, so that a notebook can be read without running it.
"""

import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "notebooks"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))


def read(name: str) -> Any:
    """A notebook with the outputs it has."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(name: str, *, flags: str = "", timeout: int = 600) -> Any:
    """The notebook with new outputs, run in a kernel and a folder of its own.

    Args:
        name: Its file without `.ipynb`.
        flags: XLA's flags; those of this process are not handed on.
        timeout: Seconds for one cell.

    Raises:
        nbclient.exceptions.CellExecutionError: With what the cell raised.
    """
    notebook = read(name)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment["XLA_FLAGS"] = flags
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": folder}})
        client.execute(env=environment)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            # Compilers write what they think of the machine there.
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
            for out in cell.outputs:
                # A table or a picture is not also kept as text.
                if len(out.get("data", {})) > 1:
                    del out["data"]["text/plain"]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main(names: Sequence[str]) -> None:
    for name in names or NAMES:
        nbformat.write(execute(name), FOLDER / f"{name}.ipynb")
        print(f"{name}: written")


if __name__ == "__main__":
    main(sys.argv[1:])
