"""Does training in 16 bits reach the loss that it reaches in float32? Two models, three seeds each.

    python -m benchmarks.training --json FILE --plot PNG
    python -m benchmarks.training --from FILE --plot PNG

A vision transformer on Fashion-MNIST and a language model on the sources of Python's standard
library are trained in float32, bfloat16, and float16 with dynamic loss scaling: from the same
initial parameters and on the same batches, and the loss that is given to halfstep is the same
float32 function. The exit status is 1 if a bar is missed. The loss is all this measures: on a CPU
the time of a step says nothing about 16 bits. Needs `halfstep[examples]`.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TextIO

# Before JAX is imported. XLA:CPU computes 16-bit arithmetic in float32 and would be free to leave
# out the rounding in between, which would flatter the 16-bit formats.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_allow_excess_precision=false"]
)

import jax
from tqdm import tqdm

from benchmarks._report import add_sources, parser, read_or_make, report, table, write
from benchmarks._runs import Trainer
from benchmarks._tasks import Schedule, Task, fashion_mnist, python_sources

MODULE = "benchmarks.training"
POLICIES = ("f32", "bf16", "f16")
BAR_PERCENT = 0.5
"""How far a mean loss may lie below or above float32's."""
LEARNED = 0.75
"""What float32's held-out loss must be below, in parts of the loss of the best constant guess."""
EVERY = 10
"""Steps of which the mean loss is kept."""
TAIL = 0.2
"""The last part of the steps, whose mean is the final loss."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is trained, and from which seeds."""

    tasks: Callable[[], Sequence[Task]]
    seeds: tuple[int, ...]
    only: tuple[str, ...] = ("",)
    """How the names of tasks begin that are trained; others keep their earlier runs."""


# At three times its learning rate, the language model ends elsewhere even in float32 if its initial
# parameters change by one part in ten thousand: what 16 bits do could not be told from that.
VIT = {"patch": 7, "width": 64, "hidden": 128, "heads": 4, "blocks": 4}
GPT = {"tokens": 64, "width": 128, "layers": 4}
FULL = Plan(
    lambda: (
        fashion_mnist(Schedule(steps=500, batch=64, learning_rate=1e-3), VIT),
        python_sources(Schedule(steps=400, batch=12, learning_rate=1e-3), GPT, heads=4),
    ),
    seeds=(0, 1, 2),
)
QUICK = Plan(
    lambda: (
        fashion_mnist(
            Schedule(steps=20, batch=4, learning_rate=1e-3, chunk=10),
            {"patch": 14, "width": 8, "hidden": 8, "heads": 2, "blocks": 1},
            tested=20,
        ),
        python_sources(
            Schedule(steps=20, batch=2, learning_rate=1e-3, chunk=10),
            {"tokens": 8, "width": 8, "layers": 1},
            heads=2,
            size=100_000,
            tested=4,
        ),
    ),
    seeds=(0,),
)


def train(
    tasks: Sequence[Task],
    seeds: Sequence[int],
    policies: Sequence[str] = POLICIES,
    trainer_of: Callable[[Task, str], Trainer] | None = None,
) -> list[dict[str, Any]]:
    """One row for each task, policy and seed."""
    total = len(policies) * len(seeds) * sum(task.schedule.steps for task in tasks)
    rows = []
    with tqdm(total=total, unit="step", smoothing=0.02) as bar:
        for task in tasks:
            bar.set_description(task.name)
            for policy in policies:
                trainer = (trainer_of or Trainer)(task, policy)
                for seed, made in zip(seeds, trainer.runs(seeds, bar), strict=True):
                    means = made.pop("losses").reshape(-1, EVERY).mean(axis=1)
                    rows.append(
                        {
                            "task": task.name,
                            "policy": policy,
                            "seed": seed,
                            "jax": jax.__version__,
                            **{name: rounded(value) for name, value in made.items()},
                            "curve": [rounded(value) for value in means],
                        }
                    )
    return rows


def rounded(value: Any) -> Any:
    """Six significant digits, more than a loss has to say; integers, such as scales, stay."""
    if isinstance(value, int) or float(value).is_integer():
        return int(value)
    return float(f"{value:.6g}")


def final(run: Mapping[str, Any]) -> float:
    """The mean loss of the last part of a run."""
    return statistics.fmean(run["curve"][-max(1, round(TAIL * len(run["curve"]))) :])


LOSSES: Mapping[str, Callable[[Mapping[str, Any]], float]] = MappingProxyType(
    {"final": final, "held_out": lambda run: run["held_out_loss"]}
)
"""The losses that are compared."""


