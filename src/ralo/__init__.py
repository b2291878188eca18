"""ralo runs language models on ordinary CPUs and makes them faster by not reading what does not matter."""

__version__ = "0.1.0"
