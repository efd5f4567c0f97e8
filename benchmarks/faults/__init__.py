"""Faults made on purpose, and what becomes of the runs that meet them: `python benchmarks/faults`.

`families.py` is the list of what is tried; each family is a file with a function `tries`, which yields an `Outcome` for
every try. `table.py` alone counts and prints.
"""
