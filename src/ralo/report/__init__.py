"""A page of what a tuning or an acceptance run found: one file that needs no other."""

from ralo.report.data import Cell, Point, Report
from ralo.report.page import check, write

__all__ = ["Cell", "Point", "Report", "check", "write"]
