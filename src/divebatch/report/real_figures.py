"""The paper's Figures 3 and 4, and the course of batch size and learning rate. Needs the extra `report`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from divebatch.report.curves import average_curve
from divebatch.report.drawing import Drawing, make_drawing, missing_notes, trial_notes
from divebatch.report.panels import accuracy_panel, loss_panel, size_panel
from divebatch.report.plot import Line, Panel
from divebatch.report.runs import Experiment, Run
from divebatch.report.style import Look, legend_label, real_looks
from divebatch.report.summary import MethodSummary, summarise
from divebatch.report.targets import counted, stage_epochs

PANEL_SIZE = (4.6, 4.2)
"""Width and height in inches: room for ten lines and their names."""
DASHES_NOTE = "Dashed: the learning rate is rescaled with the batch size."
WIDEST, THINNEST = 5.0, 1.2
"""In points."""

MakePanel = Callable[[Sequence[Line]], Panel]


@dataclass(frozen=True, slots=True)
class Course:
    """A method with the trials and the look it is drawn with."""

    summary: MethodSummary
    look: Look
    runs: Sequence[Run]


def draw_real_figures(experiment: Experiment) -> list[Drawing]:
    """Those that the records can fill, over the trials that count in the tables too."""
    courses = _courses(counted(experiment))
    late = stage_epochs(experiment.length)[2]
    figures = {
        ("figure3", "Figure 3: validation accuracy"): _ways(courses, "val_accuracy", accuracy_panel, late),
        ("figure4", "Figure 4: validation loss"): _ways(courses, "val_loss", loss_panel, late),
        ("course", "Batch size and learning rate"): [
            size_panel(_nested(_lines(courses, "batch_size"))),
            Panel("Learning rate", _nested(_lines(courses, "lr")), bounds=(0.0, np.inf), may_be_log=False),
        ],
    }
    drawings = [_drawing(*names, experiment.name, courses, panels) for names, panels in figures.items()]
    return [drawing for drawing in drawings if drawing is not None]


def _courses(experiment: Experiment) -> list[Course]:
    looks = real_looks(experiment.methods)
    return [Course(s, looks[s.method], experiment.methods[s.method]) for s in summarise(experiment) if s.last_epoch]


def _ways(courses: list[Course], field: str, make_panel: MakePanel, late: int) -> list[Panel]:
    """Over epochs as in the paper, over training time, and the end enlarged, from epoch `late` on."""
    lines = _lines(courses, field)
    late_lines = [replace(line, curve=line.curve.since(late)) for line in lines]
    end = make_panel([line for line in late_lines if not line.curve.is_empty])
    return [
        make_panel(lines),
        make_panel(_lines(courses, field, over_seconds=True)),
        replace(end, title=f"{end.title}, last quarter", first_epoch=late, may_be_log=False),
    ]


def _lines(courses: list[Course], field: str, *, over_seconds: bool = False) -> list[Line]:
    """One line a method that has a finite value of the field, and of the time where that is the axis."""
    lines = []
    for course in courses:
        curve, time = average_curve(course.runs, field), average_curve(course.runs, "train_seconds")
        if not curve.is_empty and not (over_seconds and time.is_empty):
            label = legend_label(course.summary, course.look)
            lines.append(Line(label, course.look, curve, time.mean if over_seconds else None))
    return lines


def _nested(lines: list[Line]) -> list[Line]:
    """Each thinner than the one before: many methods share a course, and all of them shall be seen."""
    widths = np.linspace(WIDEST, THINNEST, len(lines)).tolist()
    return [replace(line, width=width) for line, width in zip(lines, widths, strict=True)]


def _drawing(name: str, title: str, heading: str, courses: list[Course], panels: list[Panel]) -> Drawing | None:
    panels = [replace(panel, spread="standard_error") for panel in panels if panel.lines]
    summaries = [course.summary for course in courses]
    if not panels:
        return None
    caption = [*trial_notes(summaries, panels), DASHES_NOTE, *missing_notes(summaries)]
    return make_drawing(name, title, heading, panels, caption, panel_size=PANEL_SIZE)
