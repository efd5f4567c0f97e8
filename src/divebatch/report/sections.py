"""One experiment's part of a report, before it takes the form of a page."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from divebatch.report.cost import cost_table
from divebatch.report.drawing import Drawing
from divebatch.report.figures import draw_figures
from divebatch.report.memory import memory_table
from divebatch.report.runs import Experiment
from divebatch.report.settings import settings_tables, summary_line
from divebatch.report.stages import stage_table
from divebatch.report.table import Table, result_table
from divebatch.report.verdict import verdict


@dataclass(frozen=True, slots=True)
class Section:
    """Everything a page says about an experiment, as plain text and pictures."""

    name: str
    summary: str
    stem: str
    """Safe in file names and links, different for each section of a report."""
    verdict: str
    """What the tables come to, in a few sentences; empty where they have nothing to compare."""
    tables: Sequence[Table]
    drawings: Sequence[Drawing]
    settings: Sequence[Table]

    def figure_name(self, drawing: Drawing, suffix: str) -> str:
        """A file name like `synthetic-convex-figure1.svg`."""
        return f"{self.stem}-{drawing.name}.{suffix}"


def make_sections(experiments: Sequence[Experiment]) -> list[Section]:
    """One section an experiment, in order."""
    stems = file_stems([experiment.name for experiment in experiments])
    return [
        Section(e.name, summary_line(e), stem, _verdict(e), result_tables(e), draw_figures(e), settings_tables(e))
        for e, stem in zip(experiments, stems, strict=True)
    ]


def result_tables(experiment: Experiment) -> list[Table]:
    """The paper's tables on real data, with the cost; else one table of what each method reached."""
    if not experiment.is_on_real_data:
        return [result_table(experiment)]
    tables = [stage_table(experiment), cost_table(experiment), memory_table(experiment)]
    return [table for table in tables if table is not None]


def _verdict(experiment: Experiment) -> str:
    return verdict(experiment) if experiment.is_on_real_data else ""


def file_stems(names: Sequence[str]) -> list[str]:
    """Names reduced to letters, digits and dashes, numbered where they would meet.

    >>> file_stems(["cifar10", "../x", "--x"])
    ['cifar10', 'x', 'x-2']
    """
    stems: list[str] = []
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:80] or "experiment"
        number = 2
        unique = stem
        while unique.lower() in {taken.lower() for taken in stems}:
            unique, number = f"{stem}-{number}", number + 1
        stems.append(unique)
    return stems
