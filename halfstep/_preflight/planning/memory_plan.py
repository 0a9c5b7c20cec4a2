"""Define the answer of `halfstep.plan`: a policy, and all candidates compiled to find it."""

import dataclasses
import html as escaping
import os
from collections.abc import Mapping
from typing import Any

from halfstep._base import Report, aligned, figure_of, flops, html_table, percent, size
from halfstep._policy import Policy

_HEAD = (
    *(("candidate", False), ("peak", True), ("of budget", True), ("estimated", True)),
    *(("stored", True), ("recomputed", True), ("offloaded", True), ("verdict", False)),
)


@dataclasses.dataclass(frozen=True)
class PlanCandidate:
    """A policy that was compiled.

    Attributes:
        choice: The name of the step's maker, if there are several.
        policy: The policy.
        peak_bytes: The compiled peak; `None` if the compiler gave up before it knew.
        estimated_bytes: The peak that was expected before compiling; `None` for the first ones.
        stored_bytes: Bytes that the backward pass is expected to keep, of the values that rules
            name.
        recomputed_flops: FLOPs of contractions in the compiled program beyond those of the step
            that recomputes none.
        offloaded_bytes: Bytes in the host's memory.
        seconds: Time that recomputing, encoding and moving values is expected to take, in seconds
            of a fully used device. It is only for comparing candidates.
        fits: Whether the peak is within the budget.
        versions: Versions of the compilers.

    Example:
        ```python
        import halfstep

        candidate = halfstep.PlanCandidate(
            choice="",
            policy=halfstep.Policy(),
            peak_bytes=2**30,
            estimated_bytes=None,
            stored_bytes=0,
            recomputed_flops=0,
            offloaded_bytes=0,
            seconds=0.0,
            fits=True,
        )
        assert candidate.to_dict()["policy"] == "p=f32,c=bf16,o=f32"
        ```
    """

    choice: str
    policy: Policy
    peak_bytes: int | None
    estimated_bytes: int | None
    stored_bytes: int
    recomputed_flops: int
    offloaded_bytes: int
    seconds: float
    fits: bool
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "choice": self.choice,
            "policy": str(self.policy),
            "peak_bytes": self.peak_bytes,
            "estimated_bytes": self.estimated_bytes,
            "stored_bytes": self.stored_bytes,
            "recomputed_flops": self.recomputed_flops,
            "offloaded_bytes": self.offloaded_bytes,
            "seconds": self.seconds,
            "fits": self.fits,
            "versions": dict(self.versions),
        }


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryPlan(Report):
    """A policy that keeps a step within a memory budget, and how it was found.

    Attributes:
        target: The target that the step was compiled for.
        budget_bytes: The budget, for each device.
        chosen: The candidate that was chosen.
        front: Every candidate that was compiled, in the order in which they were compiled.
        gradient_error: The largest distance of the gradients on a held-out batch from those of the
            policy that stores everything in 16 bits, as a share of their norm; `None` if no batches
            were given.
        next_bytes: The expected peak of the smallest candidate that is faster; `None` if no faster
            one is known.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def make_step(policy):
            def loss(params, x):
                for w in params:
                    x = x + jnp.tanh(x @ w)
                return jnp.mean(x**2)

            def step(params, x):
                grads = jax.grad(halfstep.autocast(loss, policy))(params, x)
                return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

            return step


        params = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 6
        x = jax.ShapeDtypeStruct((16384, 512), jnp.float32)
        plan = halfstep.plan(
            make_step, (params, x), target="h100", budget="220MiB", donate_argnums=0
        )
        assert plan.peak_bytes <= plan.budget_bytes
        step = make_step(plan.policy)
        ```
    """

    target: str
    budget_bytes: int
    chosen: PlanCandidate
    front: tuple[PlanCandidate, ...]
    gradient_error: float | None = None
    next_bytes: int | None = None

    @property
    def policy(self) -> Policy:
        """The policy to train with."""
        return self.chosen.policy

    @property
    def choice(self) -> str:
        """The name of the maker that was chosen; empty if there is only one."""
        return self.chosen.choice

    @property
    def peak_bytes(self) -> int:
        """The compiled peak."""
        return self.chosen.peak_bytes or 0

    @property
    def recomputed_flops(self) -> int:
        """FLOPs of contractions that a step recomputes."""
        return self.chosen.recomputed_flops

    @property
    def offloaded_bytes(self) -> int:
        """Bytes in the host's memory."""
        return self.chosen.offloaded_bytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a file that `Policy.load` reads, with the findings as comments.

        Args:
            path: The file; by convention, its name ends with `.toml`.
        """
        self.policy.save(path, notes=self._certificate)

    @property
    def _certificate(self) -> tuple[str, ...]:
        error = self.gradient_error
        lines = [
            f"Planned by halfstep.plan for {self.target}, with a budget of "
            f"{size(self.budget_bytes)} for each device.",
            f"Compiled peak: {size(self.peak_bytes)}. Recomputed: "
            f"{flops(self.recomputed_flops)}. Offloaded: {size(self.offloaded_bytes)}.",
        ]
        if self.choice:
            lines.append(f"Choice: {self.choice}.")
        if error is not None:
            lines.append(f"Gradients on held-out batches: within {percent(error)}.")
        versions = ", ".join(f"{name} {version}" for name, version in self.chosen.versions.items())
        return (*lines, f"{len(self.front)} compiles with {versions}.")

    def __str__(self) -> str:
        rows = [[name for name, _ in _HEAD], *self._rows]
        table = aligned(rows, [is_number for _, is_number in _HEAD])
        rules = "\n".join(f"  {rule}" for rule in self.policy.stores) or "  none"
        return f"{self._headline}\n\n{table}\n\n{self._next}\n\nrules of the plan:\n{rules}"

    def _repr_html_(self) -> str:
        numbers = [is_number for _, is_number in _HEAD]
        rows = [list(zip(row, numbers, strict=True)) for row in self._rows]
        rules = "".join(
            f"<li><code>{escaping.escape(str(rule))}</code></li>" for rule in self.policy.stores
        )
        return (
            f'<div style="overflow-x:auto"><p>{escaping.escape(self._headline)}</p>'
            f"{html_table(_HEAD, rows, [found.fits for found in self.front])}"
            f"<p>{escaping.escape(self._next)}</p><ul>{rules}</ul></div>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "target": self.target,
            "budget_bytes": self.budget_bytes,
            "chosen": self.front.index(self.chosen),
            "gradient_error": self.gradient_error,
            "next_bytes": self.next_bytes,
            "front": [found.to_dict() for found in self.front],
        }

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Plot the FLOPs that each candidate recomputes against its peak.

        Args:
            path: Where to save the picture, if anywhere.

        Returns:
            A matplotlib figure.
        """
        figure = figure_of("a plan")
        figure.set_size_inches(7, 4.2)
        axes = figure.subplots()
        known = [found for found in self.front if found.peak_bytes is not None]
        memory, of_memory = _unit(self.budget_bytes, (("GiB", 2**30), ("MiB", 2**20)))
        most = max(found.recomputed_flops for found in self.front)
        work, of_work = _unit(most, (("TFLOP", 10**12), ("GFLOP", 10**9)))
        for fits, color, label in ((True, "tab:blue", "fits"), (False, "tab:gray", "does not fit")):
            found = [one for one in known if one.fits == fits]
            if found:
                axes.scatter(
                    [(one.peak_bytes or 0) / of_memory for one in found],
                    [one.recomputed_flops / of_work for one in found],
                    color=color,
                    label=label,
                )
        axes.scatter(
            [self.peak_bytes / of_memory],
            [self.recomputed_flops / of_work],
            s=160,
            facecolors="none",
            edgecolors="tab:red",
            label="the plan",
        )
        axes.axvline(self.budget_bytes / of_memory, color="tab:red", linewidth=1, label="budget")
        axes.set_xlabel(f"compiled peak ({memory})")
        axes.set_ylabel(f"recomputed ({work})")
        axes.set_title(f"{self.target}: candidates of the plan")
        axes.legend()
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    @property
    def _headline(self) -> str:
        return (
            f"{self.target}: {size(self.peak_bytes)} of {size(self.budget_bytes)} "
            f"({percent(self.peak_bytes / self.budget_bytes)})"
            + (f", {self.choice}" if self.choice else "")
            + ("" if self.gradient_error is None else f", gradients {percent(self.gradient_error)}")
        )

    @property
    def _next(self) -> str:
        if self.next_bytes is None:
            return "nothing faster is known, whatever the memory."
        return f"the next faster one is expected to take {size(self.next_bytes)}."

    @property
    def _rows(self) -> list[list[str]]:
        rows = []
        for number, found in enumerate(self.front):
            peak, guess = found.peak_bytes, found.estimated_bytes
            rows.append(
                [
                    f"{number + 1} {found.choice}".rstrip(),
                    "-" if peak is None else size(peak),
                    "-" if peak is None else percent(peak / self.budget_bytes),
                    "-" if guess is None else size(guess),
                    size(found.stored_bytes),
                    flops(found.recomputed_flops),
                    size(found.offloaded_bytes),
                    "the plan"
                    if found is self.chosen
                    else ("fits" if found.fits else "does not fit"),
                ]
            )
        return rows


def _unit(most: int, units: tuple[tuple[str, int], ...]) -> tuple[str, int]:
    """Return the first unit that is not larger than the value, or the smallest unit."""
    return next((unit for unit in units if most >= unit[1]), units[-1])
