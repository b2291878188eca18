"""The one place that says which ralo this is."""

__version__ = "0.2.0"
