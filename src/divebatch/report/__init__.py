"""Records to tables, figures and a page. No torch in here; figures need the extra `report`."""

from divebatch.report.analysis import Analysis, analyse
from divebatch.report.page import Report, write_report
from divebatch.report.runs import RecordedExperiment, RecordedRun, Runs, load_runs
from divebatch.report.tables import Table, result_table

__all__ = [
    "load_runs",
    "analyse",
    "result_table",
    "write_report",
    "RecordedRun",
    "RecordedExperiment",
    "Runs",
    "Analysis",
    "Table",
    "Report",
]
