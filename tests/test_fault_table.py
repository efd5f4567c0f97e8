"""The table of faults: its counts, its families, and those that need no processes, in small."""

import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def path() -> None:
    sys.path.append(str(BENCHMARKS))


@pytest.fixture
def outcome() -> ModuleType:
    from faults import outcome

    return outcome


def test_rows_count_tries_and_only_what_is_fatal_is_bad(capsys, outcome):
    from faults.table import is_bad, show_table, show_try

    Outcome = outcome.Outcome
    good = [Outcome("a", "whole", seconds=1.25), Outcome("a", "refused", tries=40), Outcome("b", "traceback", "why")]
    for each in good:
        show_try(each)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["whole", "a", "(1.2", "s)"],
        ["traceback", "b", "why"],
    ]
    show_table(good)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:5]]
    assert rows[1] == ["a", "41", "1", "40", "-", "-", "-", "-", "1.2", "s"]
    assert rows[2] == ["b", "1", "-", "-", "-", "-", "-", "1"]
    assert rows[3][:4] == ["all", "42", "1", "40"]
    assert not is_bad(good)
    for verdict in ("lost", "mixed up", "hung"):
        assert is_bad([*good, Outcome("c", verdict)])
        assert outcome.worst("whole", verdict, "traceback") == verdict


def test_every_family_yields_its_outcomes_and_says_what_it_does():
    from faults.families import FAMILIES

    for name, tries in FAMILIES.items():
        assert inspect.isgeneratorfunction(tries), name
        assert tries.__module__ == f"faults.{name}"
        assert inspect.getmodule(tries).__doc__


def test_what_is_done_to_files_is_noticed(tmp_path):
    from faults import damage, hostile, swaps

    found = [
        *swaps.swapped(tmp_path / "swaps"),
        *damage.checkpoints(tmp_path / "checkpoints", 10, 0),
        *damage.records(tmp_path / "records", 5, 0),
        *damage.runs(tmp_path / "runs", 2, 0),
        *hostile.records(tmp_path),
    ]
    assert {each.verdict for each in found} == {"whole", "refused"}, found
    assert sum(each.tries for each in found) == 2 * len(swaps.OTHERS) + 20 + 10 + 4 + len(hostile.LINES)


def test_a_family_sees_what_is_taken_for_right(tmp_path, monkeypatch):
    """Or the test above shows nothing."""
    from divebatch.lab import runs
    from faults import swaps

    monkeypatch.setattr(runs, "_require_own", lambda *_: None)
    monkeypatch.setattr(swaps, "OTHERS", {"rate": swaps.OTHERS["rate"]})
    assert {each.verdict for each in swaps.swapped(tmp_path / "swaps")} >= {"mixed up"}
