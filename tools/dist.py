"""Builds and checks what a release uploads: `make dist`.

The wheel and the source archive are built twice, and must be the same to the byte; their metadata and contents are
checked; the wheel is installed into an empty environment, where the README's code runs.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "divebatch"
LARGEST_SDIST = 1_500_000
"""Bytes. Records and figures would make it several times as large."""


class DistributionError(Exception):
    """Something that must not be uploaded."""


def call(*command: str | Path, cwd: Path = ROOT) -> str:
    answer = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise DistributionError(f"{' '.join(map(str, command))} failed:\n{answer.stdout}{answer.stderr}")
    return answer.stdout


def build(folder: Path) -> dict[str, str]:
    """Build into `folder`; the SHA-256 of each file by its name."""
    call(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def source_files() -> set[str]:
    """What git would commit of the package, as the wheel names it."""
    listed = call("git", "ls-files", "--cached", "--others", "--exclude-standard", "src/divebatch").splitlines()
    return {path.removeprefix("src/") for path in listed if (ROOT / path).exists()}


def check_wheel(wheel: Path, expected: set[str]) -> None:
    """Every file of the package and nothing else, the marker for type checkers, both licences."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    shipped = {name for name in names if ".dist-info/" not in name}
    require_same("the wheel", shipped, expected)
    licences = {name.rpartition("/licenses/")[2] for name in names if "/licenses/" in name}
    require_same("the wheel's licences", licences, {"LICENSE", "src/divebatch/report/assets/uPlot.LICENSE"})
    if "divebatch/py.typed" not in names:
        raise DistributionError("the wheel lacks py.typed: type checkers would ignore the package's types")


def check_sdist(sdist: Path, expected: set[str]) -> None:
    """The package and what a reader wants; small."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    beside = {"PKG-INFO", "pyproject.toml", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", ".gitignore"}
    require_same("the source archive", names, {f"src/{name}" for name in expected} | beside)
    if sdist.stat().st_size > LARGEST_SDIST:
        raise DistributionError(f"the source archive has {sdist.stat().st_size} bytes, more than {LARGEST_SDIST}")


def require_same(what: str, found: set[str], expected: set[str]) -> None:
    if found != expected:
        lacks, has = sorted(expected - found), sorted(found - expected)
        raise DistributionError(f"{what} lacks {lacks or 'nothing'} and has {has or 'nothing'} that it should not")


def readme_blocks() -> Iterable[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def try_wheel(wheel: Path, folder: Path) -> str:
    """Install into an empty environment and run the README's code, and then the commands; returns what they said."""
    call(sys.executable, "-m", "venv", folder / "venv")
    programs = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
    install = (programs / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    call(*install, wheel, cwd=folder)
    # Without PYTHONPATH and in another folder, so that the installed package is what runs.
    told = call(programs / "python", "-I", "-W", "error", "-c", "\n".join(readme_blocks()), cwd=folder)
    call(*install, f"divebatch[cli,report] @ {wheel.as_uri()}", cwd=folder)
    call(programs / "divebatch", "list", cwd=folder)  # reads the experiments, which are data of the package
    return told + call(programs / "divebatch", "doctor", cwd=folder)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--no-install", action="store_true", help="leave out the environment, which takes minutes")
    options = parser.parse_args(words)
    if options.out.exists() and any(options.out.iterdir()):
        raise SystemExit(f"'{options.out}' is not empty: an old build would be uploaded with the new one; remove it")
    with tempfile.TemporaryDirectory() as folder:
        first, second = build(options.out), build(Path(folder) / "again")
        if first != second:
            raise DistributionError(f"two builds differ: {first} and {second}")
        for name, digest in first.items():
            print(f"{name}: {(options.out / name).stat().st_size} bytes, sha256 {digest}")
        wheel, sdist = next(options.out.glob("*.whl")), next(options.out.glob("*.tar.gz"))
        check_wheel(wheel, source_files())
        check_sdist(sdist, source_files())
        print(call(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist), end="")
        if not options.no_install:
            print(try_wheel(wheel.resolve(), Path(folder)), end="")


if __name__ == "__main__":
    try:
        main()
    except DistributionError as error:
        raise SystemExit(str(error)) from None
