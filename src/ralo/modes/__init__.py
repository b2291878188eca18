"""Ways to read less, one file each behind one protocol (`base.Mode`)."""

from ralo.modes.base import Mode
from ralo.modes.event import Event
from ralo.modes.kwta import KWTA
from ralo.modes.mix import Mix
from ralo.modes.proc import Proc
from ralo.modes.statepack import StatePack
from ralo.modes.tt import TT

MODES: dict[str, type[Mode]] = {mode.name: mode for mode in (Proc, TT, Mix, StatePack, KWTA, Event)}

__all__ = ["KWTA", "MODES", "TT", "Event", "Mix", "Mode", "Proc", "StatePack"]
