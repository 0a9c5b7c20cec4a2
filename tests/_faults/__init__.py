"""Training steps that go wrong: each with the line and the pass where it begins.

A line is marked by a comment, `# fault: NAME`.
"""

from tests._faults._fault import Fault as Fault
from tests._faults._frameworks import FRAMEWORKS
from tests._faults._plain import PLAIN
from tests._faults._structure import STRUCTURE

FAULTS: tuple[Fault, ...] = (*PLAIN, *STRUCTURE, *FRAMEWORKS)
