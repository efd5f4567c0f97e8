"""Errors that this package raises on purpose; all derive from `DivebatchError`."""

NO_RULES_NEEDED = "In a controller, pass estimator='moments' or 'split', which need no norm rules"


class DivebatchError(Exception):
    """The base of all errors raised on purpose; each subclass is also the built-in error that a reader expects."""


class ArgumentError(DivebatchError, ValueError):
    """An argument or a configuration value that cannot work."""


class CoverageError(DivebatchError, TypeError):
    """A trainable parameter whose per-sample gradients cannot be counted.

    The message begins with the remedy that always works: an estimator that needs no norm rules.

    Args:
        what: The parameter or layer that cannot be measured, and the reason.
        way: Another remedy, as an instruction to the reader; empty for none.
    """

    def __init__(self, what: str, way: str = "") -> None:
        ways = f"{NO_RULES_NEEDED}; or {way}" if way else NO_RULES_NEEDED
        super().__init__(f"{what}. {ways}")
        self.what, self.way = what, way

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Rebuild the error in the parent of a worker process from its arguments."""
        return type(self), (self.what, self.way)


class UsageError(DivebatchError, RuntimeError):
    """A call at the wrong time."""


class CheckpointError(DivebatchError, ValueError):
    """A saved state that does not belong to the objects it is loaded into."""


class RecordError(DivebatchError, ValueError):
    """A record file that cannot be written or read."""


class DataError(DivebatchError, ValueError):
    """Data on disk that is missing, damaged or not in the format it should have."""


class DivergedError(DivebatchError, ArithmeticError):
    """A loss that is no longer a finite number."""


class BatchTooLargeError(DivebatchError, MemoryError):
    """A batch, or a part of one that goes through the model at once, that does not fit into memory."""


class StoppedError(DivebatchError):
    """A run that was asked to stop, has saved its state and can be resumed."""


class RankError(DivebatchError, RuntimeError):
    """A failure on one rank of several, which ends the work of all."""


class WorkerError(DivebatchError, RuntimeError):
    """A process that disappeared while it worked on a run."""


class UndefinedDiversityError(DivebatchError, ValueError):
    """A gradient diversity that cannot be formed: zero sum, NaN or infinite gradients."""


class MissingExtraError(DivebatchError, ImportError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; get it with: pip install 'divebatch[{extra}]'")
        self.package, self.extra = package, extra

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Rebuild the error in the parent of a worker process from its arguments."""
        return type(self), (self.package, self.extra)
