"""Put advice into plain sentences, the answer first."""

import math
from collections.abc import Iterator

from divebatch.advice.advice import MOST_MISFIT, SLACK, Advice, NoiseEstimate, good_size, time_to_progress
from divebatch.policies import Fixed


def in_words(advice: Advice) -> str:
    """Return the recommended start, the measurements and the reasons, in this order."""
    return "\n".join([_answer(advice), _noise(advice), _time(advice), *_reasons(advice), _growth(advice)])


def step_in_words(batch_size: int, seconds: float) -> str:
    """Return a line on the time of a step at one batch size."""
    return f"batch {batch_size}: {_seconds(seconds)} a step, {_rate(batch_size / seconds)} samples a second"


def _answer(advice: Advice) -> str:
    if advice.batch_size is not None:
        rate = f"{advice.lr_factor:.3g} times the learning rate that suits batch {advice.reference_batch_size}"
        rate = rate if advice.lr is None else f"learning rate {advice.lr:.3g}"
        policy = "Fixed()" if isinstance(advice.policy, Fixed) else f"Auto({advice.max_batch_size})"
        return f"Start with batch {advice.batch_size}, {rate} and {policy}."
    low, high = advice.batch_size_range
    why = f"what the interval allows leads to batch {low} as well as to batch {high}"
    why = "the mean gradient cannot be told from zero" if advice.noise.now.value is None else why
    return (
        f"This is too noisy to advise: {why}. "
        f"Measure over more steps (four times as many halve the interval), or at a larger batch size."
    )


def _noise(advice: Advice) -> str:
    now, first = advice.noise.now, advice.noise.stretches[0]
    change = "It grows" if now.low > first.high else "It falls" if now.high < first.low else "No change is certain"
    return (
        f"Noise scale: {_shown(now)}, over steps {now.first} to {now.last} at batch {advice.reference_batch_size}. "
        f"{change} (over the first {first.last} steps: {_shown(first)})."
    )


def _shown(noise: NoiseEstimate) -> str:
    end = f"{noise.high:.0f}" if math.isfinite(noise.high) else "no upper end"
    middle = "cannot be told" if noise.value is None else f"{noise.value:.0f} samples"
    return f"{middle} (95 %: {noise.low:.0f} to {end})"


def _time(advice: Advice) -> str:
    times = advice.times
    fixed, per_sample = times.line()
    fit = f"within {times.misfit:.0%}"
    if times.misfit > MOST_MISFIT:
        fit = f"badly, off by up to {times.misfit:.0%} (is the device busy, or slow at large batches?)"
    constant = f"{_seconds(fixed)} and " if fixed else ""
    balance = f"; half of batch {times.balance:.0f}'s time is fixed cost" if 1 <= times.balance < math.inf else ""
    where = f" on {advice.device}" if advice.device else ""
    return (
        f"A step{where} takes {constant}{_seconds(per_sample)} a sample, which fits {fit}{balance}. "
        f"Timed: batch {times.sizes[0]} to {times.sizes[-1]}; {times.stopped or 'as given'}."
    )


def _reasons(advice: Advice) -> Iterator[str]:
    size, noise, reference = advice.batch_size, advice.noise.now.value, advice.reference_batch_size
    if size is None or noise is None:
        return
    took, (low, high) = time_to_progress(advice.times, noise), advice.batch_size_range
    allowed = f" The interval allows {low} to {high}." if low != high else ""
    gain = ""
    if reference != size:
        ratio = took[reference] / took[size]
        longer = "about as long" if ratio < 1 + SLACK else f"{ratio:.2g} times as long"
        gain = f" Your batch {reference} would take {longer}."
    yield (
        f"Batch {size} takes {1 + noise / size:.2g} times the fewest possible steps with this noise, and no other "
        f"batch that was timed gets more than 5 % faster to the same progress.{allowed}{gain}"
    )
    root = ", the square root for an Adam-like optimizer" if advice.adaptive else ""
    yours = "" if advice.reference_lr is None else f"your {advice.reference_lr:g} at batch {reference} times "
    yield (
        f"The learning rate is {yours}{advice.lr_factor:.3g}, by (1 + B/{reference}) / (1 + B/b) with B the noise "
        f"scale{root}."
    )


def _growth(advice: Advice) -> str:
    times, saturated = advice.times, good_size(advice.times, math.inf)
    speed = _rate(saturated / dict(times.measured)[saturated])
    why = f"from there on the device handles no more samples a second ({speed}), whatever the noise"
    if saturated == times.sizes[-1]:
        why = f"the largest that was timed, and still the fastest ({speed} samples a second)"
    data = f" The data has {advice.dataset_size} samples." if advice.dataset_size == times.sizes[-1] else ""
    fixed = " So a batch that grows would gain nothing here." if isinstance(advice.policy, Fixed) else ""
    auto = " Auto grows up to there as the learning rate falls; at a constant rate, pass it total_samples too."
    then = fixed or (auto if advice.is_clear else "")
    return f"Growth stops paying at batch {advice.max_batch_size}: {why}.{data}{then}"


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
