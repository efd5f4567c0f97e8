"""Input of any size is answered at once: names, lines, numbers and files that would take hours or all memory."""

import pytest
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.errors import ArgumentError
from divebatch.lab import get_experiment
from divebatch.lab.schema import FOLDER

TEXT = (FOLDER / "synthetic-convex.toml").read_text(encoding="utf-8")


def test_a_name_that_no_folder_can_have_is_refused(tmp_path):
    path = tmp_path / "it.toml"
    path.write_text(TEXT.replace('name = "synthetic-convex"', f'name = "{300 * "n"}"'))
    with pytest.raises(ArgumentError, match=r"a name must be up to 100 letters.* and 240 characters more"):
        get_experiment(str(path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "synthetic-convex", "--trials", "10000000000"], "100000"),
        (["search", "synthetic-convex", "--trials", "10000000000"], "100000"),
        (["search", "synthetic-convex", "--study", "../x"], "a name must be up to 100 letters"),
        (["search", "synthetic-convex", "--study", 300 * "x"], "a name must be up to 100 letters"),
    ],
)
def test_numbers_and_names_that_cannot_work_are_refused_at_once(tmp_path, words, message):
    answer = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert answer.exit_code == 2
    assert message in answer.output
    assert not list(tmp_path.iterdir())


def test_an_unknown_figure_is_named(tmp_path):
    path = tmp_path / "it.toml"
    path.write_text(TEXT.replace("figure1 =", "figure9 ="))
    answer = CliRunner().invoke(app, ["run", str(path), "--out", str(tmp_path / "out")])
    assert answer.exit_code == 2
    assert "unknown it.toml: [report] figure 'figure9'" in answer.output.replace(f"{tmp_path}/", "")
