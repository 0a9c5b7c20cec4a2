"""Which share of a step's elements the compute dtype cannot hold."""

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from halfstep._program import Finder, Frame
from halfstep.debug._instrument.site import Site
from halfstep.debug._instrument.stats import Column

# What `Sites.shares` needs of a row, in this order.
COLUMNS = (Column.ABSMAX, Column.BAD, Column.BELOW, Column.ABOVE)


class Worst(NamedTuple):
    """The site that loses most, and which share of its elements that is."""

    share: float
    site: Site


class Shares(NamedTuple):
    """The shares of one step.

    Attributes:
        underflow: Of the elements that are below the smallest normal number, and not zero.
        overflow: Of those that are above the largest, or not finite.
        most_underflow: Where most are below.
        most_overflow: Where most are above.
    """

    underflow: float
    overflow: float
    most_underflow: Worst
    most_overflow: Worst


class Sites:
    """The sites of a log, and how much each of them counts."""

    def __init__(self, sites: Sequence[Site]):
        self.sites = sites
        self._sizes = _sizes(sites)
        self._named = _is_named(sites)

    def shares(self, rows: np.ndarray) -> Shares | None:
        """What the rows of a step say, or `None` if nothing was computed."""
        absmax, bad, below, above = rows.T
        sizes = np.where(absmax == -1, 0.0, self._sizes)
        if not sizes.any():
            return None
        lost = np.minimum(1, above + bad / np.maximum(sizes, 1))
        total = sizes.sum()
        worst = [self._worst(np.where(sizes > 0, share, -1.0)) for share in (below, lost)]
        return Shares(float(below @ sizes / total), float(lost @ sizes / total), *worst)

    def _worst(self, share: np.ndarray) -> Worst:
        own = np.where(self._named, share, -1.0)
        at = int(np.argmax(own if own.max() > 0 else share))
        return Worst(float(share[at]), self.sites[at])


def _sizes(sites: Sequence[Site]) -> np.ndarray:
    """How many elements of each site count.

    What comes after the gradients does not: the update is computed in the dtype of the parameters.
    Where anything has 16 bits or fewer, neither does what has more, for it loses nothing.
    """
    sizes = np.asarray([math.prod(site.type.shape) for site in sites], float)
    sizes[[site.stage == "update" for site in sites]] = 0
    is_wide = np.asarray([site.type.bytes for site in sites]) > 2 * sizes
    return sizes if is_wide.all() else np.where(is_wide, 0.0, sizes)


def _is_named(sites: Sequence[Site]) -> np.ndarray:
    """Which sites are a line of the user's: a cast that a library has put in says nothing."""
    finder, elsewhere = Finder(), Frame("elsewhere", 0, "")

    def is_own(site: Site) -> bool:
        source = site.source
        frame = Frame(os.path.abspath(source.file), source.line, source.function)
        return bool(source.file) and finder.choose([frame, elsewhere]).file != elsewhere.file

    return np.asarray([bool(site.path) or is_own(site) for site in sites], bool)
