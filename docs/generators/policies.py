"""Draw the decision of `docs/choosing-a-policy.md`: `python -m docs.generators.policies`.

Which devices multiply 8 bits is read from the table of accelerators.
"""

from matplotlib.figure import Figure

import halfstep
from docs.generators._draw import Theme, arrow, bare, box, save_all
from docs.generators.support import recipe_products
from halfstep._preflight import ACCELERATORS


def with_float8() -> list[str]:
    """The targets that multiply 8 bits themselves."""
    recipe = halfstep.RECIPES["f8"]
    found = ACCELERATORS.values()
    return [row.name for row in found if recipe_products(recipe, row) == "native"]


# A question, the answer to the right with what to write, and the answer with which one goes on.
def questions() -> list[tuple[str, str, str, str]]:
    devices = with_float8()
    half = len(devices) // 2 + 1
    listed = f"{', '.join(devices[:half])},\n{', '.join(devices[half:])}"
    return [
        (
            "Does the hardware\nmultiply bfloat16?",
            "no",
            'V100, T4, RTX 20: "f16"\nand DynamicLossScaling()',
            "yes",
        ),
        (
            'Does training in\n"bf16" do as well\nas in float32?',
            "no",
            "debug.bisect names\nwhat must be float32",
            "yes",
        ),
        (
            "Is it too slow,\nand the device one of\n" + listed + "?",
            "yes",
            '"f8"; if its loss diverges\nfrom bf16\'s, back to "bf16"',
            "no",
        ),
        (
            "Does it fit?\n(halfstep.preflight)",
            "no",
            "state: optim.flash_adamw\nactivations: residuals=e4m3\ngradients: optim.release",
            "yes",
        ),
    ]


def draw(figure: Figure, theme: Theme) -> None:
    axes = figure.subplots()
    left, right, step, height = 1.65, 5.8, 1.75, 1.2
    rows = questions()
    for place, (question, answer, action, onward) in enumerate(rows):
        y = -step * place
        size = (3.1, height)
        box(axes, (left, y), size, question, edge=theme.ink, ink=theme.ink)
        shade, ink = theme.orange, theme.paper
        box(axes, (right, y), size, action, fill=shade, edge=shade, ink=ink)
        arrow(axes, (left + 1.55, y), (right - 1.55, y), theme.ink)
        axes.text((left + right) / 2 + 0.05, y + 0.1, answer, ha="center", va="bottom", fontsize=9)
        arrow(axes, (left, y - height / 2), (left, y - step + height / 2), theme.ink)
        axes.text(left + 0.12, y - step / 2, onward, va="center", fontsize=9)
    end = -step * len(rows)
    said = 'done: "bf16"\nand NoLossScaling()'
    shade, ink = theme.blue, theme.paper
    box(axes, (left, end + 0.2), (3.1, 0.8), said, fill=shade, edge=shade, ink=ink)
    axes.set_xlim(0, 7.35)
    axes.set_ylim(end - 0.3, height / 2 + 0.1)
    bare(axes)


PICTURES = {"policies": (draw, 6.0)}


def main() -> None:
    save_all(PICTURES)


if __name__ == "__main__":
    main()
