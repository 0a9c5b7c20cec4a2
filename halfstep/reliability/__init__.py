"""Faults of long runs: processes that hang, replicas that differ, machines that are taken away."""

from halfstep.reliability._preemption import Preemption as Preemption
from halfstep.reliability._replicas import (
    ReplicaError as ReplicaError,
    replica_check as replica_check,
)
from halfstep.reliability._watchdog import Watchdog as Watchdog
