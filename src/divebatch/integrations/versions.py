"""Checks of the framework that an adapter was written for."""

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from divebatch.errors import DivebatchError, MissingExtraError


class UnsupportedVersionError(DivebatchError, ImportError):
    """A framework of a version that the adapter does not know."""


def require_installed(
    packages: Sequence[str], *, extra: str, oldest: str, too_new: str, excluded: Sequence[str] = ()
) -> list[str]:
    """Return the names of `packages`, all of one framework, that are installed; raise for none or a wrong version.

    Versions from `oldest` to before `too_new` will do, except for those that are `excluded`.
    """
    found = {package: there for package in packages if (there := _version(package)) is not None}
    if not found:
        raise MissingExtraError(packages[0], extra)
    for package, there in found.items():
        if there in excluded or not _numbers(oldest) <= _numbers(there) < _numbers(too_new):
            without = f" without {', '.join(excluded)}" if excluded else ""
            raise UnsupportedVersionError(
                f"{package} {there} is not supported: divebatch[{extra}] works with {oldest} up to, not including, "
                f"{too_new}{without}"
            )
    return list(found)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """2.6.6.post1 -> (2, 6, 6): enough to compare releases."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
