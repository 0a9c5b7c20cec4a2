"""Turn a program's choices, which values to store in which form, into a problem to solve."""

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from halfstep._autocast import stored_bytes
from halfstep._policy import Policy, StoreOutcome, StoreRule
from halfstep._preflight.planning.addresses import Addresses, Family, Group
from halfstep._preflight.planning.candidates import EVERYTHING, Place, Tape
from halfstep._preflight.planning.selection import Form, Problem, Recomputation, Selection
from halfstep._preflight.target.accelerators import Accelerator

LOSSY: tuple[StoreOutcome, ...] = ("e4m3", "int4")
# Bytes that encoding and decoding a value read and write, per byte of the value in 16 bits: the
# value is read once, and its code is written and read again. This is the figure for `int4`, whose
# code has a quarter of the bytes; `e4m3`, whose code has half of them, takes 2 and is charged the
# same.
_CODING = 1.5
# Bytes per second between a device and its host, where nothing else is known: PCI Express 4.0 with
# 16 lanes in one direction. An error here shifts when a value is offloaded instead of recomputed.
_HOST_BANDWIDTH = 32e9


@dataclasses.dataclass(frozen=True)
class Choices:
    """The values that may be stored, and how.

    Attributes:
        groups: Operations, as finely as rules can tell them apart.
        families: Groups whose rules differ only in their numbers.
        problem: The same choices as a problem to solve; its groups have the same order.
        tape: The operations.
    """

    groups: tuple[Group, ...]
    families: tuple[Family, ...]
    problem: Problem
    tape: Tape

    def policy(self, base: Policy, chosen: Selection) -> Policy:
        """Return a policy that stores the selected values."""
        outcomes: dict[int, StoreOutcome] = dict.fromkeys(range(len(self.groups)), "recompute")
        for number, form in chosen.stored.items():
            outcomes[number] = form.name
        return self.with_outcomes(base, outcomes)

    def with_outcomes(self, base: Policy, outcomes: Mapping[int, StoreOutcome]) -> Policy:
        """Return a policy with an outcome for each of some groups."""
        rules: list[StoreRule] = []
        for family in self.families:
            given: dict[int, StoreOutcome] = {
                number: outcomes[number] for number in family.groups if number in outcomes
            }
            # Write one rule for all layers if all of them have the same outcome.
            is_alike = len(given) == len(family.groups) and len(set(given.values())) == 1
            outcome = next(iter(given.values()), None)
            if is_alike and outcome is not None and (family.is_whole or outcome == "recompute"):
                rules.append(dataclasses.replace(family.rule, outcome=outcome))
            else:
                rules += [self.groups[number].with_outcome(x) for number, x in given.items()]
        # Without the last rule, some values that are in no group would be stored by default.
        return dataclasses.replace(base, stores=(*base.stores, *rules, EVERYTHING))

    def with_errors(self, errors: Mapping[tuple[int, str], float]) -> "Choices":
        """Return the same choices with the measured squared error that each form adds."""
        made = tuple(
            tuple(
                dataclasses.replace(form, error=errors.get((number, form.name), form.error))
                for form in forms
            )
            for number, forms in enumerate(self.problem.groups)
        )
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, groups=made))


def choices(tape: Tape, accelerator: Accelerator, *, lossy: Collection[str] = ()) -> Choices:
    """Collect the choices that a program leaves open.

    Args:
        tape: The operations of the program.
        accelerator: The accelerator, which decides how long reading and writing takes.
        lossy: The low-precision forms that may be used.
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
    # A contraction writes its result in any case. A value that XLA would fuse with its readers is
    # written and read again only because it is stored.
    fused = sum(place.bytes for place in places if not place.is_dear)
    made = [Form("keep", kept, seconds=2 * fused / accelerator.bandwidth)]
    if any(place.is_anchor for place in places):
        # Everything after an anchor is recomputed from it.
        return tuple(made)
    for code in LOSSY:
        if code not in lossy:
            continue
        held = sum(
            place.times * stored_bytes(place.aval(number), code, compute=_compute(place))
            for place in places
            for number in place.node.outs
        )
        # Small values have no code, and short rows have no 4-bit code.
        if held < made[-1].bytes:
            made.append(Form(code, held, seconds=_CODING * kept / accelerator.bandwidth))
    made.append(Form("offload", 0, 2 * kept / _HOST_BANDWIDTH, host_bytes=kept))
    return tuple(made)


def _compute(place: Place) -> np.dtype:
    return place.plan.settings.compute
