"""Compile what training will need before it begins."""

from divebatch.warming.reachable_sizes import reachable_sizes
from divebatch.warming.report import WarmedShape, WarmedShapes
from divebatch.warming.warm_shapes import warm_shapes

__all__ = ["WarmedShape", "WarmedShapes", "reachable_sizes", "warm_shapes"]
