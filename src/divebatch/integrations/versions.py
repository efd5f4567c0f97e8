"""Checks that a supported version of a framework is installed."""

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from divebatch.errors import DivebatchError, MissingExtraError


class UnsupportedVersionError(DivebatchError, ImportError):
    """An error: the adapter does not support the installed version of its framework."""


def require_installed(
    packages: Sequence[str], *, extra: str, oldest: str, too_new: str, excluded: Sequence[str] = ()
) -> list[str]:
    """Return the installed packages of a framework; raise if there are none or a version is not supported.

    Versions from `oldest` up to, not including, `too_new` are supported, except for those in `excluded`.
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
    """Return the numbers of a version, such as (2, 6, 6) for 2.6.6.post1."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
