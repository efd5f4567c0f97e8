"""Draw advice as one figure; matplotlib is imported only if something is drawn."""

import math
from typing import TYPE_CHECKING, Any

from divebatch.advice.advice import Advice, time_to_progress
from divebatch.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CAPTION = (
    "Left: the noise scale over the short run with 95 % intervals. Middle: samples a second as timed (dots) and by "
    "the straight line t(b) = fixed + b * per_sample (line). Right: time to the same progress, the best as 1; "
    "the band is the noise scale's interval."
)
COLOR = "#0072B2"
CHOSEN = "#D55E00"
CAP = "#009E73"
REFERENCE = "#999999"
MOST_TICKS = 7


def draw_advice(advice: Advice) -> "Figure":
    """Draw three panels: noise over the run, samples a second, time to the same progress."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report") from error
    figure = Figure(figsize=(11.7, 3.6), layout="constrained")
    noise, speed, progress = figure.subplots(1, 3)
    _draw_noise(noise, advice)
    _draw_speed(speed, advice)
    _draw_progress(progress, advice)
    start = f"Start with batch {advice.batch_size}" if advice.is_clear else "Too noisy to advise"
    heading = f"{start}; growth stops paying at {advice.max_batch_size}"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def _draw_noise(axes: "Axes", advice: Advice) -> None:
    known = [each for each in advice.noise.stretches if each.value is not None]
    ends = [end for each in known for end in (each.value or 1.0, each.high)]
    highest = max([end for end in ends if math.isfinite(end)] + [1.0])
    for each in advice.noise.stretches:
        middle, top = (each.first + each.last) / 2, each.high if math.isfinite(each.high) else 10 * highest
        axes.plot([middle, middle], [max(each.low, 0.5), top], color=COLOR, linewidth=1.2)
    middles = [(each.first + each.last) / 2 for each in known]
    axes.plot(middles, [max(each.value or 0.0, 0.5) for each in known], color=COLOR, marker="o")
    axes.axhline(advice.reference_batch_size, color=REFERENCE, linewidth=1.2, linestyle=(0, (3, 2)))
    axes.set_yscale("log")
    axes.set_ylim(top=2 * highest)
    _plain_ticks(axes.yaxis)
    axes.set(xlabel=f"Step (at batch {advice.reference_batch_size}, dashed)")
    axes.set_title("Gradient noise scale (samples)", loc="left")


def _draw_speed(axes: "Axes", advice: Advice) -> None:
    times = advice.times
    fixed, per_sample = times.line()
    axes.plot(times.sizes, [size / (fixed + size * per_sample) for size in times.sizes], color=REFERENCE, linewidth=1.2)
    axes.plot(times.sizes, [size / s for size, s in times.measured], color=COLOR, marker="o", linestyle="none")
    axes.axvline(advice.max_batch_size, color=CAP, linewidth=1.5, label="growth stops paying")
    axes.legend(frameon=False)
    axes.set_ylim(bottom=0)
    _size_axis(axes, advice)
    axes.set_title("Samples a second", loc="left")


def _draw_progress(axes: "Axes", advice: Advice) -> None:
    now, sizes = advice.noise.now, advice.times.sizes
    curves = [time_to_progress(advice.times, noise) for noise in (now.low, now.high)]
    low, high = ([min(c[size] for c in curves) for size in sizes], [max(c[size] for c in curves) for size in sizes])
    axes.fill_between(sizes, low, high, color=COLOR, alpha=0.15, linewidth=0)
    if now.value is not None:
        middle = list(time_to_progress(advice.times, now.value).values())
        axes.plot(sizes, middle, color=COLOR, marker="o")
    if advice.batch_size is not None:
        axes.axvline(advice.batch_size, color=CHOSEN, linewidth=1.5, label="start")
        axes.legend(frameon=False)
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    _size_axis(axes, advice)
    axes.set_title("Time to the same progress (best = 1)", loc="left")


def _size_axis(axes: "Axes", advice: Advice) -> None:
    from matplotlib.ticker import NullLocator

    sizes = [size for size in advice.times.sizes if size & (size - 1) == 0] or list(advice.times.sizes)
    shown = sizes[:: math.ceil(len(sizes) / MOST_TICKS)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [str(size) for size in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="Batch size (samples)")


def _plain_ticks(axis: Any) -> None:
    """Label the axis in plain digits, even if a log axis spans less than a power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
