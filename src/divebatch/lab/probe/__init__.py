"""The critical batch size by experiment: branches from one point of training, each with a larger batch."""

from divebatch.lab.probe.branching import probe_critical_batch
from divebatch.lab.probe.verdict import Branch, Critical, Gap, Outcome, Probe

__all__ = ["Branch", "Critical", "Gap", "Outcome", "Probe", "probe_critical_batch"]
