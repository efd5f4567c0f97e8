"""Searching for settings: the paper's grids and better samplers, by as many processes as one likes."""

from divebatch.lab.search.plan import Plan, make_plan
from divebatch.lab.search.results import Results, Tried, collect, to_toml, write_results
from divebatch.lab.search.space import Dimension, Point, Space, paper_space, parse_space
from divebatch.lab.search.study import SAMPLERS, Study
from divebatch.lab.search.worker import Result, open_study, work

__all__ = [
    "Plan",
    "make_plan",
    "Space",
    "Dimension",
    "Point",
    "paper_space",
    "parse_space",
    "Study",
    "SAMPLERS",
    "open_study",
    "work",
    "Result",
    "Results",
    "Tried",
    "collect",
    "write_results",
    "to_toml",
]
