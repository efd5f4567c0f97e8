"""The policies by name, for configuration files and listings. A new policy adds one row."""

from collections.abc import Callable
from typing import Any

from divebatch.errors import ArgumentError
from divebatch.policies.adabatch import AdaBatch
from divebatch.policies.divebatch import DiveBatch
from divebatch.policies.fixed import Fixed
from divebatch.policies.policy import Policy

POLICIES: dict[str, Callable[..., Policy]] = {
    "fixed": Fixed,
    "adabatch": AdaBatch,
    "divebatch": DiveBatch,
}


def make_policy(kind: str, **settings: Any) -> Policy:
    """Build a policy from its name and settings, as a configuration file gives them.

    >>> make_policy("adabatch", max_batch_size=2048)
    AdaBatch(max_batch_size=2048, factor=2, every=20, lr_decay=1.0)
    """
    if kind not in POLICIES:
        raise ArgumentError(f"unknown policy {kind!r}; known: {', '.join(POLICIES)}")
    try:
        return POLICIES[kind](**settings)
    except TypeError as error:
        raise ArgumentError(f"policy {kind!r} cannot be built from {settings}: {error}") from error
