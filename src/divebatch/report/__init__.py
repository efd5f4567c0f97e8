"""Records to tables, figures and a page. No torch in here; figures need the extra `report`."""

from divebatch.report.page import Report, write_report
from divebatch.report.runs import Experiment, Run, Runs, load_runs
from divebatch.report.table import Table, result_table

__all__ = ["load_runs", "write_report", "result_table", "Table", "Report", "Run", "Runs", "Experiment"]
