"""An advice in plain sentences."""

import math
from collections.abc import Iterator

from divebatch.advice.deadline import Deadline, Reach
from divebatch.advice.noise import NoiseEstimate
from divebatch.advice.result import MOST_MISFIT, Advice
from divebatch.advice.tradeoff import SLACK, good_size, time_to_progress
from divebatch.policies import Fixed


def in_words(advice: Advice) -> str:
    """Paragraphs: what was measured, what to start with, where growth ends, which policy."""
    return "\n".join([_noise(advice), _time(advice), *(_clear(advice) if advice.is_clear else _unclear(advice))])


def step_in_words(batch_size: int, seconds: float) -> str:
    """One size, as it is timed."""
    return f"batch {batch_size}: {_seconds(seconds)} a step, {_rate_of(batch_size / seconds)} samples a second"


def deadline_in_words(deadline: Deadline) -> str:
    """How far each batch size gets in the time, and which one to take."""
    noise = f"at a noise scale of {deadline.middle_noise:.0f} samples, for it grows in training"
    lines = [f"In {deadline.seconds:g} s of training, {noise}:"]
    lines += [_reach(reach) for reach in deadline.reaches]
    return "\n".join([*lines, _farthest(deadline), *_end_of_data(deadline)])


def _reach(reach: Reach) -> str:
    return (
        f"batch {reach.batch_size}: {reach.steps} steps, {reach.samples} samples, "
        f"{100 * reach.progress:.0f} % of the most progress"
    )


def _farthest(deadline: Deadline) -> str:
    size, (low, high) = deadline.batch_size, deadline.batch_size_range
    if size is None:
        return f"The noise scale cannot be told, so neither can the best batch: between {low} and {high}."
    least, most = deadline.close
    close = f"{least} to {most} within 2 %" if least != most else "no other within 2 %"
    rate = "" if deadline.lr is None else f", learning rate {deadline.lr:.3g}"
    other = f"; at the lower end of the noise measured now batch {low}, at ten times its upper end batch {high}"
    return f"The best by the model is batch {size} ({close}){rate}{other if low != high else ''}."


def _end_of_data(deadline: Deadline) -> Iterator[str]:
    """Where the data end before the time does, or are gone through several times."""
    chosen, there = deadline.chosen, deadline.advice.dataset_size
    if deadline.ends_with_data:
        yield (
            f"The one pass over {deadline.samples} samples ends before the time does: batch {chosen.batch_size} is "
            f"through after {_seconds(chosen.seconds)}."
        )
    elif there is not None and chosen.samples > there:
        yield f"Batch {chosen.batch_size} goes through the {there} samples {chosen.samples / there:.2g} times."


def _noise(advice: Advice) -> str:
    now, first = advice.noise.now, advice.noise.stretches[0]
    where = f"over steps {now.first} to {now.last} at batch {advice.reference_batch_size}"
    return f"Noise scale: {_shown(now)}, {where}. {_trend(first, now)}".rstrip()


def _trend(first: NoiseEstimate, now: NoiseEstimate) -> str:
    before = f"over the first {first.last} steps: {_shown(first)}"
    if now.low > first.high:
        return f"It grows ({before})."
    if now.high < first.low:
        return f"It falls ({before})."
    return f"No change is certain ({before})."


def _shown(noise: NoiseEstimate) -> str:
    end = f"{noise.high:.0f}" if math.isfinite(noise.high) else "no upper end"
    middle = "cannot be told" if noise.value is None else f"{noise.value:.0f} samples"
    return f"{middle} (95 %: {noise.low:.0f} to {end})"


