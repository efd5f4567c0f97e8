"""The command line; one file a command."""

from divebatch.cli.app import app

__all__ = ["app"]
