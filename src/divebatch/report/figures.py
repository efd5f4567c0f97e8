"""An experiment's figures, drawn from records; here the paper's Figures 1 and 2. Needs the extra `report`."""

from collections.abc import Iterator, Sequence

from divebatch.report.curves import average_curve
from divebatch.report.drawing import Drawing, make_drawing, missing_notes, require_matplotlib, trial_notes
from divebatch.report.panels import accuracy_panel, loss_panel, size_panel
from divebatch.report.plot import Line, Panel
from divebatch.report.real_figures import draw_real_figures
from divebatch.report.runs import Experiment
from divebatch.report.style import EXACT, LOOKS, legend_label
from divebatch.report.summary import MethodSummary, summarise

FIGURE_1_METHODS = ("sgd-small", "sgd-large", "adabatch", "divebatch")
FIGURE_2_METHODS = ("divebatch", "oracle")
DIVERSITY = "Gradient diversity"
DIVERSITY_NOTES = {
    "divebatch": "DiveBatch's diversity is its estimate along the epoch.",
    "oracle": "Oracle's diversity is exact, at the weights each epoch ended with.",
}


def draw_figures(experiment: Experiment) -> list[Drawing]:
    """Figures 1 and 2, or on real data 3 and 4 with the batch sizes: those that the records can fill."""
    require_matplotlib()
    if experiment.is_on_real_data:
        return draw_real_figures(experiment)
    return [drawing for drawing in (figure_1(experiment), figure_2(experiment)) if drawing is not None]


def figure_1(experiment: Experiment) -> Drawing | None:
    """Validation loss and accuracy against epochs: small batch, large batch, and the batch that grows."""
    shown = _summaries(experiment, FIGURE_1_METHODS)
    panels = [
        loss_panel(_lines(experiment, shown, "val_loss")),
        accuracy_panel(_lines(experiment, shown, "val_accuracy")),
    ]
    return _drawing("figure1", "Figure 1: validation loss and accuracy", experiment, shown, panels)


def figure_2(experiment: Experiment) -> Drawing | None:
    """DiveBatch against Oracle: validation loss, batch size, and the diversity each of them acts upon."""
    shown = _summaries(experiment, FIGURE_2_METHODS)
    panels = [
        loss_panel(_lines(experiment, shown, "val_loss")),
        size_panel(_lines(experiment, shown, "batch_size")),
        Panel(DIVERSITY, _diversity_lines(experiment, shown)),
    ]
    names = " and ".join(LOOKS[summary.method].label for summary in shown)
    return _drawing("figure2", f"Figure 2: {names}", experiment, shown, panels)


def _summaries(experiment: Experiment, methods: Sequence[str]) -> list[MethodSummary]:
    return [summary for summary in summarise(experiment) if summary.method in methods and summary.last_epoch]


def _lines(experiment: Experiment, shown: list[MethodSummary], field: str) -> list[Line]:
    """One line a method that has a finite value of the field."""
    curves = [(summary, average_curve(experiment.methods[summary.method], field)) for summary in shown]
    return [Line(legend_label(s, LOOKS[s.method]), LOOKS[s.method], curve) for s, curve in curves if not curve.is_empty]


def _diversity_lines(experiment: Experiment, shown: list[MethodSummary]) -> list[Line]:
    lines = _lines(experiment, shown, "diversity")
    exact = average_curve(experiment.methods.get("divebatch", ()), "exact_diversity")
    if not exact.is_empty:
        lines.append(Line(EXACT.label, EXACT, exact))
    # Some epochs are not measured: join those that are.
    return [Line(line.label, line.look, line.curve.measured()) for line in lines]


def _drawing(
    name: str, title: str, experiment: Experiment, shown: list[MethodSummary], panels: list[Panel]
) -> Drawing | None:
    panels = [panel for panel in panels if panel.lines]
    return make_drawing(name, title, experiment.name, panels, list(_caption(shown, panels))) if panels else None


def _caption(shown: list[MethodSummary], panels: list[Panel]) -> Iterator[str]:
    yield from trial_notes(shown, panels)
    if any(panel.title == DIVERSITY for panel in panels):
        yield from (DIVERSITY_NOTES[summary.method] for summary in shown)
    yield from missing_notes(shown)
