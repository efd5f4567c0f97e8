"""What a release uploads: the checks of tools/dist.py find what is wrong; version and licences agree everywhere."""

import importlib.util
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import divebatch

ROOT = Path(__file__).parents[1]
FILES = {"divebatch/__init__.py", "divebatch/py.typed"}
LICENCES = {"LICENSE", "src/divebatch/report/assets/uPlot.LICENSE"}
BESIDE = {"PKG-INFO", "pyproject.toml", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", ".gitignore"}


@pytest.fixture(scope="module")
def dist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dist", ROOT / "tools" / "dist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_wheel(path: Path, files: set[str], licences: set[str] = LICENCES) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in files | {f"divebatch-1.dist-info/licenses/{licence}" for licence in licences}:
            archive.writestr(name, "")
    return path


def make_sdist(path: Path, files: set[str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in files:
            archive.addfile(tarfile.TarInfo(f"divebatch-1/{name}"))
    return path


def test_a_whole_wheel_and_archive_pass(dist: ModuleType, tmp_path: Path) -> None:
    dist.check_wheel(make_wheel(tmp_path / "a.whl", FILES), FILES)
    dist.check_sdist(make_sdist(tmp_path / "a.tar.gz", BESIDE | {f"src/{name}" for name in FILES}), FILES)


@pytest.mark.parametrize(
    ("files", "licences", "expected", "told"),
    [
        (FILES - {"divebatch/__init__.py"}, LICENCES, FILES, r"lacks \['divebatch/__init__.py'\]"),
        (FILES | {"tests/data.bin"}, LICENCES, FILES, r"has \['tests/data.bin'\]"),
        (FILES, {"LICENSE"}, FILES, "licences lacks"),
        (FILES - {"divebatch/py.typed"}, LICENCES, FILES - {"divebatch/py.typed"}, "lacks py.typed"),
    ],
)
def test_what_is_wrong_with_a_wheel_is_named(
    dist: ModuleType, tmp_path: Path, files: set[str], licences: set[str], expected: set[str], told: str
) -> None:
    with pytest.raises(dist.DistributionError, match=told):
        dist.check_wheel(make_wheel(tmp_path / "a.whl", files, licences), expected)


def test_what_is_wrong_with_an_archive_is_named(
    dist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = BESIDE | {f"src/{name}" for name in FILES}
    with pytest.raises(dist.DistributionError, match="results/records"):
        dist.check_sdist(make_sdist(tmp_path / "a.tar.gz", whole | {"results/records"}), FILES)
    monkeypatch.setattr(dist, "LARGEST_SDIST", 1)
    with pytest.raises(dist.DistributionError, match="more than 1"):
        dist.check_sdist(make_sdist(tmp_path / "b.tar.gz", whole), FILES)


def test_an_old_build_is_not_uploaded_with_a_new_one(dist: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "old.whl").touch()
    with pytest.raises(SystemExit, match="not empty"):
        dist.main(["--out", str(tmp_path)])


def test_the_version_is_told_once_and_cited_right() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == divebatch.__version__


def test_every_licence_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["license-files"]) == LICENCES
    assert all((ROOT / name).is_file() for name in LICENCES)
