"""The table of other libraries' names says of each whether it is the same, differs or is absent."""

import importlib
import operator
import re
from pathlib import Path
from typing import NamedTuple

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "migrating" / "names.md"
MODULES = ("flashoptim_jax", "jaxamp", "jmp", "mpfj", "mpx")


class Row(NamedTuple):
    """A row of the table."""

    name: str
    status: str
    note: str


def tables() -> dict[str, list[Row]]:
    """The rows by the module of `halfstep.compat` that their heading names."""
    found: dict[str, list[Row]] = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        heading, text = part.split("\n", 1)
        module = re.search(r"`halfstep\.compat\.(\w+)`", heading)
        assert module, heading
        rows = re.findall(r"^\| `([\w.]+)` \| (\w+) \|(.*)\|$", text, re.MULTILINE)
        assert len(rows) == text.count("\n| `"), "a row that cannot be read"
        found[module[1]] = [Row(name, status, note.strip()) for name, status, note in rows]
    return found


TABLES = tables()


def has(module: str, name: str) -> bool:
    """Whether a module has a name, or an attribute of one: `DynamicLossScaling.scale`."""
    try:
        operator.attrgetter(name)(importlib.import_module(f"halfstep.compat.{module}"))
    except AttributeError:
        return False
    return True


def test_there_is_a_table_for_each_module():
    folder = Path(importlib.import_module("halfstep.compat").__path__[0])
    there = {file.stem for file in folder.glob("*.py") if not file.stem.startswith("_")}
    assert set(TABLES) == set(MODULES) == there


@pytest.mark.parametrize("module", MODULES)
def test_the_table_says_what_the_module_has(module: str):
    for name, status, note in TABLES[module]:
        assert status in ("same", "differs", "absent"), name
        assert has(module, name) is (status != "absent"), name
        assert bool(note) is (status != "same"), name


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_the_module_is_in_the_table(module: str):
    names = [row.name for row in TABLES[module]]
    assert len(names) == len(set(names))
    assert set(dir(importlib.import_module(f"halfstep.compat.{module}"))) <= set(names)


# The public names of the libraries, as their code lists them, so that no row can be left out.
PUBLIC = {
    "mpx": (
        "cast_tree cast_to_float32 cast_to_float16 cast_to_bfloat16 cast_to_full_precision "
        "cast_to_half_precision force_full_precision cast_function half_precision_datatype "
        "set_half_precision_datatype HALF_PRECISION_DATATYPE FLOAT16_MAX BFLOAT16_MAX "
        "DynamicLossScaling all_finite scaled select_tree filter_grad filter_value_and_grad "
        "optimizer_update calculate_scaled_grad __version__"
    ),
    "mpfj": (
        "cast_to_half_precision cast_to_full_precision force_full_precision filter_grad cond_update"
    ),
    "jmp": (
        "all_finite DynamicLossScale LossScale NoOpLossScale select_tree StaticLossScale "
        "cast_to_full cast_to_half get_policy half_dtype Policy __version__"
    ),
    "jaxamp": (
        "__version__ DynamicScalerState dynamic_scale_tx dynamic_scale_value_and_grad "
        "dynamic_scale_grad amp amp_stop default_amp_policy use_original_precision "
        "use_compute_precision DynamicLossScaler"
    ),
    "flashoptim_jax": (
        "FlashAdamState FlashOptimizer FlashLionState FlashSGDState QuantizedArray cast_tree_bf16 "
        "dequantize_momentum dequantize_variance flash_adam flash_adamw flash_lion "
        "flash_lion_state_dict flash_sgd flash_sgd_state_dict flash_sgdw flash_adamw_state_dict "
        "load_flash_adamw_state_dict load_flash_lion_state_dict load_flash_sgd_state_dict "
        "quantize_momentum quantize_variance reconstruct_leaf reconstruct_weights set_fp32_params "
        "split_leaf"
    ),
}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_of_the_library_is_in_the_table(module: str):
    assert set(PUBLIC[module].split()) <= {row.name for row in TABLES[module]}


@pytest.mark.parametrize("module", ["mpx", "jmp", "flashoptim_jax"])
def test_an_installed_library_has_no_other_names(module: str):
    library = pytest.importorskip(module)
    assert set(library.__all__) <= {row.name for row in TABLES[module]}
