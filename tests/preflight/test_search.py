from collections.abc import Callable

import pytest

import halfstep
from halfstep._preflight.search import LargestBatch, search
from tests.preflight._entries import GIB, entry


def compiler(
    peak: Callable[[int], float], *, usable: int = 12 * GIB, silent: bool = False
) -> tuple[Callable[[int], halfstep.PreflightEntry], list[int]]:
    """A compiler whose memory is a function of the batch; a `silent` one gives up saying none."""
    asked: list[int] = []

    def compile_batch(batch: int) -> halfstep.PreflightEntry:
        asked.append(batch)
        bytes_ = int(peak(batch))
        fits = bytes_ <= usable
        shown = None if silent and not fits else bytes_
        return entry(fits=fits, peak_bytes=shown, usable_bytes=usable)

    return compile_batch, asked


SHAPES = {
    "line": lambda batch: GIB + batch * 7_654_321,
    "steps": lambda batch: GIB + -(-batch // 64) * 64 * 7_654_321,
    "bent": lambda batch: GIB + 1e5 * batch**1.5,
    "jump": lambda batch: GIB + batch * 1e6 + (9 * GIB if batch > 3000 else 0),
    "flat then steep": lambda batch: GIB + max(0, batch - 900) * 5e8,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("multiple_of", [1, 8, 96])
@pytest.mark.parametrize("silent", [False, True])
def test_finds_the_largest_of_all(shape: str, multiple_of: int, silent: bool):
    peak = SHAPES[shape]
    compile_batch, asked = compiler(peak, silent=silent)
    found = search(compile_batch, multiple_of=multiple_of, maximum=2**20)
    fitting = (b for b in range(multiple_of, 2**16, multiple_of) if peak(b) <= 12 * GIB)
    assert found.batch == max(fitting)
    assert found.entry.fits
    assert len(asked) == len(set(asked)), "nothing is compiled twice"
    assert set(found.tried) == set(asked)
    # Doubling and halving take two compiles a binary digit; the line must not make it worse.
    assert len(asked) <= 2 * (found.batch // multiple_of).bit_length() + 4


def test_a_line_needs_few_compiles():
    compile_batch, asked = compiler(SHAPES["line"])
    search(compile_batch, multiple_of=1, maximum=2**20)
    # 11 doublings from 1 to 2048, then the crossing and its neighbor.
    assert len(asked) <= 14


@pytest.mark.parametrize("maximum", [1, 2, 3, 100, 1000, 1024])
def test_stops_at_the_maximum(maximum: int):
    compile_batch, asked = compiler(lambda batch: batch)
    found = search(compile_batch, multiple_of=1, maximum=maximum)
    assert found.batch == maximum
    assert max(asked) == maximum


def test_the_maximum_is_no_multiple():
    compile_batch, _ = compiler(lambda batch: batch)
    assert search(compile_batch, multiple_of=8, maximum=100).batch == 96


def test_limit_between_the_last_doubling_and_the_maximum():
    compile_batch, _ = compiler(lambda batch: batch, usable=77)
    assert search(compile_batch, multiple_of=1, maximum=100).batch == 77


@pytest.mark.parametrize("silent", [False, True])
def test_nothing_fits(silent: bool):
    compile_batch, _ = compiler(lambda batch: 20 * GIB, silent=silent)
    with pytest.raises(halfstep.DoesNotFitError, match="not even a batch of 8 fits on h100"):
        search(compile_batch, multiple_of=8, maximum=100)


@pytest.mark.parametrize(("multiple_of", "maximum"), [(0, 10), (-8, 10), (16, 8)])
def test_bounds_that_leave_nothing(multiple_of: int, maximum: int):
    compile_batch, _ = compiler(lambda batch: batch)
    with pytest.raises(halfstep.PreflightError, match="multiple_of must be at least 1"):
        search(compile_batch, multiple_of=multiple_of, maximum=maximum)


def test_says_what_was_tried():
    found = LargestBatch(
        2, entry(), {1: entry(), 2: entry(), 3: entry(fits=False, peak_bytes=None)}
    )
    text = str(found)
    assert "h100: the largest batch is 2" in text
    assert "does not fit" in text.splitlines()[-1]
    assert found.named("f32").variant == "f32"
