"""Every error this package raises on purpose derives from `DivebatchError`."""


class DivebatchError(Exception):
    """Base of all errors raised on purpose; its leaves are also the built-in error a reader expects."""


class ArgumentError(DivebatchError, ValueError):
    """An argument or a configuration value that cannot work."""


class CoverageError(DivebatchError, TypeError):
    """A trainable parameter whose per-sample gradients nobody would count."""


class UsageError(DivebatchError, RuntimeError):
    """A call at the wrong time."""


class CheckpointError(DivebatchError, ValueError):
    """A saved state that does not belong to the objects it is loaded into."""


class RecordError(DivebatchError, ValueError):
    """A record file that cannot be written or read."""


class UndefinedDiversityError(DivebatchError, ValueError):
    """A gradient diversity that cannot be formed: zero sum, NaN or infinite gradients."""


class MissingExtraError(DivebatchError, ImportError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; get it with: pip install 'divebatch[{extra}]'")
