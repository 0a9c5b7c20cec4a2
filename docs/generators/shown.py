"""Draw what the package itself draws: `python -m docs.generators.shown [NAME ...]`.

`debug-map` is of the example of `my-loss-is-nan.md`, as it is written there; `debug-live` of
`python -m examples.live_view`; `debug-compare` of a GPT of four layers; `notebook-...` are what the
notebooks show. Each gets a dark one.
"""

import base64
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

import halfstep
from benchmarks._pictures import darken_file
from examples import live_view
from examples._notebooks import read
from tests.models import gpt as _gpt

DOCS = pathlib.Path(__file__).parents[1]
IMAGES = DOCS / "images"


def map_of_the_page(path: pathlib.Path) -> None:
    """The flight recorder's log, which the page's first blocks make."""
    page = DOCS / "my-loss-is-nan.md"
    namespace: dict[str, Any] = {}
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    ):
        # Named as the page's own outputs name it.
        name = f"{page.stem.replace('-', '_')}_{number}.py"
        exec(compile(code, name, "exec"), namespace)
        if "log" in namespace:
            break
    namespace["log"].plot(path)


def comparison_of_a_model(path: pathlib.Path) -> None:
    """A model in float16, compared with itself in float32."""
    keys = jax.random.split(jax.random.key(0))
    params = _gpt.init(vocabulary=256, tokens=64, width=64, layers=4, key=keys[0])
    ids = jax.random.randint(keys[1], (4, 65), 0, 256)

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        return _gpt.loss(params, ids, heads=4)

    halfstep.debug.compare(loss, "f16")(params, ids).plot(path)


def live_view_of_a_run(path: pathlib.Path) -> None:
    """The example's picture."""
    with tempfile.TemporaryDirectory() as folder:
        live_view.main(["--style", "none", "--out", folder])
        (pathlib.Path(folder) / "live.png").replace(path)


def picture_of_a_notebook(name: str) -> bytes:
    """The one picture among its outputs."""
    outputs = [out for cell in read(name).cells for out in cell.get("outputs", ())]
    (found,) = (out["data"]["image/png"] for out in outputs if "image/png" in out.get("data", {}))
    return base64.b64decode(found)


NOTEBOOKS: Mapping[str, str] = MappingProxyType(
    {"notebook-fit": "will_it_fit", "notebook-nan": "hunt_a_nan"}
)
PICTURES: Mapping[str, Callable[[pathlib.Path], None]] = MappingProxyType(
    {
        "debug-map": map_of_the_page,
        "debug-compare": comparison_of_a_model,
        "debug-live": live_view_of_a_run,
    }
)


def main(names: Sequence[str]) -> None:
    for name in names or (*PICTURES, *NOTEBOOKS):
        path = IMAGES / f"{name}.png"
        if name in NOTEBOOKS:
            path.write_bytes(picture_of_a_notebook(NOTEBOOKS[name]))
        else:
            PICTURES[name](path)
        darken_file(path)
        print(f"drew: {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
