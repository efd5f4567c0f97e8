"""A framework that is missing, or of a version nobody has tried, is named with what to do."""

import subprocess
import sys

import pytest

from divebatch.errors import MissingExtraError
from divebatch.integrations import versions
from divebatch.integrations.versions import UnsupportedVersionError, require_installed


def installed() -> list[str]:
    names = ["framework", "py-framework"]
    return require_installed(names, extra="frame", oldest="2.6", too_new="2.7", excluded=["2.6.2"])


def having(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    monkeypatch.setattr(versions, "_version", lambda package: installed.get(package.replace("-", "_")))


def test_what_is_installed_is_listed(monkeypatch):
    having(monkeypatch, py_framework="2.6.6.post1")
    assert installed() == ["py-framework"]


def test_a_missing_framework_names_the_extra(monkeypatch):
    having(monkeypatch)
    with pytest.raises(MissingExtraError, match=r"framework is not installed; .* 'divebatch\[frame\]'"):
        installed()


@pytest.mark.parametrize("there", ["2.5.9", "2.7", "2.7.0rc1", "2.6.2", "10.0"])
def test_a_version_nobody_tried_names_those_that_work(there, monkeypatch):
    having(monkeypatch, framework=there)
    with pytest.raises(
        UnsupportedVersionError, match=rf"framework {there} .*2.6 up to, not including, 2.7 without 2.6.2"
    ):
        installed()


def test_each_adapter_says_what_it_lacks():
    """In a process of its own: here the adapters may have been imported already."""
    program = (
        "from importlib import import_module, metadata\n"
        "def version(package): raise metadata.PackageNotFoundError(package)\n"
        "metadata.version = version\n"
        "for name in ['lightning', 'transformers', 'accelerate']:\n"
        "    try: import_module(f'divebatch.integrations.{name}')\n"
        "    except ImportError as error: print(error)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for name in ("lightning", "transformers", "accelerate"):
        assert f"{name} is not installed; get it with: pip install 'divebatch[{name}]'" in answer.stdout
