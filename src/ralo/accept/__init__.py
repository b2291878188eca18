"""Acceptance: what each mode promises, measured line by line. One file per mode."""

from ralo.accept.event import accept as accept_event
from ralo.accept.kwta import accept as accept_kwta
from ralo.accept.mix import accept as accept_mix
from ralo.accept.proc import accept as accept_proc
from ralo.accept.rows import Acceptance, Row, Task
from ralo.accept.statepack import accept as accept_statepack
from ralo.accept.tt import accept as accept_tt

ACCEPT: dict[str, Acceptance] = {
    "state-pack": accept_statepack,
    "kwta": accept_kwta,
    "event": accept_event,
    "proc": accept_proc,
    "tt": accept_tt,
    "mix": accept_mix,
}

__all__ = ["ACCEPT", "Row", "Task"]
