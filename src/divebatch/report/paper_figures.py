"""The figures of the paper that an experiment asks for, drawn from records. Needs the extra `report`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from divebatch.report.analysis import Analysis, MethodResult
from divebatch.report.charts import QUANTITIES, Panel, Track, lines_of, panel_of
from divebatch.report.drawing import PANEL_SIZE, Drawing, make_drawing
from divebatch.report.tables import diverged_note, stage_epochs

WIDE_PANEL = (4.6, 4.2)
"""Width and height in inches: room for ten lines and their names."""
SPREADS = {"std": "one standard deviation over trials", "standard_error": "the standard error of the mean over trials"}


Draw = Callable[[str, Analysis, Sequence[Track]], Drawing | None]
"""Gets a figure's name, the experiment's analysis and the methods to show; None where the records cannot fill it."""


@dataclass(frozen=True, slots=True)
class PanelFigure:
    """Draws a figure of panels side by side."""

    title: str
    panels: Callable[[Analysis, Sequence[Track]], list[Panel]]
    spread: Literal["std", "standard_error"]
    panel_size: tuple[float, float]

    def __call__(self, name: str, analysis: Analysis, tracks: Sequence[Track]) -> Drawing | None:
        panels = [replace(panel, spread=self.spread) for panel in self.panels(analysis, tracks) if panel.lines]
        if not panels:
            return None
        caption = list(_caption(analysis, [track.result for track in tracks], self.spread))
        heading = analysis.experiment.name
        return make_drawing(name, self.title, heading, panels, caption, panel_size=self.panel_size)


def draw_paper_figures(analysis: Analysis, tracks: Sequence[Track]) -> list[Drawing]:
    """Those that the experiment names and the records can fill."""
    wanted = analysis.experiment.settings.figures
    drawings = []
    for name in (name for name in FIGURES if name in wanted):
        shown = [track for track in tracks if not wanted[name] or track.method in wanted[name]]
        drawings.append(FIGURES[name](name, analysis, shown))
    return [drawing for drawing in drawings if drawing is not None]


def _panel(quantity: str, tracks: Sequence[Track]) -> Panel:
    lines = [line for track in tracks for line in lines_of(QUANTITIES[quantity], track, track.legend)]
    return panel_of(QUANTITIES[quantity], lines)


def _side_by_side(*quantities: str) -> Callable[[Analysis, Sequence[Track]], list[Panel]]:
    return lambda _, tracks: [_panel(quantity, tracks) for quantity in quantities]


def _three_ways(quantity: str) -> Callable[[Analysis, Sequence[Track]], list[Panel]]:
    """Over epochs as in the paper, over training time, and the last quarter enlarged."""

    def panels(analysis: Analysis, tracks: Sequence[Track]) -> list[Panel]:
        late = stage_epochs(analysis.experiment.length)[2]
        pairs = [(track, line) for track in tracks for line in lines_of(QUANTITIES[quantity], track, track.legend)]
        whole = panel_of(QUANTITIES[quantity], [line for _, line in pairs])
        over_time = [replace(line, seconds=track.positions(line.curve, "seconds")) for track, line in pairs]
        end = [replace(line, curve=line.curve.since(late)) for line in whole.lines]
        return [
            whole,
            replace(whole, lines=[line for line in over_time if line.seconds is not None]),
            replace(
                whole,
                lines=[line for line in end if not line.curve.is_empty],
                title=f"{whole.title}, last quarter",
                first_epoch=late,
                may_be_log=False,
            ),
        ]

    return panels


def _caption(analysis: Analysis, shown: Sequence[MethodResult], spread: str) -> Iterator[str]:
    unfinished = [result for result in shown if result.num_finished < len(result.trials)]
    is_open = any(not result.num_finished for result in shown)
    yield f"Lines are means over {_trials(shown)}" + (", at each epoch over those that reached it." if is_open else ".")
    if any(len(result.runs) > 1 for result in shown):
        yield f"Bands are ± {SPREADS[spread]}, cut off at the axis and at impossible values."
    yield "In parentheses: the batch size, or the first one and the mean of the final ones."
    yield from (f"{r.method}: {r.num_finished} of {len(r.trials)} trials finished." for r in unfinished)
    yield from (diverged_note(result, analysis) for result in shown if result.num_diverged)


def _trials(shown: Sequence[MethodResult]) -> str:
    counts = [len(result.runs) for result in shown]
    if len(set(counts)) > 1:
        return "trials (" + ", ".join(f"{result.method}: {len(result.runs)}" for result in shown) + ")"
    return "1 trial" if counts[0] == 1 else f"{counts[0]} trials"


FIGURES: dict[str, Draw] = {
    "figure1": PanelFigure(
        "Figure 1: validation loss and accuracy", _side_by_side("loss", "accuracy"), "std", PANEL_SIZE
    ),
    "figure2": PanelFigure(
        "Figure 2: validation loss, batch size and diversity",
        _side_by_side("loss", "batchsize", "diversity"),
        "std",
        PANEL_SIZE,
    ),
    "figure3": PanelFigure("Figure 3: validation accuracy", _three_ways("accuracy"), "standard_error", WIDE_PANEL),
    "figure4": PanelFigure("Figure 4: validation loss", _three_ways("loss"), "standard_error", WIDE_PANEL),
    "course": PanelFigure(
        "Batch size and learning rate", _side_by_side("batchsize", "lr"), "standard_error", WIDE_PANEL
    ),
}
"""By the name that an experiment file uses, which is part of file names too. Another figure is one row."""
