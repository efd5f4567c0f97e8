"""Policies: pure rules that turn a `Measurement` into a `Decision`. No torch in here."""

from divebatch.policies.auto import Auto
from divebatch.policies.by_loss import AdaDamp, Plateau
from divebatch.policies.by_noise import CABS, GradientDamp, InnerProductTest, NoiseScale, NormTest, SimiGrad
from divebatch.policies.by_schedule import AnnealToBatch, HorizonRamp, Seesaw, SmithSchedule
from divebatch.policies.catalog import POLICIES, make_policy
from divebatch.policies.divebatch import DiveBatch
from divebatch.policies.goodput import Goodput
from divebatch.policies.policy import Policy
from divebatch.policies.timetables import AdaBatch, Fixed, GeoDamp, PadaDamp, SampleSchedule
from divebatch.policies.wrappers import Doublings, Rounded, SpillOver, Steady, WarmUp

__all__ = [
    "CABS",
    "POLICIES",
    "AdaBatch",
    "AdaDamp",
    "AnnealToBatch",
    "Auto",
    "DiveBatch",
    "Doublings",
    "Fixed",
    "GeoDamp",
    "Goodput",
    "GradientDamp",
    "HorizonRamp",
    "InnerProductTest",
    "NoiseScale",
    "NormTest",
    "PadaDamp",
    "Plateau",
    "Policy",
    "Rounded",
    "SampleSchedule",
    "Seesaw",
    "SimiGrad",
    "SmithSchedule",
    "SpillOver",
    "Steady",
    "WarmUp",
    "make_policy",
]
