"""Why a kernel is not lifted for a call: codes with one meaning each, as explanations and reports name them."""

from __future__ import annotations

from enum import Enum

MODULES_CHANGED = "MODULES_CHANGED"  # what a worker says, of no call: functions that it has lifted may be others now
TRIAL_BEGUN = "TRIAL_BEGUN"  # likewise, of a function: it is at the oldest one of those that it was asked for


class LiftReason(str, Enum):
    """Value equals name, as of capabilities.reasons.Reason."""

    # the worker
    NO_CUPTI = "NO_CUPTI"  # not found, or taken by a profiler: nobody sees machine code
    NOT_CAPTURABLE = "NOT_CAPTURABLE"  # no graph can hold it
    CAPTURES_DIFFER = "CAPTURES_DIFFER"  # two captures of one call have other nodes
    NODE_UNSUPPORTED = "NODE_UNSUPPORTED"  # a node that only its own process can run: a host function, an allocation
    PARAMETERS_HIDDEN = "PARAMETERS_HIDDEN"  # the driver does not tell a kernel's parameters
    CODE_UNKNOWN = "CODE_UNKNOWN"  # no module that was seen has this kernel
    ADDRESS_UNKNOWN = "ADDRESS_UNKNOWN"  # a parameter points to what is no input, output or scratch
    NOT_DETERMINISTIC = "NOT_DETERMINISTIC"  # two runs on the same inputs differ
    TOO_LARGE = "TOO_LARGE"  # there is no room to try it
    TOO_SLOW = "TOO_SLOW"  # a function, tried beside others' calls, which wait meanwhile
    # the proof
    PROOF_FAULTED = "PROOF_FAULTED"  # the GPU or the driver stopped it
    PROOF_DIFFERS = "PROOF_DIFFERS"  # other bytes than the worker's
    PROOF_STRAYS = "PROOF_STRAYS"  # it wrote outside of its outputs and scratch, or to an input
    PROOF_LATE = "PROOF_LATE"  # it did not end
    PROOF_IMPOSSIBLE = "PROOF_IMPOSSIBLE"  # the broker's machine has no such GPU, or not the memory
    # the broker
    IMPORT_DAMAGED = "IMPORT_DAMAGED"  # files of an import are not those that were imported
    NOT_ALLOWED = "NOT_ALLOWED"  # policy: backend_isolation
    NOT_YET = "NOT_YET"  # it has served too few calls, or is not certified
    FAULTED = "FAULTED"  # a process that had launched it lost its GPU
    WORKER_FAILED = "WORKER_FAILED"  # the worker ended, or said what it may not
