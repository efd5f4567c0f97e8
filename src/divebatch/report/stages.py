"""The paper's Table 1: accuracy at four stages of training, and the time to a target."""

from collections.abc import Iterator

from divebatch.report.runs import Experiment, Run
from divebatch.report.summary import COMMON_TARGET_METHOD, MethodSummary, summarise
from divebatch.report.table import MISSING, NOT_REACHED, Table, diverged_note, seconds, with_error
from divebatch.report.targets import (
    QUARTERS,
    Arrival,
    CommonTarget,
    Progress,
    common_target,
    progress_of,
    stage_epochs,
)


def stage_table(experiment: Experiment) -> Table:
    """Accuracies as mean ± standard error over trials; epochs and training seconds to the own and a common target."""
    epochs = stage_epochs(experiment.length)
    methods, summaries = progress_of(experiment), summarise(experiment)
    target = common_target(methods)
    columns = ["method", "trials"]
    columns += [f"{25 * quarter} % ({epoch})" for quarter, epoch in zip(QUARTERS, epochs, strict=True)]
    columns += ["final val loss", "to own target", "to common target"]
    rows = [_row(p, s, epochs, target) for p, s in zip(methods, summaries, strict=True)]
    title = f"{experiment.name}: validation accuracy (%) and time to target"
    return Table(title, columns, rows, list(_notes(experiment, methods, summaries, target)))


def _row(progress: Progress, summary: MethodSummary, epochs: list[int], target: CommonTarget | None) -> list[str]:
    common = target.accuracy if target else None
    return [
        progress.method,
        f"{summary.num_finished} of {summary.num_trials}",
        *(with_error(progress.accuracy.at(epoch), percent=True) for epoch in epochs),
        with_error(progress.final_loss),
        _time(progress, progress.own_target),
        _time(progress, common),
    ]


def _time(progress: Progress, target: float | None) -> str:
    arrival = progress.arrival(target)
    if arrival:
        return shown_time(arrival)
    if target is None or progress.accuracy.is_empty:
        return MISSING
    return NOT_REACHED if progress.is_finished else "not yet"


def shown_time(arrival: Arrival) -> str:
    """Seconds and epoch, as the table has them.

    >>> shown_time(Arrival(96, 1566.2, 0.0)), shown_time(Arrival(96, None, 0.0))
    ('1566 s (96)', '(96)')
    """
    return f"({arrival.epoch})" if arrival.seconds is None else f"{seconds(arrival.seconds)} s ({arrival.epoch})"


def _notes(
    experiment: Experiment, methods: list[Progress], summaries: list[MethodSummary], target: CommonTarget | None
) -> Iterator[str]:
    yield "Trials: finished of those there are. Accuracies and losses: means over trials ± standard error."
    yield "Columns in percent: the accuracy after that part of the epochs; in parentheses the epoch."
    yield (
        "To a target: seconds of training (without evaluation and compilation, mean over trials) and, in parentheses, "
        "epochs until the accuracy averaged over trials is at least the target; a trial alone, being rougher than the "
        "average, may reach it earlier. "
        "Own target: the method's own final accuracy less one point, so easier for a method that ends worse."
    )
    yield _target_note(target)
    yield from _trial_notes(methods, summaries)
    yield from (diverged_note(summary) for summary in summaries if summary.num_diverged)
    yield from _comparability_notes(experiment)


def _target_note(target: CommonTarget | None) -> str:
    if target is None:
        return "No common target: no method has a final accuracy yet."
    start = f"Common target: {100 * target.accuracy:.2f} %, the final accuracy of {target.method} less one point"
    if target.method == COMMON_TARGET_METHOD:
        return f"{start}."
    return f"{start}: the best one here, as {COMMON_TARGET_METHOD} has none."


def _trial_notes(methods: list[Progress], summaries: list[MethodSummary]) -> Iterator[str]:
    for progress, summary in zip(methods, summaries, strict=True):
        start = f"{progress.method}: {summary.num_finished} of {summary.num_trials} trials finished"
        if summary.last_epoch is None:
            yield f"{start}, no epoch recorded yet."
        elif not progress.is_finished:
            yield f"{start}, epoch {summary.last_epoch} reached; no final accuracy, means over trials that got so far."
        elif summary.num_finished < summary.num_trials:
            yield f"{start}; accuracies and times to target are over those."
    single = [progress.method for progress in methods if len(progress.runs) == 1]
    if single:
        yield f"A single trial, hence no standard error: {', '.join(single)}."
    seeds = {progress.method: _seeds(progress.runs) for progress in methods}
    if len(set(seeds.values())) > 1:
        yield "Not all methods have the same seeds: " + "; ".join(f"{m} {s}" for m, s in seeds.items()) + "."


def _seeds(runs: tuple[Run, ...]) -> str:
    return ", ".join(str(run.header.seed) for run in runs)


def _comparability_notes(experiment: Experiment) -> Iterator[str]:
    lengths = sorted({run.planned_epochs for run in experiment.runs if run.planned_epochs})
    if len(lengths) > 1:
        yield (
            f"Runs ask for different numbers of epochs ({', '.join(map(str, lengths))}): the stages are those of the "
            f"longest. Keep such runs in different folders."
        )
    machines = machines_of(experiment.runs)
    if len(machines) > 1:
        yield f"Times come from different hardware ({'; '.join(machines)}) and do not compare."


def machines_of(runs: list[Run]) -> list[str]:
    """The names of what the runs ran on, each once."""
    return sorted({str(run.header.hardware.get("name", run.header.hardware.get("device", "?"))) for run in runs})
