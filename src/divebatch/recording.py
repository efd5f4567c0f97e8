"""From what was seen and decided to the epoch's record."""

import math
from typing import Any

from divebatch.measurement import Decision, Measurement
from divebatch.records import EpochRecord


def epoch_record(seen: Measurement, decision: Decision, *, at_fixed_weights: bool, **known: Any) -> EpochRecord:
    """Return the record of an epoch.

    Args:
        seen: What the policy saw at the epoch's end.
        decision: What it made of it.
        at_fixed_weights: Whether what was measured is the gradient noise scale.
        known: Further fields of the record: `lr`, `next_lr`, `measured` and so on.
    """
    return EpochRecord(
        epoch=seen.epoch,
        batch_size=seen.batch_size,
        steps=seen.step,
        samples=seen.samples,
        train_loss=None if seen.loss is None else float(seen.loss),
        next_batch_size=decision.batch_size,
        reason=decision.reason,
        **_measured(seen, at_fixed_weights),
        **known,
    )


def _measured(seen: Measurement, at_fixed_weights: bool) -> dict[str, Any]:
    found = seen.diversity
    if found is None:
        return {}
    ends = (None, None) if found.spread is None else found.noise_scale_interval()
    # JSON has no infinity: an open end is left out.
    low, high = (None if end is None or math.isinf(end) else end for end in ends)
    values: dict[str, Any] = {
        "skipped_samples": found.skipped_samples,
        "diversity": found.value if found.is_defined else None,
        "diversity_low": None if low is None else (1 + low) / found.num_samples,
        "diversity_high": None if high is None else (1 + high) / found.num_samples,
    }
    # Along changing weights the same ratio is not the gradient noise scale.
    if not at_fixed_weights:
        return values
    noise_scale = found.noise_scale if found.is_defined else None
    return {**values, "noise_scale": noise_scale, "noise_scale_low": low, "noise_scale_high": high}
