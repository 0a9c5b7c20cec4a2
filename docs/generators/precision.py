"""Draw the pictures of `docs/where-precision-is-lost.md`: `python -m docs.generators.precision`.

All of them are computed here, operation by operation, in the dtypes of `halfstep.FORMATS`. NumPy
rounds after each operation, which a compiler need not do.
"""

import numpy as np
from matplotlib.figure import Figure

import halfstep
from docs.generators._draw import Theme, save_all

NAMES = ("f32", "f16", "bf16")
WIDTHS = {"f32": 3.2, "f16": 1.8, "bf16": 1.8}


def colors(theme: Theme) -> dict[str, str]:
    return {"f32": theme.gray, "f16": theme.orange, "bf16": theme.blue}


def rounded(values: np.ndarray, name: str) -> np.ndarray:
    """To the nearest number of a format, and back to float64."""
    with np.errstate(over="ignore"):
        return values.astype(halfstep.FORMATS[name].dtype).astype(np.float64)


def sums(count: int, name: str) -> np.ndarray:
    """Ones added one by one."""
    dtype = halfstep.FORMATS[name].dtype
    total, one, found = dtype.type(0), dtype.type(1), []
    for _ in range(count):
        total = dtype.type(total + one)
        found.append(float(total))
    return np.array(found)


def averages(steps: int, decay: float, name: str) -> np.ndarray:
    """A running average that begins at 0, of values that are all 1."""
    dtype = halfstep.FORMATS[name].dtype
    average, rate, found = dtype.type(0), dtype.type(1 - decay), []
    for _ in range(steps):
        average = dtype.type(average + dtype.type(rate * dtype.type(dtype.type(1) - average)))
        found.append(float(average))
    return np.array(found)


def variance_error(mean: float, name: str, *, is_centered: bool) -> float:
    """The relative error of a variance of 1, with values around a mean; the median of many draws.

    Of the values as the format has them, so that it is the formula's error. Sums are float64's.
    """
    dtype = halfstep.FORMATS[name].dtype
    draws = np.random.default_rng(0).standard_normal((200, 256))
    values = (mean + draws).astype(dtype)
    exact = values.astype(np.float64).var(axis=1)

    def average(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float64).mean(axis=1, keepdims=True).astype(dtype)

    with np.errstate(over="ignore", invalid="ignore"):
        if is_centered:
            found = average((values - average(values)) ** 2)
        else:
            found = average(values * values) - average(values) ** 2
    return float(np.median(abs(found.astype(np.float64)[:, 0] - exact) / exact))


def gradients() -> np.ndarray:
    """Magnitudes of the gradient of a cross-entropy by the hidden layer of a small network.

    It is right about all of its batch, as late in training: there gradients are smallest.
    """
    draw = np.random.default_rng(0).standard_normal
    hidden = np.tanh(draw((1024, 64)) @ draw((64, 256)) / 8)
    last = 12 * draw((256, 10)) / 16
    scores = hidden @ last
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    errors = shares - (scores == scores.max(axis=1, keepdims=True))
    return np.abs(errors @ last.T / len(hidden)).ravel()


def draw_rounding(figure: Figure, theme: Theme) -> None:
    """Integers above 2**8 as the formats have them."""
    axes = figure.subplots()
    values = np.arange(252, 266, 0.02)
    for name in NAMES:
        axes.plot(
            values, rounded(values, name), color=colors(theme)[name], lw=WIDTHS[name], label=name
        )
    axes.set_xlabel("the number")
    axes.set_ylabel("what is stored")
    axes.legend()


def draw_swamping(figure: Figure, theme: Theme) -> None:
    """A sum of ones stands still where the next number is more than 2 away."""
    axes, count = figure.subplots(), 6000
    for name in NAMES:
        axes.plot(
            np.arange(1, count + 1),
            sums(count, name),
            color=colors(theme)[name],
            lw=WIDTHS[name],
            label=name,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("ones added, one by one")
    axes.set_ylabel("sum")
    axes.legend()


def draw_underflow(figure: Figure, theme: Theme) -> None:
    """Where gradients lie among the numbers of float16, without a loss scale and with one."""
    scale, half = 2.0**15, halfstep.FORMATS["f16"]
    found = gradients()
    panels = figure.subplots(2, sharex=True)
    for axes, factor, title in zip(
        panels, (1.0, scale), ("as they are", f"with a loss scale of {scale:,.0f}"), strict=True
    ):
        magnitudes = np.log10(found * factor)
        axes.hist(magnitudes, bins=np.arange(-14, 6, 0.1), color=theme.blue, zorder=2)
        axes.axvspan(-14, np.log10(half.smallest / 2), color=theme.red, alpha=0.25, lw=0)
        axes.axvspan(
            np.log10(half.smallest / 2), np.log10(half.tiny), color=theme.orange, alpha=0.25, lw=0
        )
        axes.axvspan(np.log10(half.max), 6, color=theme.red, alpha=0.25, lw=0)
        lost = np.mean(rounded(found * factor, "f16") == 0)
        axes.set_title(f"{title}: {100 * lost:.1f} % become zero")
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    panels[1].set_xlim(-13, 6)
    ticks = range(-12, 6, 4)
    panels[1].set_xticks(ticks, [f"$10^{{{tick}}}$" if tick else "1" for tick in ticks])
    panels[1].set_xlabel("magnitude (red: zero or infinite in float16,\norange: fewer digits)")


def draw_cancellation(figure: Figure, theme: Theme) -> None:
    """Two ways to write a variance, over the mean."""
    axes = figure.subplots()
    means = 2.0 ** np.arange(-2, 8.01, 0.5)
    for name in NAMES:
        for is_centered, line in ((False, "-"), (True, ":")):
            errors = [variance_error(mean, name, is_centered=is_centered) for mean in means]
            axes.plot(
                means,
                errors,
                color=colors(theme)[name],
                lw=WIDTHS[name],
                linestyle=line,
                label=f"{name}, {'centered first' if is_centered else 'difference of means'}",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(1e-9, 1e2)
    axes.set_xlabel("mean of the values; their spread is 1")
    axes.set_ylabel("relative error of the variance")
    figure.legend(loc="outside upper center", ncols=1)


def draw_averages(figure: Figure, theme: Theme) -> None:
    """An average that should reach 1."""
    axes, decay, steps = figure.subplots(), 0.999, 6000
    for name in NAMES:
        axes.plot(
            averages(steps, decay, name), color=colors(theme)[name], lw=WIDTHS[name], label=name
        )
    axes.set_xlabel(f"steps, decay {decay}")
    axes.set_ylabel("average of ones")
    axes.set_ylim(0, 1.05)
    axes.legend()


PICTURES = {
    "precision-rounding": (draw_rounding, 3.0),
    "precision-swamping": (draw_swamping, 3.0),
    "precision-underflow": (draw_underflow, 4.0),
    "precision-cancellation": (draw_cancellation, 5.2),
    "precision-averages": (draw_averages, 3.0),
}


def main() -> None:
    save_all(PICTURES)


if __name__ == "__main__":
    main()
