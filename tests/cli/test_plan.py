"""The command `halfstep plan`, with a real compiler."""

import json
import pathlib

import pytest

import halfstep
from halfstep.cli import main
from tests.preflight._compilers import need

STEPS = "tests.cli._steps"
MAKE = ("plan", f"{STEPS}:make_layers", "--target", "h100")


def test_a_plan_is_printed_written_and_drawn(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    need("cuda")
    out, picture, kept = tmp_path / "plan.toml", tmp_path / "front.png", tmp_path / "plan.json"
    files = ("--out", str(out), "--plot", str(picture), "--json", str(kept))
    assert main([*MAKE, "--budget", "85MiB", *files]) == 0
    printed = capsys.readouterr().out
    assert "the plan" in printed
    assert "rules of the plan:" in printed
    policy = halfstep.Policy.load(out)
    assert {rule.outcome for rule in policy.stores} == {"recompute"}
    found = json.loads(kept.read_text())
    chosen = found["front"][found["chosen"]]
    assert chosen["peak_bytes"] <= found["budget_bytes"] == 85 * 2**20
    assert halfstep.Policy.parse(chosen["policy"]) == policy
    assert picture.stat().st_size > 10_000


def test_few_bits(capsys: pytest.CaptureFixture[str]):
    need("cuda")
    options = ("--max-gradient-error", "0.05", "--batches", f"{STEPS}:batches")
    assert main([*MAKE, "--budget", "85MiB", *options]) == 0
    assert "gradients" in capsys.readouterr().out


def test_no_plan_fits(capsys: pytest.CaptureFixture[str]):
    need("cuda")
    assert main([*MAKE, "--budget", "20MiB"]) == 1
    assert "no plan fits into 20.00 MiB on h100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budget", "much"), "a budget is bytes, a share, or a text"),
        (("--max-gradient-error", "0.1"), "max_gradient_error needs batches"),
        (("--out", "plan.txt"), "the name must end in .toml"),
        (("--policy", "bf17"), "bf17"),
    ],
)
def test_wrong_options(options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]):
    need("cuda")
    assert main([*MAKE, *options]) == 2
    assert message in capsys.readouterr().err
