"""ralo runs language models on ordinary CPUs and makes them faster by not reading what does not matter."""

from ralo.errors import FormatError, RaloError
from ralo.lm import LM, Generation, load
from ralo.modes import KWTA, TT, Event, Mix, Proc, StatePack
from ralo.quality import Quality
from ralo.sampling import Sampling
from ralo.version import __version__

__all__ = [
    "KWTA",
    "LM",
    "TT",
    "Event",
    "FormatError",
    "Generation",
    "Mix",
    "Proc",
    "Quality",
    "RaloError",
    "Sampling",
    "StatePack",
    "__version__",
    "load",
]
