"""Where a study lives: any database Optuna takes, SQLite with transactions that really exclude each other."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from divebatch.errors import ArgumentError, MissingExtraError, RecordError, without_passwords

PATIENCE_SECONDS = 60
"""How long a process waits for another one's transaction on SQLite."""
ATTEMPTS = 6


def sqlite_url(path: Path) -> str:
    """The URL of a database file."""
    return f"sqlite:///{path.as_posix()}"


def require_optuna() -> Any:
    """The module, quiet; or an error that names the extra."""
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError("optuna", "search") from error
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna


def open_storage(url: str) -> Any:
    """Optuna's storage. Processes that open a new database at the same moment trip over each other: try again."""
    optuna = require_optuna()
    from sqlalchemy.exc import SQLAlchemyError

    is_sqlite = url.startswith("sqlite")
    settings = {"connect_args": {"timeout": PATIENCE_SECONDS}} if is_sqlite else {}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            storage = optuna.storages.RDBStorage(url, engine_kwargs=settings)
            break
        except (SQLAlchemyError, ImportError, optuna.exceptions.OptunaError) as error:
            if attempt == ATTEMPTS or isinstance(error, ImportError):
                place = without_passwords(url)
                raise ArgumentError(f"cannot open the study's storage '{place}': {_first_line(error)}") from error
            time.sleep(0.1 * attempt)
    if is_sqlite:
        _begin_at_once(storage.engine)
    return storage


@contextmanager
def storage_failures() -> Iterator[None]:
    """Inside, a database that goes away is an error that says so; the search itself can go on later."""
    optuna = require_optuna()
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise RecordError(
            f"the study's storage failed: {_first_line(error)}. The same command goes on later."
        ) from error


def _begin_at_once(engine: Any) -> None:
    """Take SQLite's write lock when a transaction begins, not when it first writes.

    Python's driver begins a transaction at the first write, after Optuna has read whether a trial is still waiting:
    two processes could both read yes. Servers lock the row; SQLite must lock the file.
    """
    from sqlalchemy import event

    def leave_transactions_to_us(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", leave_transactions_to_us)
    event.listen(engine, "begin", begin)
    engine.dispose()  # connections from before do not listen


def _first_line(error: BaseException) -> str:
    line = str(error.__cause__ or error).split("\n", 1)[0]
    # SQLite needs a second file beside the database while it writes, and does not say why it could not make it.
    return (
        f"{line} (is its folder gone, read-only, or the disk full?)" if "unable to open database file" in line else line
    )
