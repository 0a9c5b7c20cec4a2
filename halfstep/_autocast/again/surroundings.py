"""Say where a plan runs, which determines what XLA sees next to it."""

import enum

from halfstep._program import Remat, Scan, While


class Surroundings(enum.Enum):
    """Where a plan runs, which determines what XLA sees next to it."""

    WHOLE = "the whole function"
    LOOP = "in the body of a loop, whose backward pass is another loop"
    WITHIN = "in anything else: the backward pass follows, and something may lie between"
    LAST = "in a function that the user recomputes, and after which no contraction comes"

    @property
    def is_last(self) -> bool:
        """Whether no contraction comes after it."""
        return self in (Surroundings.WHOLE, Surroundings.LAST)

    def within(self, name: str, *, is_last: bool) -> "Surroundings":
        """Return the surroundings of the functions inside an operation.

        Args:
            name: The primitive.
            is_last: Whether no contraction comes after the operation in these surroundings.
        """
        if name in (*Scan.names, *While.names):
            return Surroundings.LOOP
        if name in Remat.names and self.is_last and is_last:
            return Surroundings.LAST
        # Both passes of a function that the user recomputes are in the body of one loop.
        is_loop = self is Surroundings.LOOP and name not in Remat.names
        return Surroundings.LOOP if is_loop else Surroundings.WITHIN
