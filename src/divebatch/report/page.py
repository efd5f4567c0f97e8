"""Write a report: a self-contained HTML page, report.md, and all figures and tables as files."""

import base64
import hashlib
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from divebatch.errors import RecordError
from divebatch.report.analysis import Analysis, Floats, analyse
from divebatch.report.compare import FEWEST_SEEDS, best_fixed, find_gains, verdict
from divebatch.report.drawing import (
    AXES,
    CHART_SIZE,
    Drawing,
    Line,
    Look,
    Panel,
    TargetBars,
    Track,
    draw_bars,
    draw_panels,
    looks_for,
    require_matplotlib,
)
from divebatch.report.figures import BARS_NOTE, draw_paper_figures, make_bars, make_charts, make_tracks
from divebatch.report.load import RecordedExperiment, load_runs
from divebatch.report.tables import (
    Table,
    about,
    cost_table,
    csv_text,
    escape_markdown,
    gains_table,
    memory_table,
    result_table,
    settings_json,
    size_in_words,
    summary_table,
)

SCRIPTS = ("uPlot.iife.min.js", "page.js")
AT_ONCE = 3
"""Number of charts that the page shows unfolded."""
MOST_ROWS = 14
"""Most methods of an experiment that a terminal shows."""
WIDTH = 80
"""Width of a verdict's lines, in characters."""
DIGITS = 5
"""Significant digits of the numbers that the page's script draws, more than a screen can show."""
FEW_SEEDS_NOTE = "Fewer than three seeds show little, and have no intervals: run five or so."


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The part of a report on one experiment, before rendering."""

    experiment: RecordedExperiment
    stem: str
    """A name for files and links, unique in the report."""
    heading: str
    about: str
    verdict: str
    summary: Table
    shown: Sequence[str]
    """Methods that a terminal shows."""
    tables: Sequence[Table]
    """All tables except the summary."""
    settings: str
    """Settings as JSON text."""
    looks: Mapping[str, Look]
    tracks: Sequence[Track]
    charts: Sequence[Panel]
    bars: Mapping[str, TargetBars]
    chart_drawings: Sequence[Drawing]
    """Drawings of the charts, and of the bars if there are any."""
    paper_drawings: Sequence[Drawing]

    def figure(self, part: str, suffix: str) -> str:
        """Return a figure's path relative to the page; parts have no dash, so paths of sections differ."""
        return f"figures/{self.stem}-{part}.{suffix}"

    def table(self, part: str, suffix: str = "csv") -> str:
        return f"tables/{self.stem}-{part}.{suffix}"

    @property
    def axes(self) -> list[str]:
        """Return the horizontal axes that any run recorded."""
        return [axis for axis in AXES if any(axis in track.axes for track in self.tracks)]

    def place(self, method: str) -> int | None:
        """Return the index of a method's track; None: the method has not begun."""
        return next((place for place, track in enumerate(self.tracks) if track.method == method), None)

    def text(self) -> list[str]:
        """Return the lines for a terminal: heading, a row for each method, verdict."""
        rows = [row for row in self.summary.rows if row[0] in self.shown]
        more = len(self.summary.rows) - len(rows)
        table = replace(self.summary, rows=rows).to_text()
        rest = [f"and {more} more on the page"] if more else []
        verdict = textwrap.wrap(self.verdict, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
        return [self.heading, *(f"  {line}" for line in (*table, *rest, *verdict))]


@dataclass(frozen=True, slots=True)
class Report:
    """A report on disk.

    Args:
        html: The page to open.
        paths: All files written, the page first.
        sections: A section for each experiment.
        problems: The record files that were left out, with reasons.
    """

    html: Path
    paths: tuple[Path, ...]
    sections: tuple[Section, ...]
    problems: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the report's text for a terminal."""
        lines = [line for section in self.sections for line in section.text()]
        counts = [len(runs) for section in self.sections for runs in section.experiment.methods.values()]
        return "\n".join([*lines, *([FEW_SEEDS_NOTE] if max(counts) < FEWEST_SEEDS else [])])


def write_report(folder: Path, *more: Path, out: Path | None = None) -> Report:
    """Write report.html, report.md, figures/ and tables/.

    Args:
        folder: A folder with runs, as `load_runs` takes it.
        more: Further folders of the same kind.
        out: The folder to write to. None: the first folder.

    Equal records give equal files. Raises `RecordError` if there is no run to report or the files cannot be written,
    and `MissingExtraError` if matplotlib is missing.
    """
    require_matplotlib()
    runs = load_runs(folder, *more)
    sections = make_sections(runs.experiments)
    texts = {"report.html": render_page(sections, runs.problems), "report.md": render_markdown(sections, runs.problems)}
    # JSON can contain lone surrogates, which UTF-8 cannot.
    contents = {name: text.encode("utf-8", "replace") for name, text in texts.items()}
    for section in sections:
        contents |= _files_of(section)
    target = out or folder
    _write(target, contents)
    return Report(target / "report.html", tuple(target / name for name in contents), tuple(sections), runs.problems)


def make_sections(experiments: Sequence[RecordedExperiment]) -> list[Section]:
    """Return a section for each experiment, in order."""
    looks = looks_for(*(list(experiment.methods) for experiment in experiments))
    stems = file_stems([experiment.name for experiment in experiments])
    return [_section(experiment, stem, looks) for experiment, stem in zip(experiments, stems, strict=True)]


def _section(experiment: RecordedExperiment, stem: str, looks: Mapping[str, Look]) -> Section:
    name, analysis = experiment.name, analyse(experiment)
    gains, best = find_gains(analysis), best_fixed(analysis)
    tracks, bars = make_tracks(analysis, looks), make_bars(analysis, looks)
    charts = make_charts(analysis, tracks)
    tables = [result_table(analysis), gains_table(analysis, gains), cost_table(analysis), memory_table(analysis)]
    first = [best.method if best else None, *(gain.result.method for gain in gains[:1]), experiment.settings.customary]
    drawings = [draw_panels(each.name, each.title, name, [each], each.caption, CHART_SIZE) for each in charts]
    drawings += [draw_bars(each, name, BARS_NOTE) for each in list(bars.values())[:1]]  # only the first unit
    return Section(
        experiment=experiment,
        stem=stem,
        heading=f"{name}, {size_in_words(experiment)}",
        about=about(experiment),
        verdict=verdict(analysis, gains),
        summary=summary_table(analysis, gains),
        shown=_most_interesting(analysis, first),
        tables=[table for table in tables if table is not None],
        settings=settings_json(experiment),
        looks=looks,
        tracks=tracks,
        charts=charts,
        bars=bars,
        chart_drawings=drawings,
        paper_drawings=draw_paper_figures(analysis, tracks),
    )


def _most_interesting(analysis: Analysis, first: Sequence[str | None]) -> list[str]:
    """Return the methods to show if there is no room for all: first the required ones, then the best ones."""
    sign = -1 if analysis.metric.higher_is_better else 1
    finals = {result.method: result.final_mean(analysis.metric.name) for result in analysis.methods}
    ranked = sorted(finals, key=lambda method: sign * value if (value := finals[method]) is not None else math.inf)
    return [method for method in dict.fromkeys((*first, *ranked)) if method in finals][:MOST_ROWS]


def file_stems(names: Sequence[str]) -> list[str]:
    """Reduce names to letters, digits and dashes; number equal results.

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


# Files


def _files_of(section: Section) -> dict[str, bytes]:
    figure, table = section.figure, section.table
    found: dict[str, bytes] = {}
    for drawing in (*section.paper_drawings, *section.chart_drawings):
        found |= {figure(drawing.name, "svg"): drawing.svg, figure(drawing.name, "png"): drawing.png}
    texts = {figure(chart.name, "csv"): csv_text(_points(chart)) for chart in section.charts}
    texts |= {figure("target", "csv"): csv_text(_arrivals(section.bars))} if section.bars else {}
    texts |= {table(each.name): csv_text([each.columns, *each.rows]) for each in (section.summary, *section.tables)}
    texts[table("settings", "json")] = section.settings + "\n"
    return found | {path: text.encode("utf-8", "replace") for path, text in texts.items()}


def _points(chart: Panel) -> Iterator[Sequence[object]]:
    """Yield a row for each point of each line, with its position on every axis."""
    yield ["line", *AXES, "mean", "standard_error", "trials"]
    for line in chart.lines:
        curve = line.curve
        places = [line.positions(axis) for axis in AXES]
        numbers = (*places, curve.mean, curve.standard_error)
        columns = [repeat(None) if values is None else values.tolist() for values in numbers]
        yield from zip(repeat(line.label, len(curve.epochs)), *columns, curve.num_trials.tolist(), strict=False)


def _arrivals(bars: Mapping[str, TargetBars]) -> Iterator[Sequence[object]]:
    """Yield a row for each method and unit, with empty cells if the target was not reached."""
    yield ["method", "unit", "target", "on_mean_metric", "fastest_trial", "slowest_trial", "reached", "trials"]
    for unit, each in bars.items():
        for method, arrival in each.arrivals.items():
            trials = arrival.trials or (math.inf,)
            reached = sum(map(math.isfinite, arrival.trials))
            yield method, unit, each.goal, arrival.value, min(trials), max(trials), reached, len(arrival.trials)


def _write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write all files or none: old files stay until every new file is written beside its place."""
    scratch, name = {name: folder / f"{name}.tmp" for name in contents}, ""
    try:
        for name, content in contents.items():
            scratch[name].parent.mkdir(parents=True, exist_ok=True)
            scratch[name].write_bytes(content)
        for name, path in scratch.items():
            path.replace(folder / name)
    except OSError as error:
        for path in scratch.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise RecordError(f"cannot write '{folder / name}': {error.strerror}. Choose another folder.") from error


def render_markdown(sections: Sequence[Section], problems: Sequence[str]) -> str:
    """Return the report as Markdown with relative links to figures."""
    blocks = ["# Report"]
    if problems:
        blocks += ["## Files left out", "\n".join(f"- {escape_markdown(problem)}" for problem in problems)]
    for section in sections:
        blocks += [f"## {escape_markdown(section.heading)}", escape_markdown(section.about)]
        blocks.append(f"**{escape_markdown(section.verdict)}**")
        for table in (section.summary, *section.tables):
            blocks += [f"### {escape_markdown(table.title)}", table.to_markdown()]
        for drawing in (*section.paper_drawings, *section.chart_drawings):
            title, path = escape_markdown(drawing.title), section.figure(drawing.name, "svg")
            blocks += [f"![{title}]({path})", f"**{title}.** {escape_markdown(drawing.caption)}"]
        settings = section.settings.replace("<", "\\u003c").replace("`", "\\u0060")
        blocks += ["### Settings, versions, hardware", f"```json\n{settings}\n```"]
    return "\n\n".join(filter(None, blocks)) + "\n"


# The page fetches nothing, runs only its own scripts, and shows text from records as text only


@cache
def asset(name: str) -> str:
    """Return the text of one of the page's asset files."""
    return files("divebatch.report").joinpath("assets", name).read_text(encoding="utf-8")


def render_page(sections: Sequence[Section], problems: Sequence[str]) -> str:
    """Return the report as an HTML page."""
    from jinja2 import Environment, StrictUndefined  # takes a fifth of a second, which other commands save

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    hashes = [base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode() for name in SCRIPTS]
    page = environment.from_string(asset("page.html.jinja"))
    return page.render(
        sections=sections,
        problems=problems,
        data=page_data(sections),
        asset=asset,
        scripts=SCRIPTS,
        hashes=hashes,
        at_once=AT_ONCE,
        bars_note=BARS_NOTE,
        share=lambda value, whole: f"{100 * value / whole if whole else 0:.2f}%",
        is_finite=math.isfinite,
    )


def page_data(sections: Sequence[Section]) -> dict[str, Any]:
    """Return the numbers that the page's script draws."""
    return {"axes": AXES, "sections": [_section_data(section) for section in sections]}


def _section_data(section: Section) -> dict[str, Any]:
    charts = [replace(chart, lines=[line.outline() for line in chart.lines]) for chart in section.charts]
    methods: list[dict[str, Any]] = []
    epochs_of: dict[str, Floats] = {}
    for track in section.tracks:
        drawn = {
            epoch for chart in charts for line in chart.lines if line.track is track for epoch in line.curve.epochs
        }
        kept = np.isin(track.axes["epochs"], list(drawn))
        epochs_of[track.method] = track.axes["epochs"][kept]
        axes = {axis: _rounded(values[kept]) for axis, values in track.axes.items()}
        methods.append({"name": track.method, "color": track.look.color, "dark": track.look.dark_color, "x": axes})
    numbers = {method: number for number, method in enumerate(epochs_of)}
    return {
        "methods": methods,
        "charts": [
            {
                "title": chart.title,
                "log": chart.is_log,
                "base": chart.log_base,
                "bounds": _rounded(chart.bounds),
                "steps": chart.is_steps,
                "focus": chart.focus and _rounded(chart.focus),
                "lines": [
                    {"method": numbers[line.track.method], **_line_data(line, epochs_of[line.track.method])}
                    for line in chart.lines
                ],
            }
            for chart in charts
        ],
    }


def _line_data(line: Line, epochs: Floats) -> dict[str, Any]:
    look, curve = line.look, line.curve
    own = {"color": look.color, "dark": look.dark_color} if look.color != line.track.look.color else {}
    return {
        **own,
        "label": line.label,
        # Dashes and gaps in turn, in pixels.
        "dash": [] if look.dashes == "solid" else [2 * length for length in look.dashes[1]],
        "width": line.width,
        "at": np.searchsorted(epochs, curve.epochs).tolist(),
        "mean": _rounded(curve.mean),
        "error": _rounded(curve.standard_error),
    }


def _rounded(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values]
