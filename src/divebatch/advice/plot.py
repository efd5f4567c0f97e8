"""An advice as one picture: noise over the run, throughput, and the time to the same progress."""

import math
from typing import TYPE_CHECKING

from divebatch.advice.result import Advice
from divebatch.advice.tradeoff import time_to_progress
from divebatch.report.drawing import Drawing, add_heading, finish, require_matplotlib, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOR, CHOSEN, CAP, REFERENCE = "#0072B2", "#D55E00", "#009E73", "#999999"
MOST_TICKS = 7


def draw_advice(name: str, advice: Advice) -> Drawing:
    """Three panels."""
    require_matplotlib()
    with settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11.7, 3.6), layout="constrained")
        noise, speed, progress = figure.subplots(1, 3)
        _draw_noise(noise, advice)
        _draw_speed(speed, advice)
        _draw_progress(progress, advice)
        heading = f"Start with batch {advice.batch_size}" if advice.is_clear else "Too noisy to advise"
        add_heading(figure, f"{heading}; growth stops paying at {advice.max_batch_size}")
        return finish(name, heading, figure, (_caption(),))


def _caption() -> str:
    return (
        "Left: the noise scale over the short run with 95 % intervals. Middle: samples a second as timed (dots) and by "
        "the straight line t(b) = fixed + b * per_sample (line). Right: time to the same progress, the best as 1; "
        "the band is the noise scale's interval."
    )


def _draw_noise(axes: "Axes", advice: Advice) -> None:
    stretches = advice.noise.stretches
    known = [each for each in stretches if each.value is not None]
    highest = max(
        [each.value or 1.0 for each in known] + [each.high for each in known if math.isfinite(each.high)] + [1.0]
    )
    for each in stretches:
        middle, top = (each.first + each.last) / 2, each.high if math.isfinite(each.high) else 10 * highest
        axes.plot([middle, middle], [max(each.low, 0.5), top], color=COLOR, linewidth=1.2)
    axes.plot([(each.first + each.last) / 2 for each in known], [max(each.value or 0.0, 0.5) for each in known],
              color=COLOR, marker="o")  # fmt: skip
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
    axes.axvline(advice.max_batch_size, color=CAP, linewidth=1.5)
    axes.annotate("growth stops paying", (advice.max_batch_size, 0.04), xycoords=("data", "axes fraction"),
                  xytext=(-4, 0), textcoords="offset points", rotation=90, color=CAP, ha="right")  # fmt: skip
    axes.set_ylim(bottom=0)
    _size_axis(axes, advice)
    axes.set_title("Samples a second", loc="left")


def _draw_progress(axes: "Axes", advice: Advice) -> None:
    now, sizes = advice.noise.now, advice.times.sizes
    curves = [dict(time_to_progress(advice.times, noise)) for noise in (now.low, now.high)]
    low, high = ([min(c[size] for c in curves) for size in sizes], [max(c[size] for c in curves) for size in sizes])
    axes.fill_between(sizes, low, high, color=COLOR, alpha=0.15, linewidth=0)
    if now.value is not None:
        middle = [time for _, time in time_to_progress(advice.times, now.value)]
        axes.plot(sizes, middle, color=COLOR, marker="o")
    if advice.batch_size is not None:
        axes.axvline(advice.batch_size, color=CHOSEN, linewidth=1.5)
        axes.annotate("start", (advice.batch_size, 0.92), xycoords=("data", "axes fraction"),
                      xytext=(4, 0), textcoords="offset points", color=CHOSEN, fontsize=9)  # fmt: skip
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


def _plain_ticks(axis: "object") -> None:
    """Digits, also where a log axis spans less than a power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=9))  # type: ignore[attr-defined]
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # type: ignore[attr-defined]
    axis.set_minor_formatter(NullFormatter())  # type: ignore[attr-defined]
