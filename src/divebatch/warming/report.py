"""What warming took, size by size."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WarmedShape:
    """A batch size that was run before training.

    Args:
        batch_size: Samples of a batch, those of all ranks.
        seconds: What its first steps took, compiling included.
        graphs: Pieces of code that torch.compile made for it: 0 where nothing is compiled, where the code for another
            size serves this one too, and where the compiler has reached its limit.
    """

    batch_size: int
    seconds: float
    graphs: int

    def __str__(self) -> str:
        compiled = f"{self.graphs} graph{'s' * (self.graphs != 1)} compiled" if self.graphs else "nothing compiled"
        return f"batch {self.batch_size}: {self.seconds:.1f} s, {compiled}"


@dataclass(frozen=True, slots=True)
class WarmedShapes:
    """What `warm_shapes` did; prints well.

    Args:
        shapes: The sizes, from the smallest on.
    """

    shapes: tuple[WarmedShape, ...]

    @property
    def seconds(self) -> float:
        """What all sizes took together."""
        return sum(shape.seconds for shape in self.shapes)

    @property
    def graphs(self) -> int:
        """Pieces of code that were compiled."""
        return sum(shape.graphs for shape in self.shapes)

    def __str__(self) -> str:
        count = len(self.shapes)
        return "\n".join(
            (f"{count} batch size{'s' * (count != 1)} warmed in {self.seconds:.1f} s", *map(str, self.shapes))
        )
