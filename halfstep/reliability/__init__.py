"""Handle faults of long runs: processes that hang, bits that flip, machines that are preempted."""

from halfstep.reliability._preemption import Preemption as Preemption
from halfstep.reliability._replay import ReplayError as ReplayError, replay_check as replay_check
from halfstep.reliability._replicas import (
    ReplicaError as ReplicaError,
    replica_check as replica_check,
)
from halfstep.reliability._rest import (
    RestError as RestError,
    StateDigests as StateDigests,
    rest_check as rest_check,
)
from halfstep.reliability._watchdog import Watchdog as Watchdog
