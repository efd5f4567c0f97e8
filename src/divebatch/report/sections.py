"""One experiment's part of a report, before it takes the form of a page."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from divebatch.report.analysis import analyse
from divebatch.report.charts import Chart, TargetBars, Track, make_bars, make_charts, make_tracks
from divebatch.report.detail_tables import memory_table, settings_tables, summary_line
from divebatch.report.drawing import Drawing, draw_bars, draw_chart
from divebatch.report.gain_words import gains_in_words, gains_table
from divebatch.report.gains import find_gains
from divebatch.report.paper_figures import draw_paper_figures
from divebatch.report.runs import RecordedExperiment
from divebatch.report.tables import Table, cost_table, result_table
from divebatch.report.words import details, headline


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Everything a page says about an experiment, as plain text and pictures."""

    experiment: RecordedExperiment
    summary: str
    stem: str
    """Safe in file names and links, different for each section of a report."""
    answer: str
    """One sentence."""
    gains: str
    """What changing the batch size gained over fixed batches; empty where there is nothing to compare."""
    details: str
    """What stands behind the answer, in a few sentences; empty where there is nothing to compare."""
    tables: Sequence[Table]
    num_first: int
    """So many of the tables stand before the figures of a page."""
    drawings: Sequence[Drawing]
    """The paper's figures."""
    tracks: Sequence[Track]
    charts: Sequence[Chart]
    bars: Mapping[str, TargetBars]
    chart_drawings: Sequence[Drawing]
    """The charts, and the bars where there are any, as files."""
    settings: Sequence[Table]

    @property
    def name(self) -> str:
        return self.experiment.name

    def file_name(self, part: str, suffix: str) -> str:
        """For instance `synthetic-convex-figure1.svg`; parts have no dash, so no two sections' files meet."""
        return f"{self.stem}-{part}.{suffix}"

    def figure_links(self, part: str, *, csv: bool = False) -> dict[str, str]:
        """Format -> path of a figure's file, relative to the page."""
        kinds = ("SVG", "PNG", "CSV") if csv else ("SVG", "PNG")
        return {kind: f"figures/{self.file_name(part, kind.lower())}" for kind in kinds}

    def table_links(self, place: int) -> dict[str, str]:
        """Format -> path of a table's file; tables count from 1, the settings after the others."""
        suffixes = {"CSV": "csv", "LaTeX": "tex", "Markdown": "md"}
        return {kind: f"tables/{self.file_name(f'table{place}', suffix)}" for kind, suffix in suffixes.items()}


def make_sections(experiments: Sequence[RecordedExperiment]) -> list[Section]:
    """One section an experiment, in order."""
    stems = file_stems([experiment.name for experiment in experiments])
    return [make_section(experiment, stem) for experiment, stem in zip(experiments, stems, strict=True)]


def make_section(experiment: RecordedExperiment, stem: str) -> Section:
    """All of it, drawings included; `stem` begins the names of its files."""
    analysis = analyse(experiment)
    tracks, bars = make_tracks(analysis), make_bars(analysis)
    charts = make_charts(tracks)
    drawn = [draw_chart(chart, experiment.name) for chart in charts]
    gains = find_gains(analysis)
    first = [result_table(analysis), gains_table(analysis, gains)]
    first_tables = [table for table in first if table is not None]
    further = [cost_table(analysis), memory_table(experiment)]
    return Section(
        experiment=experiment,
        summary=summary_line(experiment),
        stem=stem,
        answer=headline(analysis),
        gains=gains_in_words(analysis, gains),
        details=details(analysis),
        tables=[*first_tables, *(table for table in further if table is not None)],
        num_first=len(first_tables),
        drawings=draw_paper_figures(analysis, tracks),
        tracks=tracks,
        charts=charts,
        bars=bars,
        chart_drawings=[*drawn, *(draw_bars(first, experiment.name) for first in list(bars.values())[:1])],
        settings=settings_tables(experiment),
    )


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
