"""An epoch's record as one line for people: what was seen, what was decided, and why."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # records knows this file
    from divebatch.records import EpochRecord


def line(record: "EpochRecord") -> str:
    """Return the line: `epoch 3: noise scale 812 (640-990), batch 128 -> 256, lr 0.1 -> 0.2 (why)`.

    Args:
        record: The record of a finished epoch.
    """
    parts = [part for part in (seen_in_words(record), _left_out(record)) if part]
    parts.append(_change("batch", record.batch_size, record.next_batch_size))
    parts.append(_change("lr", record.lr, record.next_lr))
    reason = f" ({record.reason})" if record.reason else ""
    return f"epoch {record.epoch}: " + ", ".join(parts) + reason


def seen_in_words(record: "EpochRecord") -> str:
    """Return what a policy had to act on: the noise scale or the diversity; the loss where gradients do not matter.

    Args:
        record: The record of a finished epoch. Where its `measured` is None, nothing was to be measured.
    """
    if measured := _measured_in_words(record):
        return measured
    if record.measured:
        return "noise scale not known"
    if record.measured is False:
        return "not measured"
    return "" if record.train_loss is None else f"loss {record.train_loss:.4g}"


def _measured_in_words(record: "EpochRecord") -> str:
    value, low, high = record.noise_scale, record.noise_scale_low, record.noise_scale_high
    if value is not None and low is not None and high is not None:
        return f"noise scale {value:.0f} ({low:.0f}-{high:.0f})"
    if low is not None:
        # Without an upper end ||G||^2 cannot be told from zero, and the value may be anything.
        return f"noise scale at least {low:.0f}" if low > 0 else "noise scale not known"
    if value is not None:
        return f"noise scale {value:.0f}"
    return "" if record.diversity is None else f"diversity {record.diversity:.4g}"


def _left_out(record: "EpochRecord") -> str:
    return f"{record.skipped_samples} samples left out" if record.skipped_samples else ""


def _change(name: str, now: float, after: float | None) -> str:
    first = _shown(now)
    return f"{name} {first}" if after is None or _shown(after) == first else f"{name} {first} -> {_shown(after)}"


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
