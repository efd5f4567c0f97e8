"""Finding a dataset on disk, with errors that say where to get it."""

from dataclasses import dataclass
from pathlib import Path

from divebatch.errors import DataError


@dataclass(frozen=True, slots=True)
class Origin:
    """A dataset's folder as its archive unpacks, and where that archive is."""

    folder: str
    url: str

    def find(self, data_dir: Path | None) -> Path:
        """The dataset's folder inside `data_dir`."""
        if data_dir is None:
            raise DataError(f"no data folder was given: pass data_dir=FOLDER, the one that holds {self._wanted}")
        found = data_dir / self.folder
        if found.is_dir():
            return found
        if data_dir.resolve().name == self.folder:
            raise DataError(
                f"'{data_dir}' is the dataset itself: give the folder that holds it, '{data_dir.resolve().parent}'"
            )
        missing = f"'{data_dir}' does not exist" if not data_dir.is_dir() else f"there is no folder '{found}'"
        raise DataError(f"{missing}: give the folder that holds {self._wanted}")

    @property
    def _wanted(self) -> str:
        return f"'{self.folder}' (unpacked from {self.url})"

    def require_file(self, path: Path) -> Path:
        """`path` if it is a file."""
        if not path.is_file():
            what = "is not a file" if path.exists() else "is missing"
            raise DataError(f"'{path}' {what}: unpack the archive from {self.url} again")
        return path

    def damaged(self, path: Path, what: str) -> DataError:
        """The error for a file that is there but wrong."""
        return DataError(f"'{path}': {what}. If the file is damaged, get it again from {self.url}")
