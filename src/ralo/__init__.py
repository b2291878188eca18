"""ralo runs language models on ordinary CPUs and makes them faster by not reading what does not matter."""

from ralo.errors import FormatError, RaloError
from ralo.lm import LM, Generation, load
from ralo.modes import KWTA, TT, Event, Proc, StatePack
from ralo.quality import Quality
from ralo.sampling import Sampling

__version__ = "0.2.0"
__all__ = [
    "KWTA",
    "LM",
    "TT",
    "Event",
    "FormatError",
    "Generation",
    "Proc",
    "Quality",
    "RaloError",
    "Sampling",
    "StatePack",
    "__version__",
    "load",
]