def _time(advice: Advice) -> str:
    times = advice.times
    fixed, per_sample = times.line()
    fit = (
        f"within {times.misfit:.0%}"
        if times.misfit <= MOST_MISFIT
        else f"badly, off by up to {times.misfit:.0%} (is the device busy, or slow at large batches?)"
    )
    constant = f"{_seconds(fixed)} and " if fixed else ""
    line = f"{constant}{_seconds(per_sample)} a sample, which fits {fit}"
    balance = f"; half of batch {times.balance:.0f}'s time is fixed cost" if 1 <= times.balance < math.inf else ""
    sizes = f"batch {times.sizes[0]} to {times.sizes[-1]}"
    where = f" on {advice.device}" if advice.device else ""
    return f"A step{where} takes {line}{balance}. Timed: {sizes}; {times.stopped or 'as given'}."


def _unclear(advice: Advice) -> Iterator[str]:
    low, high = advice.batch_size_range
    why = (
        "the mean gradient cannot be told from zero"
        if advice.noise.now.value is None
        else f"what the interval allows leads to batch {low} as well as to batch {high}"
    )
    yield (
        f"This is too noisy to advise: {why}. "
        f"Measure over more steps (four times as many halve the interval), or at a larger batch size."
    )
    yield _growth(advice)


def _clear(advice: Advice) -> Iterator[str]:
    yield _start(advice)
    yield _rate(advice)
    yield _growth(advice)
    yield _policy(advice)


def _start(advice: Advice) -> str:
    size, noise = advice.batch_size, advice.noise.now.value
    assert size is not None
    assert noise is not None
    took = dict(time_to_progress(advice.times, noise))
    low, high = advice.batch_size_range
    range_ = f" (the interval allows {low} to {high})" if low != high else ""
    gain = ""
    if advice.reference_batch_size in took and advice.reference_batch_size != size:
        ratio = took[advice.reference_batch_size] / took[size]
        much = "about as long" if ratio < 1 + SLACK else f"{ratio:.2g} times as long"
        gain = f" Your batch {advice.reference_batch_size} would take {much}."
    return (
        f"Start with batch {size}{range_}: with this noise it takes {1 + noise / size:.2g} times the fewest possible "
        f"steps, and no other batch that was timed gets more than 5 % faster to the same progress.{gain}"
    )


def _rate(advice: Advice) -> str:
    factor, reference = advice.lr_factor, advice.reference_batch_size
    root = ", the square root for an Adam-like optimizer" if advice.adaptive else ""
    why = f"by (1 + B/{reference}) / (1 + B/b) with B the noise scale{root}"
    if advice.lr is None:
        return f"Learning rate: {factor:.3g} times what suits batch {reference}, {why}."
    return (
        f"Learning rate: {advice.lr:.3g}, your {advice.reference_lr:g} at batch {reference} times {factor:.3g}, {why}."
    )


def _growth(advice: Advice) -> str:
    cap, times = advice.max_batch_size, advice.times
    saturated = good_size(times, math.inf)
    speed = saturated / times.seconds(saturated)
    if saturated == times.sizes[-1]:
        why = f"the largest that was timed, and still the fastest ({_rate_of(speed)} samples a second)"
    else:
        why = f"from there on the device handles no more samples a second ({_rate_of(speed)}), whatever the noise"
    most = f" The data has {advice.dataset_size} samples." if advice.dataset_size == times.sizes[-1] else ""
    return f"Growth stops paying at batch {cap}: {why}.{most}"


def _policy(advice: Advice) -> str:
    if isinstance(advice.policy, Fixed):
        is_last = advice.max_batch_size == advice.times.sizes[-1]
        why = (
            "No larger batch was timed"
            if is_last
            else "A batch that grows with the noise would gain nothing on this device"
        )
        return f"Policy: Fixed(). {why}."
    cost = "" if advice.step_cost is None else f", step_cost={advice.step_cost:g}"
    coupling = ', lr_coupling="sqrt"' if advice.adaptive else ""
    estimator = "" if advice.estimator == "moments" else f' with estimator="{advice.estimator}"'
    return (
        f"Policy: Auto({advice.max_batch_size}{cost}{coupling}){estimator}. It grows with the noise from this start, "
        f"as far as that saves time here, and the learning rate with it."
    )


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def _rate_of(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
