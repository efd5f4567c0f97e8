"""Every run of an experiment with all that its header says, as HTML."""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from divebatch.report.runs import Experiment, Run


def render_runs(experiment: Experiment) -> Iterator[str]:
    """One closed box for all, with one for each run in it."""
    runs = experiment.runs
    yield f'<details class="runs"><summary>All {len(runs)} runs: configuration, versions, hardware</summary>'
    for run in runs:
        text = escape(json.dumps(_header(run), indent=2, ensure_ascii=False))
        yield f'<details><summary>{escape(_title(experiment, run))}</summary><pre tabindex="0">{text}</pre></details>'
    yield "</details>"


def _title(experiment: Experiment, run: Run) -> str:
    reached = run.last.epoch if run.last else 0
    planned = run.planned_epochs or experiment.longest
    state = "finished" if experiment.is_finished(run) else "not finished"
    return f"{run.header.method}, seed {run.header.seed}: epoch {reached} of {planned}, {state}"


def _header(run: Run) -> dict[str, Any]:
    header = run.header
    return {
        "config": header.config,
        "versions": header.versions,
        "hardware": header.hardware,
        "git_commit": header.git_commit,
        "started": header.started,
    }
