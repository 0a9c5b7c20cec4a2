"""The choices that a program leaves: what may be stored in which form, as a problem to solve."""

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from halfstep._autocast import stored_bytes
from halfstep._policy import Policy, StoreOutcome, StoreRule
from halfstep._preflight.planning.addresses import Addresses, Family, Group
from halfstep._preflight.planning.candidates import Place, Tape
from halfstep._preflight.planning.selection import Form, Problem, Recomputation, Selection
from halfstep._preflight.target.accelerators import Accelerator

LOSSY: tuple[StoreOutcome, ...] = ("e4m3", "int4")
# What encoding and decoding a value reads and writes, for each byte that it has in 16 bits: it is
# read once, and its code of half a byte or less is written and read again.
_CODING = 1.5
# Bytes a second between a device and its host, where nothing else is known: PCI Express 4.0 with
# 16 lanes in one direction. An error here shifts when a value is offloaded and not recomputed.
_HOST_BANDWIDTH = 32e9


@dataclasses.dataclass(frozen=True)
class Choices:
    """What may be stored, and how.

    Attributes:
        groups: What rules tell apart.
        families: Groups whose rules differ in their numbers only.
        problem: The same as a problem to solve; its groups have the same order.
        tape: The operations.
    """

    groups: tuple[Group, ...]
    families: tuple[Family, ...]
    problem: Problem
    tape: Tape

    def policy(self, base: Policy, chosen: Selection) -> Policy:
        """A policy that stores what was selected."""
        outcomes: dict[int, StoreOutcome] = dict.fromkeys(range(len(self.groups)), "recompute")
        for number, form in chosen.stored.items():
            outcomes[number] = form.name
        return self.with_outcomes(base, outcomes)

    def with_outcomes(self, base: Policy, outcomes: Mapping[int, StoreOutcome]) -> Policy:
        """A policy with an outcome for each of some groups."""
        rules: list[StoreRule] = []
        for family in self.families:
            given: dict[int, StoreOutcome] = {
                number: outcomes[number] for number in family.groups if number in outcomes
            }
            # One rule for all layers, where all of them have the same outcome. What is in no group
            # is recomputed in any case.
            is_alike = len(given) == len(family.groups) and len(set(given.values())) == 1
            outcome = next(iter(given.values()), None)
            if is_alike and outcome is not None and (family.is_whole or outcome == "recompute"):
                rules.append(dataclasses.replace(family.rule, outcome=outcome))
            else:
                rules += [self.groups[number].with_outcome(x) for number, x in given.items()]
        return dataclasses.replace(base, stores=(*base.stores, *rules))

    def with_errors(self, errors: Mapping[tuple[int, str], float]) -> "Choices":
        """The same, where each form of a group adds a squared error that was measured."""
        made = tuple(
            tuple(
                dataclasses.replace(form, error=errors.get((number, form.name), form.error))
                for form in forms
            )
            for number, forms in enumerate(self.problem.groups)
        )
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, groups=made))


def choices(tape: Tape, accelerator: Accelerator, *, lossy: Collection[str] = ()) -> Choices:
    """What a program leaves to choose.

    Args:
        tape: Its operations.
        accelerator: Says how long reading and writing takes.
        lossy: The forms of few bits that may be used.
    """
    addresses = Addresses(tape.places)
    groups = addresses.groups
    numbers: dict[tuple[int, int], int] = {}
    group_of: list[int | None] = []
    owner = {place: number for number, group in enumerate(groups) for place in group.places}
    for position in range(len(tape.places)):
        for key in tape.makes(position):
            numbers[key] = len(group_of)
            group_of.append(owner.get(position))
    operations = tuple(
        Recomputation(
            tuple(numbers[key] for key in takes),
            tuple(numbers[key] for key in tape.makes(position)),
            place.seconds,
            place.flops,
        )
        for position, (place, takes) in enumerate(zip(tape.places, tape.takes, strict=True))
    )
    forms = tuple(_forms([tape.places[x] for x in g.places], accelerator, lossy) for g in groups)
    required = frozenset(
        number
        for number, group in enumerate(groups)
        if any(tape.places[place].is_anchor for place in group.places)
    )
    needed = frozenset(numbers[key] for key in tape.needed)
    problem = Problem(operations, forms, tuple(group_of), needed, required)
    return Choices(groups, addresses.families, problem, tape)


def _forms(
    places: list[Place], accelerator: Accelerator, lossy: Collection[str]
) -> tuple[Form, ...]:
    kept = sum(place.bytes for place in places)
    # A contraction writes its result in any case. What XLA would fuse with its readers is written
    # and read again only because it is stored.
    fused = sum(place.bytes for place in places if not place.is_dear)
    made = [Form("keep", kept, seconds=2 * fused / accelerator.bandwidth)]
    if any(place.is_anchor for place in places):
        # All that comes after it is recomputed from it.
        return tuple(made)
    for code in LOSSY:
        if code not in lossy:
            continue
        held = sum(
            place.times * stored_bytes(place.aval(number), code, compute=_compute(place))
            for place in places
            for number in place.node.outs
        )
        # Small values have no code, and short rows none of 4 bits.
        if held < made[-1].bytes:
            made.append(Form(code, held, seconds=_CODING * kept / accelerator.bandwidth))
    made.append(Form("offload", 0, 2 * kept / _HOST_BANDWIDTH, host_bytes=kept))
    return tuple(made)


def _compute(place: Place) -> np.dtype:
    return place.plan.settings.compute
