"""One experiment's part of a report, before it takes the form of a page."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from divebatch.report.answer import answer
from divebatch.report.bars import Bars, make_bars
from divebatch.report.chart_drawings import draw_bars, draw_chart
from divebatch.report.charts import Chart, Track, make_charts, make_tracks
from divebatch.report.cost import cost_table
from divebatch.report.drawing import Drawing
from divebatch.report.figures import draw_figures
from divebatch.report.memory import memory_table
from divebatch.report.runs import Experiment
from divebatch.report.settings import settings_tables, summary_line
from divebatch.report.shadows import make_shadow_charts
from divebatch.report.stages import stage_table
from divebatch.report.table import Table, result_table
from divebatch.report.verdict import verdict

PAPER_FIGURES = {"accuracy": "figure3", "loss": "figure4", "batchsize": "course", "lr": "course"}
"""Charts that figures of the paper show as well, on real data: these need no file of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Everything a page says about an experiment, as plain text and pictures."""

    experiment: Experiment
    summary: str
    stem: str
    """Safe in file names and links, different for each section of a report."""
    answer: str
    """One sentence."""
    verdict: str
    """What the tables come to, in a few sentences; empty where they have nothing to compare."""
    tables: Sequence[Table]
    drawings: Sequence[Drawing]
    """The paper's figures."""
    tracks: Sequence[Track]
    charts: Sequence[Chart]
    bars: Mapping[str, Bars]
    chart_drawings: Sequence[Drawing]
    """As files: the charts that none of the paper's figures shows, and the bars where there are any."""
    settings: Sequence[Table]

    @property
    def name(self) -> str:
        """The experiment's."""
        return self.experiment.name

    def file_name(self, part: str, suffix: str) -> str:
        """For instance `synthetic-convex-figure1.svg`; parts have no dash, so no two sections' files meet."""
        return f"{self.stem}-{part}.{suffix}"

    def figure_links(self, part: str, *, csv: bool = False) -> dict[str, str]:
        """Format -> path of a figure's file, relative to the page."""
        names = {"SVG": self._picture(part), "PNG": self._picture(part)} | ({"CSV": part} if csv else {})
        return {kind: f"figures/{self.file_name(name, kind.lower())}" for kind, name in names.items()}

    def _picture(self, part: str) -> str:
        drawn = {drawing.name for drawing in (*self.drawings, *self.chart_drawings)}
        return part if part in drawn else PAPER_FIGURES[part]

    def table_links(self, place: int) -> dict[str, str]:
        """Format -> path of a table's file; tables count from 1, the settings after the others."""
        suffixes = {"CSV": "csv", "LaTeX": "tex", "Markdown": "md"}
        return {kind: f"tables/{self.file_name(f'table{place}', suffix)}" for kind, suffix in suffixes.items()}


def make_sections(experiments: Sequence[Experiment]) -> list[Section]:
    """One section an experiment, in order."""
    stems = file_stems([experiment.name for experiment in experiments])
    return [make_section(experiment, stem) for experiment, stem in zip(experiments, stems, strict=True)]


def make_section(experiment: Experiment, stem: str) -> Section:
    """All of it, drawings included; `stem` begins the names of its files."""
    tracks, bars, drawings = make_tracks(experiment), make_bars(experiment), draw_figures(experiment)
    charts = make_charts(experiment) + make_shadow_charts(tracks)
    shown = {drawing.name for drawing in drawings}
    missing = [chart for chart in charts if PAPER_FIGURES.get(chart.name) not in shown]
    return Section(
        experiment=experiment,
        summary=summary_line(experiment),
        stem=stem,
        answer=answer(experiment, bars),
        verdict=_verdict(experiment),
        tables=result_tables(experiment),
        drawings=drawings,
        tracks=tracks,
        charts=charts,
        bars=bars,
        chart_drawings=_draw_all(missing, bars, experiment.name),
        settings=settings_tables(experiment),
    )


def _draw_all(charts: Sequence[Chart], bars: Mapping[str, Bars], heading: str) -> list[Drawing]:
    drawings = [draw_chart(chart, heading) for chart in charts]
    return drawings + [draw_bars(first, heading) for first in list(bars.values())[:1]]


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