def summarize(
    runs: Sequence[Mapping[str, Any]],
    tasks: Mapping[str, Any],
    policies: Sequence[str] = POLICIES,
    bar_of: Callable[[str, str], float | None] = lambda policy, loss: BAR_PERCENT,
) -> dict[str, Any]:
    """Means over the seeds, their differences to the first, and whether the bars are met.

    `bar_of` says for a policy and a loss how many percent it may be away; `None` for any.
    """
    first = policies[0]
    results, bars = [], {}
    for task, about in tasks.items():
        mine = [run for run in runs if run["task"] == task]
        for policy, jax_of in _made_by(mine, policies):
            group = [run for run in _of(mine, policy) if run.get("jax") == jax_of]
            # Each run is compared with one of the same versions.
            reference = {run["seed"]: run for run in _of(mine, first) if run.get("jax") == jax_of}
            if not reference:
                raise SystemExit(
                    f"there is no run of {first} on {task} with JAX {jax_of}, with which {policy} "
                    f"was trained: train {first} as well (--only {first} ...)."
                )
            row: dict[str, Any] = {"task": task, "policy": policy}
            if jax_of is not None:
                row["jax"] = jax_of
            for name, loss in LOSSES.items():
                mean = statistics.fmean(map(loss, group))
                base = statistics.fmean(map(loss, reference.values()))
                row[f"{name}_loss"] = rounded(mean)
                row[f"{name}_percent"] = rounded(100 * (mean / base - 1))
                row[f"{name}_percent_of_seeds"] = [
                    rounded(100 * (loss(run) / loss(reference[run["seed"]]) - 1)) for run in group
                ]
                bar = None if policy == first else bar_of(policy, name)
                if bar is not None:
                    what = f"{task}, {policy}, {name.replace('_', '-')} loss"
                    bars[f"{what}: within {bar} % of {first}"] = abs(row[f"{name}_percent"]) <= bar
            if all("held_out_accuracy" in run for run in group):
                accuracies = [100 * run["held_out_accuracy"] for run in group]
                row["accuracy_percent"] = round(statistics.fmean(accuracies), 2)
            row["skipped"] = [run["skipped"] for run in group]
            row["loss_scales"] = [run["loss_scale"] for run in group]
            results.append(row)
        learned = next(row for row in results if row["task"] == task)["held_out_loss"]
        bars[f"{task}: {first} learns"] = learned <= LEARNED * about["guessing"]
    return {"results": results, "bars": bars, "passed": all(bars.values())}


def _of(runs: Sequence[Mapping[str, Any]], policy: str) -> list[Mapping[str, Any]]:
    return [run for run in runs if run["policy"] == policy]


def _made_by(
    runs: Sequence[Mapping[str, Any]], policies: Sequence[str]
) -> list[tuple[str, str | None]]:
    """Policies, each with the JAX that its runs were made with; some were kept from earlier."""
    return [
        (policy, jax_of)
        for policy in policies
        for jax_of in dict.fromkeys(run.get("jax") for run in _of(runs, policy))
    ]


def measure(
    plan: Plan,
    module: str = MODULE,
    policies: Sequence[str] = POLICIES,
    trainer_of: Callable[[Task, str], Trainer] | None = None,
    bar_of: Callable[[str, str], float | None] = lambda policy, loss: BAR_PERCENT,
    *,
    only: Sequence[str] | None = None,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Train every run and report on all.

    With `only`, the other policies are not trained: their runs are those of `earlier`, an earlier
    report's, which say with which JAX they were made.
    """
    tasks = plan.tasks()
    chosen = [task for task in tasks if task.name.startswith(plan.only)]
    trained = train(chosen, plan.seeds, policies if only is None else only, trainer_of)
    runs = kept(earlier, trained, policies[0]) + trained
    runs.sort(key=lambda run: [task.name for task in tasks].index(run["task"]))
    policies = [name for name in policies if _of(runs, name)]
    about = {task.name: {**task.about, **dataclasses.asdict(task.schedule)} for task in tasks}
    results = {
        "backend": jax.default_backend(),
        "xla_flags": os.environ["XLA_FLAGS"].strip(),
        "tasks": about,
        "bar_percent": BAR_PERCENT,
        "every": EVERY,
        "tail": TAIL,
        **summarize(runs, about, policies, bar_of),
        "runs": runs,
    }
    return report(module, results, packages=("numpy",))


def kept(
    earlier: Sequence[Mapping[str, Any]], trained: Sequence[Mapping[str, Any]], first: str
) -> list[Any]:
    """The runs of an earlier report that new ones do not replace, with what they compare with."""

    new = {(run["task"], run["policy"]) for run in trained}
    left = [run for run in earlier if (run["task"], run["policy"]) not in new]
    others = [run for run in left if run["policy"] != first]
    # Runs of the first policy stay as long as others of the same versions are compared with them.
    needed = {(run["task"], run.get("jax")) for run in [*others, *trained]}
    made = {(run["task"], run.get("jax")) for run in trained if run["policy"] == first}
    return [
        *(
            run
            for run in earlier
            if run["policy"] == first and (run["task"], run.get("jax")) in needed - made
        ),
        *others,
    ]


def show(made: Mapping[str, Any], file: TextIO) -> None:
    """The figures, for people."""
    columns = {
        "task": "task",
        "policy": "policy",
        "jax": "JAX",
        "final_loss": "loss",
        "final_percent": "% to first",
        "held_out_loss": "held out",
        "held_out_percent": "% to first",
        "accuracy_percent": "accuracy %",
        "skipped": "skipped",
        "loss_scales": "scales",
    }
    print(table(made["results"], columns), file=file)
    for bar, met in made["bars"].items():
        print(f"{'met   ' if met else 'MISSED'}  {bar}", file=file)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or read an earlier report; write, draw and print it."""
    options = parser(MODULE, "The loss of two models in float32, bfloat16 and float16.")
    return run(options, argv, lambda quick: measure(QUICK if quick else FULL))


def run(
    options: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    make: Callable[[bool], dict[str, Any]],
    *,
    bar_percent: float = BAR_PERCENT,
) -> int:
    """The command: where the report comes from, and where it goes."""
    add_sources(options, drawn="the curves", quick="tiny models, twenty steps, one seed")
    return finish(options.parse_args(argv), make, bar_percent=bar_percent)


def finish(
    parsed: argparse.Namespace, make: Callable[[bool], dict[str, Any]], *, bar_percent: float
) -> int:
    """Make or read the report; write, draw and print it."""
    made = read_or_make(parsed, lambda: make(parsed.quick))
    made["bar_percent"] = bar_percent
    write(made, parsed.json)
    if parsed.plot:
        from benchmarks._curves import plot

        plot(made, parsed.plot)
    show(made, sys.stderr if parsed.json == "-" else sys.stdout)
    # Twenty steps decide nothing.
    return 0 if made["passed"] or parsed.quick else 1


if __name__ == "__main__":
    sys.exit(main())
