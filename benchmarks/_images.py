"""Pictures on pages, light and dark, and what they were drawn from."""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

KEY = "Source"
"""Of the digest, among a PNG's texts."""


def digest(made: Mapping[str, Any]) -> str:
    """Of a report, however its JSON is laid out."""
    text = json.dumps(made, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def dark_path(path: pathlib.Path) -> pathlib.Path:
    """Where the picture for dark pages goes."""
    return path.with_name(f"{path.stem}-dark{path.suffix}")


def markdown(alt: str, name: str) -> str:
    """Both pictures on a page, of which a reader sees one."""
    return f"![{alt}](images/{name}.png#only-light)\n![{alt}](images/{name}-dark.png#only-dark)"


def source_of(path: pathlib.Path) -> str | None:
    """The digest of what a picture was drawn from."""
    with Image.open(path) as image:
        return image.info.get(KEY)


def pixels(path: pathlib.Path) -> np.ndarray:
    """Red, green and blue."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def digest_of_file(path: pathlib.Path) -> str:
    """Of the pixels of a picture."""
    return f"sha256:{hashlib.sha256(pixels(path).tobytes()).hexdigest()}"
