"""Implement `halfstep preflight`: find out whether a step will fit."""

import argparse

from halfstep.cli._command import Commands, add_command, add_json, share

_DESCRIPTION = """\
Compile a training step for hardware that is not there, and say what it takes.

MAKE_STEP names a function that returns a step and its arguments (arrays or
jax.ShapeDtypeStructs). It is called with policy= for each --policy and with
batch= for each --batch:

    def make_step(policy="f32", batch=64):
        ...
        return jax.jit(step, donate_argnums=(0, 1)), (params, opt_state, images)

It can also be a report that --json has saved, report.json: it is shown, and
nothing is compiled.

The exit status is 0, 1 if something does not fit (with --require-fit; or with
--largest-batch if no batch does) or is not in 8 bits (with --f8), and 2 after
an error.
"""

_EXAMPLE = """\
halfstep preflight train.py:make_step --target h100 --policy f32,bf16
halfstep preflight train.py:make_step --target rtx4070 --largest-batch
halfstep preflight report.json --peak
"""

# As in `halfstep._preflight.Gemm`, which cannot be imported without JAX; a test compares them.
GEMMS = ("auto", "triton", "library")


def add(commands: Commands) -> None:
    """Add the subcommand to the command."""
    parser = add_command(
        commands,
        "preflight",
        run,
        help="will it fit, on hardware that is not there?",
        description=_DESCRIPTION,
        example=_EXAMPLE,
    )
    parser.add_argument(
        "make_step",
        metavar="MAKE_STEP",
        help="module:function or file.py:function; or a saved report.json",
    )
    parser.add_argument(
        "--target",
        type=_targets,
        action="extend",
        default=[],
        help="such as h100, h100:8, v5e:2x2; several with commas, or repeatable",
    )
    parser.add_argument(
        "--policy",
        type=_policies,
        action="extend",
        default=[],
        help="such as f32,bf16 or p=f32,c=bf16; repeatable",
    )
    parser.add_argument(
        "--batch",
        type=integers,
        action="extend",
        default=[],
        help="such as 64,128,256; repeatable",
    )
    parser.add_argument(
        "--largest-batch", action="store_true", help="find the largest batch instead of trying some"
    )
    parser.add_argument(
        "--multiple-of", type=int, default=1, help="with --largest-batch: try only multiples of it"
    )
    add_compiler(parser)
    parser.add_argument("--detail", action="store_true", help="print every figure")
    parser.add_argument(
        "--peak", action="store_true", help="print what fills the peak: by role, scope and line"
    )
    add_json(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw memory by role (PNG, PDF, SVG)")
    parser.add_argument(
        "--plot-peak", metavar="FILE", help="draw what fills the peak (PNG, PDF, SVG)"
    )
    parser.add_argument(
        "--require-fit", action="store_true", help="exit with 1 unless everything fits"
    )
    parser.add_argument(
        "--f8",
        type=share,
        help="exit with 1 unless this share of a recipe's contractions is in 8 bits (0 to 1)",
    )


def add_compiler(parser: argparse.ArgumentParser) -> None:
    """Add the options for the compiler."""
    parser.add_argument(
        "--donate",
        type=integers,
        default=[],
        help="arguments the step may reuse, such as 0,1; what jax.jit donates is known",
    )
    parser.add_argument(
        "--memory-fraction", type=float, help="share of the device's memory (GPU: 0.75, TPU: 1)"
    )
    parser.add_argument("--gemm", choices=GEMMS, default="auto")
    parser.add_argument(
        "--flag", action="append", default=[], help="for XLA: --flag=--xla_gpu_...; repeatable"
    )
    parser.add_argument("--timeout", type=float, help="seconds that one compile may take")
    parser.add_argument("--no-cache", action="store_true", help="compile anew, keep nothing")


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from halfstep.cli._run import preflight

    return preflight.run(arguments)


def target(text: str) -> object:
    """Read a target from its text."""
    # Imported here, because it imports JAX, and help needs no target.
    from halfstep._preflight import parse_target

    try:
        return parse_target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}") from error


def _targets(text: str) -> list[object]:
    return [target(part) for part in _texts(text)]


def _texts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _policies(text: str) -> list[str]:
    # A policy that is written out contains commas: p=f32,c=bf16,o=f32.
    parts = _texts(text)
    written_out = ["=" in part for part in parts]
    if any(written_out) and not all(written_out):
        raise argparse.ArgumentTypeError(
            "a policy that is written out has commas of its own; give each with a --policy of its "
            f"own, such as --policy f32 --policy p=f32,c=bf16; got {text!r}"
        )
    return [text.strip()] if any(written_out) else parts


def integers(text: str) -> list[int]:
    try:
        return [int(part) for part in _texts(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"required integers with commas between them, such as 64,128; got {text!r}"
        ) from None
