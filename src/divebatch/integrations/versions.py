"""Which releases of a framework an adapter was written for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from divebatch.errors import DivebatchError, MissingExtraError


class UnsupportedVersionError(DivebatchError, ImportError):
    """A framework of a version that the adapter does not know."""


@dataclass(frozen=True)
class Requirement:
    """A framework, by one or several of its package names, and its versions from `oldest` to before `too_new`."""

    packages: Sequence[str]
    extra: str
    oldest: str
    too_new: str
    excluded: Sequence[str] = ()
    """Releases in between that must not be used."""

    def installed(self) -> list[str]:
        """The packages that are here, all of a version that works; an error if there is none."""
        found = {package: there for package in self.packages if (there := _version(package)) is not None}
        if not found:
            raise MissingExtraError(self.packages[0], self.extra)
        for package, there in found.items():
            self._check(package, there)
        return list(found)

    def _check(self, package: str, there: str) -> None:
        too_old_or_new = not _numbers(self.oldest) <= _numbers(there) < _numbers(self.too_new)
        if too_old_or_new or there in self.excluded:
            without = f" without {', '.join(self.excluded)}" if self.excluded else ""
            raise UnsupportedVersionError(
                f"{package} {there} is not supported: divebatch[{self.extra}] works with "
                f"{self.oldest} up to, not including, {self.too_new}{without}"
            )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """2.6.6.post1 -> (2, 6, 6): enough to compare releases."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
