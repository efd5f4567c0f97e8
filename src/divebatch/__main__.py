"""`divebatch` and `python -m divebatch`."""

from divebatch.errors import MissingExtraError


def main() -> None:
    """Start the command line, or say which extra it needs."""
    try:
        from divebatch.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(str(MissingExtraError(error.name, "cli"))) from None
    app()


if __name__ == "__main__":
    main()
