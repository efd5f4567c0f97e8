"""How the learning rate follows the batch size, under every scheduler and under none."""

from divebatch.lr.adam import require_adam, scale_settings
from divebatch.lr.coupling import GainSum, LrCoupling
from divebatch.lr.factors import BY_NOISE, BY_SIZE, COUPLINGS, Coupling, coupling_for, factor_of, require_known
from divebatch.lr.hand_set import Reading
from divebatch.lr.rates import Rates
from divebatch.lr.schedule_steps import ScheduleIn

__all__ = [
    "BY_NOISE",
    "BY_SIZE",
    "COUPLINGS",
    "Coupling",
    "GainSum",
    "LrCoupling",
    "Rates",
    "Reading",
    "ScheduleIn",
    "coupling_for",
    "factor_of",
    "require_adam",
    "require_known",
    "scale_settings",
]
