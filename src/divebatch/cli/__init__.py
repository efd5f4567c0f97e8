"""The command line, one file per command."""

from divebatch.cli.app import app

__all__ = ["app"]
