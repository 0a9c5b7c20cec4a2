"""Look at the built site in Chromium: `python -m docs.generators.look SITE [--shots FOLDER]`.

Every page is opened at the width of a phone and of a desk, light and dark. It reports pages that
are wider than the screen, text of too little contrast (below 4.5 to 1), pictures of the wrong theme
or without an alternative text, and tables that a desk does not show whole; with `--shots` it also
keeps a picture of each page. Exit status 1 if there is anything.
"""

import argparse
import functools
import html
import http.server
import json
import pathlib
import re
import subprocess
import sys
import threading
import urllib.parse
from typing import Any

HARNESS = pathlib.Path(__file__).with_suffix(".html")
WIDTHS, SCHEMES = (420, 1400), ("default", "slate")
WRONG = ("wider", "faint", "pictures", "silent", "cut")
CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--disable-gpu")


class Handler(http.server.SimpleHTTPRequestHandler):
    """The site, and next to it the page that looks at the others."""

    def translate_path(self, path: str) -> str:
        """A file for a path of the address."""
        if urllib.parse.urlsplit(path).path == "/look.html":
            return str(HARNESS)
        return super().translate_path(path)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def pages(site: pathlib.Path) -> list[str]:
    found = site.rglob("index.html")
    return sorted(
        f"{path.parent.relative_to(site).as_posix()}/".removeprefix("./") for path in found
    )


def measured(address: str, paths: list[str], *, width: int, scheme: str) -> list[dict[str, Any]]:
    """What the harness says of each page."""
    query = urllib.parse.urlencode({"pages": json.dumps(paths), "width": width, "scheme": scheme})
    budget = f"--virtual-time-budget={1000 * (20 + 5 * len(paths))}"
    command = [*CHROMIUM, budget, "--dump-dom", f"{address}/look.html?{query}"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    found = re.search(r'<pre id="result">(.+?)</pre>', made, re.DOTALL)
    if found is None:
        raise RuntimeError(f"Chromium has not come to the end of {len(paths)} pages")
    return json.loads(html.unescape(found[1]))


def shoot(address: str, paths: list[str], folder: pathlib.Path) -> None:
    """A picture of the beginning of each page, at each width."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        for width in WIDTHS:
            name = f"{path.strip('/').replace('/', '-') or 'home'}-{width}.png"
            options = [f"--window-size={width},2000", f"--screenshot={folder / name}"]
            command = [*CHROMIUM, *options, f"{address}/{path}"]
            subprocess.run(command, capture_output=True, timeout=120, check=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generators.look", description=__doc__)
    parser.add_argument("site", type=pathlib.Path, help="what `zensical build` has made")
    parser.add_argument("--shots", type=pathlib.Path, help="a folder for pictures of the pages")
    parser.add_argument("--page", action="append", help="only this one, `tour/`; may be repeated")
    arguments = parser.parse_args(argv)
    handler = functools.partial(Handler, directory=str(arguments.site))
    bad = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        paths = arguments.page or pages(arguments.site)
        for width in WIDTHS:
            for scheme in SCHEMES:
                for row in measured(address, paths, width=width, scheme=scheme):
                    wrong = {key: row[key] for key in WRONG if row[key]}
                    if wrong:
                        bad += 1
                        print(f"{row['path'] or 'home'}, {width} wide, {scheme}: {wrong}")
        if arguments.shots:
            shoot(address, paths, arguments.shots)
        server.shutdown()
    print(f"{len(paths)} pages, {len(WIDTHS)} widths, {len(SCHEMES)} schemes: {bad} to be mended")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
