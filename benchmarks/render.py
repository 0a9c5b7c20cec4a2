"""Write the tables in the docs from the results: `python -m benchmarks.render [--check]`.

A page says `<!-- numbers: NAME -->` where the table of `benchmarks/results/NAME.json` goes; it ends
at `<!-- end of numbers -->`. Nobody writes a measured number into a page by hand: `--check` also
looks for such, and for pictures that were drawn from other results.
"""

import argparse
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from benchmarks import _numbers, pictures
from benchmarks._bars import BASELINE, bars_text
from benchmarks._comparison import text as peers_text
from benchmarks._f8_tables import text as f8_text
from benchmarks._fault_table import text as fault_text
from benchmarks._hardening import (
    fuzz_text,
    random_programs_text,
    rest_text,
    soak_text,
    wrong_arguments_text,
)
from benchmarks._images import markdown
from benchmarks._memory_tables import text as memory_text
from benchmarks._plan_tables import batches_text, optimum_text, training_text
from benchmarks._report import RESULTS, table
from benchmarks._scale_tables import text as scale_text
from benchmarks._works_with import text as works_with_text
from benchmarks.blocks import text as blocks_text
from benchmarks.costs import text as costs_text
from benchmarks.coverage import text as coverage_text
from benchmarks.flags import text as flags_text
from benchmarks.fp8_memory import COLUMNS as FP8_MEMORY_COLUMNS, lines as fp8_memory_lines
from benchmarks.kernels import COLUMNS as KERNEL_COLUMNS, lines as kernel_lines
from benchmarks.loop_state import page as loop_state_text
from benchmarks.loss_scaling import text as loss_scaling_text
from benchmarks.mutations import text as mutations_text
from benchmarks.optimizers import COLUMNS as OPTIMIZER_COLUMNS, lines as optimizer_lines
from benchmarks.plan import text as plan_text
from benchmarks.preflight_roles import text as roles_text
from benchmarks.recipes import text as recipes_text
from benchmarks.release import COLUMNS as RELEASE_COLUMNS, lines as release_lines
from benchmarks.remat import text as remat_text
from benchmarks.saving import text as saving_text
from benchmarks.startup import text as startup_text
from benchmarks.stored import page as stored_text

DOCS = pathlib.Path(__file__).parents[1] / "docs"
END = "<!-- end of numbers -->"
MARK = re.compile(rf"<!-- numbers: (\w+) -->\n(?:.*?{END}\n)?", re.DOTALL)


