"""Policies: pure rules that turn a `Measurement` into a `Decision`. No torch in here."""

from divebatch.policies.adabatch import AdaBatch
from divebatch.policies.adadamp import AdaDamp, GeoDamp, GradientDamp, PadaDamp
from divebatch.policies.auto import Auto
from divebatch.policies.bounds import Bounds
from divebatch.policies.cabs import CABS
from divebatch.policies.catalog import POLICIES, make_policy
from divebatch.policies.divebatch import DiveBatch
from divebatch.policies.fixed import Fixed
from divebatch.policies.goodput import Goodput
from divebatch.policies.inner_product_test import InnerProductTest
from divebatch.policies.noise_scale import NoiseScale
from divebatch.policies.norm_test import NormTest
from divebatch.policies.plateau import Plateau
from divebatch.policies.policy import Policy
from divebatch.policies.sample_schedule import SampleSchedule
from divebatch.policies.schedule_to_batch import Seesaw, SmithSchedule
from divebatch.policies.simigrad import SimiGrad
from divebatch.policies.wrappers import Doublings, Rounded, SpillOver, Steady, WarmUp

__all__ = [
    "CABS",
    "POLICIES",
    "AdaBatch",
    "AdaDamp",
    "Auto",
    "Bounds",
    "DiveBatch",
    "Doublings",
    "Fixed",
    "GeoDamp",
    "Goodput",
    "GradientDamp",
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
