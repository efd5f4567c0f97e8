"""Policies: pure rules that turn a `Measurement` into a `Decision`. No torch in here."""

from divebatch.policies.adabatch import AdaBatch
from divebatch.policies.bounds import Bounds
from divebatch.policies.catalog import POLICIES, make_policy
from divebatch.policies.divebatch import DiveBatch
from divebatch.policies.fixed import Fixed
from divebatch.policies.policy import Policy

__all__ = ["AdaBatch", "Bounds", "DiveBatch", "Fixed", "POLICIES", "Policy", "make_policy"]
