"""Tables and figures as CSV and LaTeX: all numbers, and nothing that another program would obey."""

import csv
import io
from pathlib import Path

import pytest
from made_up_runs import write_accuracies

from divebatch.report import Table, analyse, load_runs
from divebatch.report.charts import make_bars, make_charts, make_tracks
from divebatch.report.export import bars_to_csv, chart_to_csv, escape_latex, table_to_csv, table_to_latex

TABLE = Table("a: 50 %\n\\input{x}", ["method", "loss"], [["a_b & c", "1 ± 2"], ["d", "-"]], ["# note\nof two lines"])


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_table_as_csv_reads_back() -> None:
    assert rows(table_to_csv(TABLE)) == [{"method": "a_b & c", "loss": "1 ± 2"}, {"method": "d", "loss": "-"}]


@pytest.mark.parametrize("text", ["=1+1", "+1", "@x", "-a", "\tx", "\n=1", "-1+cmd|x", " =1", "\uff1d1"])
def test_no_cell_begins_like_a_formula(text: str) -> None:
    table = Table("t", ["method"], [[text]], [])
    assert rows(table_to_csv(table))[0]["method"] == f"'{text}"


@pytest.mark.parametrize("text", ["-", "-1.5", "a=b", "12"])
def test_numbers_and_other_text_stay_as_they_are(text: str) -> None:
    assert rows(table_to_csv(Table("t", ["method"], [[text]], [])))[0]["method"] == text


def test_a_table_as_latex() -> None:
    assert table_to_latex(TABLE).splitlines() == [
        r"% Needs \usepackage{booktabs}.",
        r"% a: 50 % \input{x}",
        "% # note of two lines",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"method & loss \\",
        r"\midrule",
        r"a\_b \& c & 1 $\pm$ 2 \\",
        r"d & - \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_latex_obeys_no_name() -> None:
    assert escape_latex("\\input{a}$x^2$~#%") == (
        r"\textbackslash{}input\{a\}\$x\textasciicircum{}2\$\textasciitilde{}\#\%"
    )


def test_figures_as_csv_hold_every_point(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.5, 0.7], [0.6, 0.9]])
    (experiment,) = load_runs(tmp_path).experiments
    accuracy = rows(chart_to_csv(make_charts(make_tracks(analyse(experiment)))[0]))
    assert accuracy[1] == {
        **{"line": "sgd-small", "epochs": "2", "steps": "20", "samples": "2000", "seconds": ""},
        **{"mean": "80", "standard_error": "10", "trials": "2"},
    }
    target = rows(bars_to_csv(make_bars(analyse(experiment))))
    assert [row["unit"] for row in target] == ["epochs", "steps", "samples"]
    assert target[0]["on_mean_metric"] == "2"
    assert (target[0]["reached"], target[0]["trials"], target[0]["slowest_trial"]) == ("1", "2", "")
