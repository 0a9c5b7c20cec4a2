"""`halfstep formats`: the table, and how formats store numbers."""

import json
import math
from fractions import Fraction

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from halfstep import FORMATS, RECIPES
from halfstep.cli import main
from halfstep.cli._run.formats import number, stored
from halfstep.cli._run.layouts import LAYOUTS

ROWS = {row.name: row for row in LAYOUTS}
FACTORS = [
    factor
    for recipe in RECIPES.values()
    for leg in (recipe.forward, recipe.input_gradient, recipe.weight_gradient)
    for factor in leg or ()
]
DTYPES = {
    **{name: row.dtype for name, row in FORMATS.items()},
    **{factor.element: factor.dtype for factor in FACTORS},
}
every_format = pytest.mark.parametrize("name", list(DTYPES))


def test_every_format_is_there():
    assert set(ROWS) == set(DTYPES)
    assert list(ROWS) == sorted(ROWS, key=lambda name: (-ROWS[name].bits, name))
    for name, row in ROWS.items():
        assert row.used_by == ("policy" if name in FORMATS else "recipe")
        assert row.aliases == (FORMATS[name].aliases if name in FORMATS else ())


@every_format
def test_its_facts_are_those_of_jax(name: str):
    """The command knows formats by their bits, and imports neither NumPy nor JAX."""
    row, known = ROWS[name], jnp.finfo(DTYPES[name])
    assert row.dtype == DTYPES[name].name
    assert (row.bits, row.exponent_bits, row.mantissa_bits) == (known.bits, known.nexp, known.nmant)
    assert (row.max, row.tiny, row.eps) == (float(known.max), float(known.tiny), float(known.eps))
    assert row.smallest == float(known.smallest_subnormal)


@every_format
def test_bits_are_those_of_numpy(name: str):
    row, dtype = ROWS[name], DTYPES[name]
    numbers = [0.0, 1.0, -1.5, row.max, -row.max, row.tiny, row.smallest, -3 * row.smallest]
    # Between all numbers of the format, and beyond them on both sides.
    numbers += [*np.random.default_rng(0).standard_normal(50) * 4.0]
    if name != "f64":
        numbers += [row.max * 4, -row.max * 4]
    with np.errstate(over="ignore", invalid="ignore"):
        made = np.asarray(numbers, np.float64).astype(dtype)
    for value, stored_value in zip(numbers, made, strict=True):
        raw = int.from_bytes(stored_value.tobytes(), "little") & (2**row.bits - 1)
        ours = stored(Fraction(float(value)), row)
        if float(stored_value):
            assert int(ours.bits.replace(" ", ""), 2) == raw, (value, ours)
        assert math.isnan(ours.value) == bool(np.isnan(stored_value.astype(np.float64)))


def test_the_table(capsys: pytest.CaptureFixture[str]):
    assert main(["formats"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:6] == ["name", "dtype", "bits", "exponent", "mantissa", "largest"]
    cells = {line.split()[0]: line.split()[1:] for line in lines}
    assert list(cells) == list(ROWS)
    assert cells["f16"][:5] == ["float16", "16", "5", "10", "65504"]
    # One sign, and the rest is shared out.
    assert all(1 + int(row[2]) + int(row[3]) == int(row[1]) for row in cells.values())


def test_numbers(capsys: pytest.CaptureFixture[str]):
    assert main(["formats", "0.1", "70000"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert "bf16          0.10009765625" in first
    assert "0 01011 1001100110" in first
    assert "overflow: beyond 65504, the largest" in second
    assert "saturated: the largest" in second


def test_json(capsys: pytest.CaptureFixture[str]):
    assert main(["formats", "1e5", "--json", "-"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in made["formats"]] == list(ROWS)
    assert {row["format"]: row["value"] for row in made["numbers"]["1e5"]}["f16"] == "inf"
    assert main(["formats", "--json", "-"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["formats"]


@pytest.mark.parametrize("text", ["many", "1/0", "1e999999999", "nan"])
def test_what_is_no_number(text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["formats", text])
    assert "required a number such as 0.1, 1e-8 or 1/3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bf16", "f16", "e4m3", "e5m2", "e2m1"])
def test_every_number_of_a_format_is_stored_as_it_is(name: str):
    row = ROWS[name]
    width = np.uint16 if row.bits == 16 else np.uint8
    # Of 16 bits every 37th, which meets every exponent and both signs.
    patterns = np.arange(0, 2**row.bits, 37 if row.bits == 16 else 1, dtype=width)
    for value in map(float, patterns.view(DTYPES[name])):
        if math.isfinite(value):
            made = stored(Fraction(value), row)
            assert (made.value, made.error) == (value, 0.0)


@pytest.mark.parametrize("name", ["f64", "f32", "bf16", "f16", "e5m2"])
def test_between_two_numbers(name: str):
    row = ROWS[name]
    one, step = Fraction(1), Fraction(row.eps)
    # Of two that are equally near, the even one; a hair decides, however thin.
    assert stored(one + step / 2, row).value == 1
    assert stored(one + step * 3 / 2, row).value == float(1 + 2 * step)
    assert stored(one + step / 2 + Fraction(1, 10**60), row).value == float(1 + step)
    assert stored(-one - step / 2 - Fraction(1, 10**60), row).value == -float(1 + step)
    smallest = Fraction(row.smallest)
    assert stored(smallest / 2, row).note.startswith("underflow")
    assert math.copysign(1, stored(-smallest / 4, row).value) == -1
    assert stored(smallest * 3 / 4, row).value == row.smallest
    assert stored(smallest * 5 / 4, row).note == "subnormal: fewer bits are left"
    top = Fraction(row.max)
    assert stored(top * (1 + step / 8), row).value == row.max
    assert stored(top * (1 + step), row).value == math.inf


def test_as_a_cast_stores_it():
    # ml_dtypes casts float32 exactly, so that it can be compared with.
    values = np.random.default_rng(0).standard_normal(200).astype(np.float32) * 100
    for value in values:
        for row in (ROWS["bf16"], ROWS["f16"], ROWS["e4m3"], ROWS["e5m2"]):
            made = stored(Fraction(float(value)), row)
            assert made.value == float(value.astype(DTYPES[row.name])), (value, row.name)
    assert DTYPES["e4m3"] == ml_dtypes.float8_e4m3fn


def test_what_is_written_is_exact():
    assert number("1/3") == Fraction(1, 3)
    assert number("0.1") == Fraction(1, 10)
    assert stored(number("0"), ROWS["f16"]).note == "exact"


@pytest.mark.parametrize("text", ["-1e-8", "-1/3", "-.5", "-70000"])
def test_negative_numbers_are_no_options(text: str, capsys: pytest.CaptureFixture[str]):
    assert main(["formats", "0.1", text, "--json", "-"]) == 0
    assert f'"{text}"' in capsys.readouterr().out
