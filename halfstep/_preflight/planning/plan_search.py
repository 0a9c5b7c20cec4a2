"""Search for a plan: select, compile, correct.

A model of the program (`selection`) selects which values are stored. The model knows the bytes of
values and the time of operations, and nothing about how a compiler lays out memory. The compiler
has the last word: each selection is compiled for the target, and where the peak is not what the
model says, the bytes that the next selection may store are corrected. The peaks of one program's
selections are almost linear in the bytes that they store, so few compiles lead to the budget.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from halfstep._autocast import Plan, collected_plans, decided
from halfstep._base import Progress, size
from halfstep._policy import Policy, StoreOutcome
from halfstep._preflight.planning.budget import parse_budget
from halfstep._preflight.planning.candidates import EVERYTHING, tape
from halfstep._preflight.planning.choices import LOSSY, Choices, choices
from halfstep._preflight.planning.gradients import Gradients, gradients, relative_error
from halfstep._preflight.planning.memory_plan import MemoryPlan, PlanCandidate
from halfstep._preflight.planning.selection import Selection, select, selection
from halfstep._preflight.preflight_errors import DoesNotFitError, PreflightError
from halfstep._preflight.report.preflight_entry import PreflightEntry
from halfstep._preflight.steps import (
    Case,
    CompileOptions,
    Prepared,
    Step,
    compile_prepared,
    prepare,
)
from halfstep._preflight.target.targets import Target
from halfstep._program import Remat

MakeStep = Callable[[Policy], Step]
# A plan that uses this share of its budget is not improved further.
_ENOUGH = 0.985
# A candidate that takes more than this share of another's time is not called faster.
_FASTER = 0.99
# The search aims below the budget by this share of it: a peak above the budget is useless, while a
# peak slightly below the budget costs little.
_CAUTION = 0.003
_NOTHING = Selection({}, frozenset(), 0, 0, 0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """A request for a plan."""

    args: tuple[Any, ...]
    target: Target
    budget: int | float | str | None
    policy: Policy
    max_error: float | None
    batches: tuple[Sequence[Any], ...]
    compiles: int
    options: CompileOptions
    bar: Progress


def first_that_fits(makers: Mapping[str, MakeStep], request: PlanRequest, way: str) -> MemoryPlan:
    """Return the plan of the first maker that has one.

    Args:
        makers: Makers of steps, by name.
        request: The request.
        way: How matrix products are implemented, as in `preflight`'s `gemm`.

    Raises:
        DoesNotFitError: If no maker has a plan.
    """
    searches: list[_MakerSearch] = []
    for name, maker in makers.items():
        search = _MakerSearch(name, maker, request, way, used=sum(len(x.tried) for x in searches))
        searches.append(search)
        if search.can_fit():
            chosen, error = search.find()
            front = [found for one in searches for found in one.candidates()]
            # The candidates of this search are the last ones.
            number = len(front) - len(search.tried) + search.tried.index(chosen)
            return MemoryPlan(
                request.target.name,
                search.budget,
                front[number],
                tuple(front),
                error,
                search.next_bytes(chosen),
            )
    raise min(searches, key=lambda search: search.nearest.known_peak).refusal()


@dataclasses.dataclass(frozen=True, eq=False)
class _Compiled:
    """A policy, and what the compiler says about it."""

    policy: Policy
    entry: PreflightEntry
    selection: Selection
    """The values that it stores in addition to those of the given policy."""
    guess: float | None = None
    """The peak that was expected."""

    @property
    def peak(self) -> int | None:
        """The peak; `None` if the compiler gave up and did not say."""
        known = self.entry.peak_bytes
        return self.entry.peak.bytes if known is None and self.entry.peak is not None else known

    @property
    def known_peak(self) -> float:
        """The peak, infinite if it is not known."""
        return math.inf if self.peak is None else self.peak

    @property
    def stored(self) -> int:
        """The bytes that the model says it stores."""
        return self.selection.bytes

    @property
    def flops(self) -> int | None:
        """FLOPs of all contractions of the step."""
        counted = self.entry.contraction_flops()
        return None if counted is None else sum(counted.values())


class _MakerSearch:
    """The search for a plan with one maker of steps."""

    def __init__(self, name: str, maker: MakeStep, request: PlanRequest, way: str, *, used: int):
        self.name, self.maker, self.request, self.way = name, maker, request, way
        self.left = request.compiles - used
        self.tried: list[_Compiled] = []
        self.exact: dict[int, Gradients] = {}
        with self.observing() as plans:
            self.plain = self.compile(request.policy, _NOTHING)
        # Rules may store values that the user's own `jax.checkpoint` recomputes.
        self.is_recomputed = any(
            isinstance(owner.graph.nodes[index].structure, Remat)
            for plan in plans
            for owner, index in decided(plan)
        )
        self.least: _Compiled | None = None
        self.budget = parse_budget(request.budget, usable=self.plain.entry.usable_bytes)

    # Choices.

    @functools.cached_property
    def offered(self) -> Choices:
        """The choices that the program leaves open; `measured` adds the errors of low precision."""
        accelerator = self.request.target.accelerator
        is_lossy = self.request.max_error is not None
        base = self.request.policy
        # Nothing is stored here, so that every choice is left open.
        with self.observing() as plans:
            self.prepare(dataclasses.replace(base, stores=(*base.stores, EVERYTHING)))
        return choices(tape(plans, accelerator), accelerator, lossy=LOSSY if is_lossy else ())

    @functools.cached_property
    def measured(self) -> Choices:
        """The same choices, with the error that each low-precision form adds to the gradients."""
        offered = self.offered
        if self.request.max_error is None:
            return offered
        errors: dict[tuple[int, str], float] = {}
        # A family, such as one product of all layers, is measured at once: measuring each group by
        # itself would take as many times as long. The squared errors of single values add up.
        for family in offered.families:
            for code in LOSSY:
                having = [
                    number
                    for number in family.groups
                    if code in {form.name for form in offered.problem.groups[number]}
                ]
                if having:
                    error = self.error_on(0, self.all_kept(dict.fromkeys(having, code)))
                    errors |= {(number, code): error**2 / len(having) for number in having}
        return offered.with_errors(errors)

    @contextlib.contextmanager
    def observing(self) -> Generator[list[Plan]]:
        """Collect the plans of all calls of rewritten functions in a step that is traced here."""
        with collected_plans() as found:
            yield found
        if not found:
            raise PreflightError(
                "the step does not use the policy that make_step was given: no function in it is "
                "rewritten. Pass it to halfstep.autocast, or to one of the gradient functions."
            )

    # Compiling.

    def prepare(self, policy: Policy) -> Prepared:
        """Trace and lower a step."""
        request = self.request
        case = Case(self.name or "step", self.maker(policy), request.args)
        return prepare(case, [request.target], request.options)

    def compile(self, policy: Policy, found: Selection, guess: float | None = None) -> _Compiled:
        """Compile a step, unless it was compiled before."""
        known = next((one for one in self.tried if one.policy == policy), None)
        if known is not None:
            return known
        request = self.request
        entry = compile_prepared(
            self.prepare(policy), request.target, self.way, request.options, request.bar
        )
        made = _Compiled(policy, entry, found, guess)
        self.tried.append(made)
        return made

    def fits(self, made: _Compiled) -> bool:
        """Return whether a candidate is within the budget."""
        return made.known_peak <= self.budget

    # Searching.

    def can_fit(self) -> bool:
        """Return whether the policy fits as it is, or with as little stored as possible."""
        if self.fits(self.plain) and not self.is_recomputed:
            return True
        problem = self.offered.problem
        # If the solver has no answer, only the required groups are stored.
        required = {number: problem.groups[number][0] for number in problem.required}
        found = select(problem, smallest=True, error=0.0) or selection(problem, required)
        self.least = self.compile(self.offered.policy(self.request.policy, found), found)
        return self.fits(self.least) or self.fits(self.plain)

    @property
    def nearest(self) -> _Compiled:
        """The candidate with the smallest peak."""
        return min(self.tried, key=lambda made: made.known_peak)

    def find(self) -> tuple[_Compiled, float | None]:
        """Find the fastest candidate within the budget and the error bound, and its error."""
        if self.least is None or not self.fits(self.least):
            return self.plain, self.error_of(self.plain)
        limit = self.request.max_error
        # The sum of the squared errors of single forms is an estimate. So the selection is measured
        # as well, and the estimate is corrected by the result.
        allowed = math.inf if limit is None else limit**2
        while True:
            chosen = self.fastest(self.least, allowed)
            error = self.error_of(chosen)
            if limit is None or error is None or error <= limit or chosen is self.least:
                return chosen, error
            allowed = 0.8 * (limit / error) ** 2 * min(allowed, chosen.selection.error)

    def fastest(self, least: _Compiled, allowed: float) -> _Compiled:
        """Find the fastest candidate whose squared error is allowed, starting at the smallest."""
        problem = self.measured.problem
        low, high = least, None
        # Over several devices, each device holds its part of the values.
        slope = 1 / max(least.entry.devices, 1)
        while len(self.tried) < self.left:
            room = (1 - _CAUTION) * self.budget - low.known_peak
            memory = low.stored + max(room, 0) / slope
            if high is not None:
                memory = min(memory, high.stored - 1)
            found = select(problem, memory=memory, error=allowed)
            if found is None:
                break
            guess = low.known_peak + slope * (found.bytes - low.stored)
            count = len(self.tried)
            policy = self.measured.policy(self.request.policy, found)
            made = self.compile(policy, found, guess)
            if len(self.tried) == count:
                # No faster candidate takes as little memory.
                break
            if not self.fits(made):
                high = made
            elif made.known_peak >= _ENOUGH * self.budget:
                break
            else:
                low = made
            slope = _slope(low, least if high is None else high, slope)
        within = [one for one in self.tried if self.fits(one) and one.selection.error <= allowed]
        return min(within, key=lambda one: (self.seconds(one), one.known_peak))

    def next_bytes(self, chosen: _Compiled) -> int | None:
        """Return the expected peak of the smallest candidate that is faster, if there is one."""
        least, limit = self.least, self.request.max_error
        if least is None or chosen is self.plain:
            return None
        found = select(
            self.measured.problem,
            time=_FASTER * chosen.selection.seconds,
            error=math.inf if limit is None else limit**2,
            smallest=True,
        )
        if found is None:
            return None
        slope = _slope(least, chosen, 1 / max(least.entry.devices, 1))
        # If this candidate was compiled and found too large, its peak is known better than by the
        # line.
        tried = [x.known_peak for x in self.tried[1:] if x.stored == found.bytes]
        guess = chosen.known_peak + slope * (found.bytes - chosen.stored)
        return int(max([guess, *tried]))

    def seconds(self, made: _Compiled) -> float:
        """Return how much longer a candidate takes than without recomputing, by the model."""
        # The user's own `jax.checkpoint` recomputes about as much as the smallest candidate.
        is_slow = made is self.plain and self.is_recomputed and self.least is not None
        return (self.least if is_slow and self.least else made).selection.seconds

    # Errors.

    def all_kept(self, outcomes: Mapping[int, StoreOutcome]) -> Policy:
        """Return a policy that keeps everything in 16 bits except for some groups."""
        every: dict[int, StoreOutcome] = dict.fromkeys(range(len(self.offered.groups)), "keep")
        return self.offered.with_outcomes(self.request.policy, {**every, **outcomes})

    def error_on(self, number: int, policy: Policy) -> float:
        """Measure the error of a policy on a batch, compared with everything in 16 bits."""
        batch = self.request.batches[number]
        # The maker is called each time: JAX would not trace the same step again.
        if number not in self.exact:
            self.exact[number] = gradients(self.maker(self.all_kept({})), batch)
        return relative_error(gradients(self.maker(policy), batch), self.exact[number])

    def error_of(self, made: _Compiled) -> float | None:
        """Measure the largest error on a held-out batch; `None` if no batch is held out."""
        held_out = range(1, len(self.request.batches))
        if not held_out or made is self.plain:
            return 0.0 if held_out else None
        return max(self.error_on(number, made.policy) for number in held_out)

    # Answers.

    def candidates(self) -> list[PlanCandidate]:
        """Return all compiled candidates, as users see them."""
        base = self.flops_of_none
        return [
            PlanCandidate(
                choice=self.name,
                policy=one.policy,
                peak_bytes=one.peak,
                estimated_bytes=None if one.guess is None else int(one.guess),
                stored_bytes=one.stored,
                recomputed_flops=max((one.flops or base) - base, 0),
                offloaded_bytes=one.entry.host_bytes or 0,
                seconds=self.seconds(one),
                fits=self.fits(one),
                versions=one.entry.versions,
            )
            for one in self.tried
        ]

    @property
    def flops_of_none(self) -> int:
        """FLOPs of a step that recomputes no contraction."""
        counted = self.plain.flops
        least = self.least
        # If the step recomputes by itself, or the compiler gave up on it, the smallest candidate is
        # used: the FLOPs that it recomputes by the model are subtracted from those that the
        # compiler counts in it.
        is_none = counted is not None and (least is None or not self.is_recomputed)
        if is_none or least is None or least.flops is None:
            return counted or 0
        # The compiler counts the FLOPs of one device, and the model those of the whole program.
        return least.flops - int(least.selection.flops / max(least.entry.devices, 1))

    def refusal(self) -> DoesNotFitError:
        """Create an error that says what the nearest candidate takes, and what has to change."""
        nearest = self.nearest
        parts = sorted(nearest.entry.memory.items(), key=lambda item: -item[1])
        said = ", ".join(f"{size(amount)} {role}" for role, amount in parts if amount)
        name = f" ({self.name})" if self.name else ""
        return DoesNotFitError(
            f"no plan fits into {size(self.budget)} on {self.request.target.name}: with as little "
            f"stored as there can be{name}, the step takes {size(nearest.peak)}: {said}. "
            "Parameters and optimizer state are the same in every plan: donate them "
            "(donate_argnums=), offer a maker with an optimizer of fewer bytes "
            "(halfstep.optim.flash_adamw), use a smaller batch, or divide the step over more "
            "devices."
        )


def _slope(low: _Compiled, other: _Compiled, slope: float) -> float:
    """Compute how much the peak rises per stored byte, between two candidates.

    The result is at least a third of the previous slope. If the compiler finds room in gaps,
    storing would otherwise seem to cost nothing.
    """
    stored = other.stored - low.stored
    if not stored or math.isinf(other.known_peak):
        return slope
    return max((other.known_peak - low.known_peak) / stored, slope / 3)
