"""Turn records into tables, figures and a page, without torch; figures need the extra `report`."""

from divebatch.report.analysis import Analysis, analyse
from divebatch.report.load import RecordedExperiment, RecordedRun, Runs, load_runs
from divebatch.report.page import Report, write_report
from divebatch.report.tables import Table

__all__ = [
    "load_runs",
    "analyse",
    "write_report",
    "RecordedRun",
    "RecordedExperiment",
    "Runs",
    "Analysis",
    "Table",
    "Report",
]