def made_by(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"Printed by `{result['command']}` with {versions}."


def overhead(result: dict[str, Any]) -> str:
    columns = {
        "step": "step",
        "time": "time",
        "gated": "time, to by hand with select",
        "instructions": "instructions",
        "temporaries": "temporary memory",
    }
    rows = [
        {
            "step": row["step"],
            "time": f"{row['time_ratio']:.3f}",
            "gated": f"{row['time_ratio_to_gated']:.3f}",
            "instructions": f"{row['instruction_ratio']:.3f} ({row['instructions']:,})",
            "temporaries": f"{row['temporary_ratio']:.3f} ({row['temporaries'] / 2**20:.1f} MiB)",
        }
        for row in result["rows"]
    ]
    model = result["model"]
    text = (
        f"Ratios to the float16 step written by hand without a gate: a {model['kind']} of "
        f"{model['blocks']} blocks and width {model['width']}, batch {model['batch']}, AdamW, on a "
        f"CPU. Instructions and memory are exact, from XLA's optimized program. The times are "
        f"medians over {result['rounds']} interleaved rounds, and vary by about a hundredth from "
        "run to run. They compare wrappers of one program, and say nothing about the speed of 16 "
        "bits. A gate reads all gradients once more for the verdict."
    )
    return f"{table(rows, columns)}\n\n{text}"


def fashion_mnist(result: dict[str, Any]) -> str:
    columns = {"policy": "policy", "mean": "mean", "seeds": "seeds", "difference": "to f32"}
    rows = [
        {
            "policy": f"`{policy}`",
            "mean": f"{row['mean']:.2f} %",
            "seeds": ", ".join(f"{value:.2f}" for value in row["test_accuracy_percent"]),
            "difference": f"{row['difference_to_f32_points']:+.2f}" if policy != "f32" else "",
        }
        for policy, row in result["policies"].items()
    ]
    forced, settings = result["forced"], result["settings"]
    text = (
        f"Accuracy on the {result['test_images']:,} test images after {settings['steps']} steps of "
        f"batch {settings['batch']}. One more float16 run began at a loss scale of "
        f"{forced['initial_loss_scale']:,.0f}, far too high: it skipped {forced['skipped']} steps "
        f"and reached {forced['test_accuracy_percent']:.2f} %."
    )
    image = markdown(
        "Loss and accuracy of float32, bfloat16 and float16 lie on one another. The loss scale of "
        "float16 doubles step by step; begun far too high, it falls within the first steps",
        "fashion_mnist",
    )
    return f"{table(rows, columns)}\n\n{text}\n\n{image}"


def autocast(result: dict[str, Any]) -> str:
    traced, deep = result["traced"], result["deep"]
    tracing = [
        {
            "layers": row["layers"],
            "way": row["way"],
            "seconds": f"{row['trace_seconds'] + row['lower_seconds']:.2f}",
            "ratio": f"{row['ratio']:.2f}",
        }
        for row in result["trace"]
    ]
    programs = [
        {
            "program": row["program"],
            "float32": f"{row['float32_seconds']:.2f}",
            "bf16": f"{row['seconds']:.2f}",
            "ratio": f"{row['ratio']:.2f}",
            "explain": f"{row['explain_seconds']:.2f}",
            "explain_ratio": f"{row['explain_ratio']:.2f}",
        }
        for row in result["programs"]
    ]
    steps = [
        {
            "model": row["model"],
            "way": row["way"],
            "time": f"{row['time_ratio']:.2f}",
            "instructions": f"{row['instruction_ratio']:.2f} ({row['instructions']:,})",
        }
        for row in result["step"]
    ]
    errors = [
        {
            "model": row["model"],
            "way": row["way"],
            "errors": ", ".join(f"{100 * error:.2f} %" for error in row["errors"]),
            "ratio": f"{row['ratio']:.2f}",
        }
        for row in result["gradient"]
    ]
    parts = [
        "**Tracing.** Seconds to trace and lower the loss with its gradient, and the ratio to the "
        f"float32 function: a language model of {traced['layers']} layers, width "
        f"{traced['width']}, in a `scan` or written out by a Python loop. CPU time, medians of "
        f"{result['traces']} interleaved runs, each with empty caches. By hand is `astype` on all "
        f"arguments. {deep['layers']} layers of width {deep['width']} in a `scan` take autocast "
        f"{result['deep_seconds']:.2f} s.",
        table(
            tracing,
            {"layers": "layers", "way": "loss", "seconds": "seconds", "ratio": "to float32"},
        ),
        "The same for the gradient by `halfstep.filter_value_and_grad` with bf16, compared with "
        "Equinox's of the float32 function; and seconds of `explain`, compared with tracing that "
        "gradient. Equal layers that are written out one after the other are differentiated once. "
        "What remains is that the function is traced first and rewritten afterwards, and that the "
        "program has casts and recomputed islands in addition.",
        table(
            programs,
            {
                "program": "program",
                "float32": "float32",
                "bf16": "bf16",
                "ratio": "to float32",
                "explain": "`explain`",
                "explain_ratio": "to tracing bf16",
            },
        ),
        "**Steps on a CPU.** Time and instructions of a whole step with AdamW, compared "
        "with one that "
        f"is cast to bfloat16 by hand; batch {result['batch']}, medians of {result['rounds']} "
        "interleaved rounds. Islands compute some of it twice. A CPU computes bfloat16 in "
        "float32, so that these compare ways to write it, and say nothing about the speed of 16 "
        "bits.",
        table(
            steps,
            {"model": "model", "way": "loss", "time": "time", "instructions": "instructions"},
        ),
        "**Gradients.** The norm of their difference from float32's, divided by the norm of "
        "float32's, for "
        f"{result['seeds']} random initializations and batches; and the largest ratio to that of "
        "casting by hand.",
        table(
            errors,
            {"model": "model", "way": "loss", "errors": "errors", "ratio": "to by hand, at most"},
        ),
    ]
    return "\n\n".join(parts)


def training(result: dict[str, Any]) -> str:
    return _trained(
        result,
        markdown(
            "Loss curves of float32, bfloat16 and float16 lie on one another; below, the "
            "differences to float32 stay between the dashed lines of the bar",
            "training",
        ),
    )


def optim_training(result: dict[str, Any]) -> str:
    return _trained(
        result,
        markdown(
            "Loss curves of optax.adamw in float32 and of flash_adamw lie on one another; below, "
            "the difference swings around zero",
            "optim_training",
        ),
    )


def optim_training_4_bits(result: dict[str, Any]) -> str:
    return _trained(result, "")


def fp8_training(result: dict[str, Any]) -> str:
    image = markdown(
        "Final loss of each recipe compared with bf16, a dot per seed and a bar for the mean. "
        "8-bit recipes lie close to zero, nvfp4 is beyond the edge",
        "fp8_training",
    )
    apart: dict[str, list[float]] = {}
    for row in result["results"]:
        name = row["policy"]
        if name != "bf16":
            what = f"`{name}`" if name.startswith("nvfp4") else "the 8-bit recipes"
            apart.setdefault(what, []).append(row["held_out_percent"])
    text = "; ".join(
        f"between {min(found):+.2f} and {max(found):+.2f} % for {what}"
        for what, found in apart.items()
    )
    versions = {row.get("jax") for row in result["results"]}
    if len(versions) > 1:
        text += (
            ". Each row is compared with bf16 of the same JAX. Rows of different JAX were trained "
            "with different Pythons, whose libraries are different texts for the GPT"
        )
    return (
        f"{_trained(result, image, base='bf16')}\n\n"
        f"Differences of the held-out loss to bfloat16: {text}."
    )


def fp8_outliers(result: dict[str, Any]) -> str:
    (about,) = result["tasks"].values()
    text = (
        f"Each layer reads {about['massive_channels']} channels of "
        f"{about['massive']:,.0f} next to its own {about['sizes']['width']} or, the last of a "
        f"block, {4 * about['sizes']['width']}."
    )
    image = markdown(
        "With massive activations, the final losses of f8-block and mxfp8 lie within 1 % of "
        "bf16's, that of nvfp4 outside, and those of f8 and f8-row far above it",
        "fp8_outliers",
    )
    return f"{_trained(result, image, base='bf16')}\n\n{text}"


def fp8_memory(result: dict[str, Any]) -> str:
    small = result["differentiated"]
    text = (
        f"Peak memory of a step of {result['model']} with AdamW at batch {result['batch']}, "
        "compiled for an H100, with products of cuBLAS's; next to it what the traced function "
        "keeps "
        "for the backward pass, but for its arguments. The compiler may make some of that again "
        "instead, as it does in float32, or keep it in more bits. Gradients are "
        f"compared with float32's on a CPU, for a ViT of {small['blocks']} blocks and width "
        f"{small['width']}: means of {result['seeds']} random initializations and batches."
        f" Bar: {result['bar']} times less than float32 for the best policy; "
        f"{'met' if result['passed'] else '**missed**'}."
    )
    return f"{table(fp8_memory_lines(result), FP8_MEMORY_COLUMNS)}\n\n{text}"


def _trained(result: dict[str, Any], image: str, *, base: str = "f32") -> str:
    first = result["results"][0]["policy"]
    columns = {
        "task": "task",
        "policy": "policy" if first == base else "optimizer",
        **({"jax": "JAX"} if len({row.get("jax") for row in result["results"]}) > 1 else {}),
        "final_loss": "final loss",
        "final": f"to {base}",
        "held_out_loss": "held-out loss",
        "held_out": f"to {base}",
        "accuracy": "accuracy",
    }
    rows, scales = [], []
    for row in result["results"]:
        line = {"task": row["task"], "policy": f"`{row['policy']}`", "jax": row.get("jax", "")}
        for name in ("final", "held_out"):
            line[f"{name}_loss"] = f"{row[f'{name}_loss']:.4f}"
            line[name] = f"{row[f'{name}_percent']:+.3f} %" if row["policy"] != first else ""
        if "accuracy_percent" in row:
            line["accuracy"] = f"{row['accuracy_percent']:.2f} %"
        rows.append(line)
        if row["policy"] == "f16":
            skipped = ", ".join(str(count) for count in row["skipped"])
            ends = ", ".join(f"2^{math.log2(scale):.0f}" for scale in row["loss_scales"])
            scales.append(
                f"The seeds of the {row['task']} skipped {skipped} steps, and their loss scale "
                f"ended at {ends}."
            )
    seeds = len(result["results"][0]["skipped"])
    ranges = [
        value
        for row in result["results"]
        for name in ("final", "held_out")
        for value in row[f"{name}_percent_of_seeds"]
    ]
    trained = " and ".join(
        f"{about['steps']} steps of batch {about['batch']} ({task})"
        for task, about in result["tasks"].items()
    )
    exact = "float32" if base == "f32" else "bfloat16"
    guesses = " and ".join(f"{about['guessing']:.2f}" for about in result["tasks"].values())
    text = (
        f"Means of {seeds} seeds after {trained}. The final loss is the mean of the last "
        f"{100 * result['tail']:.0f} % of the steps. The best guess that does not look at its "
        f"input has a loss of {guesses}. Of single seeds, the differences to {exact} lie "
        f"between {min(ranges):+.2f} and {max(ranges):+.2f} %."
    )
    scaled = [
        "A step that float16 skips leaves it one update behind; the picture marks where. "
        f"{' '.join(scales)}"
    ]
    parts = [table(rows, columns), text, bars_text(result), *(scaled if scales else [])]
    parts += [image] if image else []
    return "\n\n".join(parts)


def release(result: dict[str, Any]) -> str:
    return table(release_lines(result), RELEASE_COLUMNS)


def optimizers(result: dict[str, Any]) -> str:
    rows, columns = result["shape"]
    text = (
        f"Bytes a parameter, for one matrix of {rows} x {columns} with bfloat16 gradients (2 of "
        "the bytes) and donated arguments. flashoptim-jax is fused; its kernel for GPUs is one of "
        "Pallas-Triton, which cannot be compiled for TPUs, nor without a GPU on JAX 0.12. To "
        "compile `init` for a billion parameters took "
        f"{result['init_of_a_billion_seconds']} s."
    )
    return f"{table(optimizer_lines(result), OPTIMIZER_COLUMNS)}\n\n{text}"


def kernels(result: dict[str, Any]) -> str:
    rows, columns = result["shape"]
    text = (
        f"Bytes per parameter of `flash_adamw`, for one matrix of {rows} x {columns} with bfloat16 "
        "gradients (2 of the bytes) and donated arguments, as compiled. Nothing was run on these "
        "accelerators."
    )
    return f"{table(kernel_lines(result), KERNEL_COLUMNS)}\n\n{text}"


def optim_cpu(result: dict[str, Any]) -> str:
    columns = {
        "optimizer": "optimizer",
        "time": "time, to optax",
        "processor": "processor time, to optax",
        "temporaries": "temporaries, bytes a parameter",
        "theirs": "of optax",
    }
    rows = [
        {
            "optimizer": f"`flash_{row['optimizer']}`",
            "time": f"{row['time_ratio']:.2f}",
            "processor": f"{row['cpu_time_ratio']:.2f}",
            "temporaries": f"{row['halfstep_temporaries']:.2f}",
            "theirs": f"{row['optax_temporaries']:.2f}",
        }
        for row in result["rows"]
    ]
    height, width = result["shape"]
    text = (
        f"One matrix of {height} x {width} with bfloat16 gradients, medians of {result['rounds']} "
        "interleaved rounds on a CPU, compared with Optax with float32 parameters and state. It "
        "says nothing about accelerators."
    )
    return f"{table(rows, columns)}\n\n{text}"


def debug(result: dict[str, Any]) -> str:
    columns = {
        "model": "model",
        "sites": "recorded",
        "count": "sites",
        "time_ratio": "time",
        "temporary_ratio": "temporary memory",
        "instruction_ratio": "instructions",
        "same_bits": "same bits",
    }
    costs = [{**row, "same_bits": "yes" if row["same_bits"] else "no"} for row in result["costs"]]
    faults = [
        {
            **row,
            "found": ("" if row["is_right"] else "wrong: ")
            + f"{row['found']}, {row['found_pass']}",
        }
        for row in result["faults"]
    ]
    heads = {
        "fault": "fault",
        "framework": "written in",
        "found": "`debug.first_nonfinite`",
        "debug_nans": "`jax.debug_nans`",
    }
    searched = {
        "program": "step",
        "pass": "goes wrong",
        "found": "found",
        "run_seconds": "compile and run, seconds",
        "search_seconds": "search, seconds",
        "ratio": "ratio",
    }
    odd = [f"{row['model']} ({row['sites']})" for row in costs if row["time_ratio"] < BASELINE]
    unexplained = (
        f"In the rows {', '.join(odd)}, the bare step took longer than the recorded one. These "
        "ratios do not measure recording, and the reason is not known.\n\n"
        if odd
        else ""
    )
    right = sum(row["is_right"] for row in faults)
    theirs = sum(row["debug_nans_is_right"] for row in faults)
    return (
        "A training step in bfloat16 with AdamW on a CPU, recorded and bare, as ratios of "
        "interleaved runs:\n\n"
        f"{table(costs, columns)}\n\n"
        f"{unexplained}"
        "`debug.first_nonfinite` until its answer, compared with compiling the step and running it "
        "once, for a step that goes wrong in the forward or in the backward pass:\n\n"
        f"{table(result['searches'], searched)}\n\n"
        f"Of {len(faults)} planted faults, `debug.first_nonfinite` names {right} with line, pass, "
        f"iteration and shard; `jax.debug_nans` names {theirs} in the jitted step, by line. It "
        "looks for NaN only, not for infinities, and says nothing about what came before:\n\n"
        f"{table(faults, heads)}"
    )


def bisect(result: dict[str, Any]) -> str:
    planted = [
        {**row, "found": ", ".join(row["found"]) if row["is_right"] else "wrong"}
        for row in result["planted"]
    ]
    heads = {"planted": "planted", "scopes": "scopes", "found": "found", "compiles": "compiles"}
    trained = [{**row, "loss": f"{row['loss']:.3f}"} for row in result["vit"]]
    columns = {"policy": "policy", "loss": "training loss", "skipped": "steps skipped"}
    found = result["found"]
    rules = ", ".join(f"`{one['rule']}`" for one in found["needed"])
    return (
        "Scopes that overflow in float16, planted among others that do not:\n\n"
        f"{table(planted, heads)}\n\n"
        "A small ViT on Fashion-MNIST with pixels of 0 to 255, as they are: "
        f"{found['steps']} steps, mean loss of the last fifth. With every operation in float16 it "
        f"does not train. `debug.bisect`, before the first step, with {found['compiles']} "
        f"compiles: {found['wide']} of {found['operations']} operations must stay in float32, "
        f"by {rules}.\n\n"
        f"{table(trained, columns)}"
    )


RENDERERS: Mapping[str, Callable[[dict[str, Any]], str]] = MappingProxyType(
    {
        "autocast": autocast,
        "bisect": bisect,
        "coverage": coverage_text,
        "debug": debug,
        "ecosystem": works_with_text,
        "fashion_mnist": fashion_mnist,
        "faults": fault_text,
        "flags": flags_text,
        "fp8": f8_text,
        "fp8_memory": fp8_memory,
        "blocks": blocks_text,
        "fp8_outliers": fp8_outliers,
        "fp8_training": fp8_training,
        "fuzz": fuzz_text,
        "fuzz_programs": random_programs_text,
        "fuzz_programs_oldest": random_programs_text,
        "kernels": kernels,
        "loop_state": loop_state_text,
        "loss_scaling": loss_scaling_text,
        "memory": memory_text,
        "mutations": mutations_text,
        "optim_cpu": optim_cpu,
        "optim_training": optim_training,
        "optim_training_4_bits": optim_training_4_bits,
        "optimizers": optimizers,
        "overhead": overhead,
        "peers": peers_text,
        "plan": plan_text,
        "costs": costs_text,
        "plan_batches": batches_text,
        "plan_optimum": optimum_text,
        "plan_training": training_text,
        "preflight_roles": roles_text,
        "recipes": recipes_text,
        "release": release,
        "remat": remat_text,
        "rest": rest_text,
        "saving": saving_text,
        "scale": scale_text,
        "soak": soak_text,
        "stored": stored_text,
        "startup": startup_text,
        "training": training,
        "wrong_arguments": wrong_arguments_text,
    }
)


def render(page: str) -> str:
    """A page with every marked table written anew."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        result = json.loads((RESULTS / f"{name}.json").read_text())
        body = f"{RENDERERS[name](result)}\n\n{made_by(result)}"
        return f"<!-- numbers: {name} -->\n\n{body}\n\n{END}\n"

    return MARK.sub(replace, page)


def main(argv: list[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.render", description=__doc__)
    arguments.add_argument("--check", action="store_true", help="fail if a page would change")
    check = arguments.parse_args(argv).check
    stale = []
    for path in sorted(DOCS.rglob("*.md")):
        old = path.read_text()
        new = render(old)
        if new != old:
            stale.append(path)
            if not check:
                path.write_text(new)
    for path in stale:
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(DOCS.parent)}")
    wrong = [*_numbers.wrong(_numbers.pages()), *pictures.stale()] if check else []
    for line in wrong:
        print(line)
    return 1 if check and (stale or wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
