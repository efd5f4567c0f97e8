from click.testing import Result
from typer.testing import CliRunner

from divebatch.cli import app


def call(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))
