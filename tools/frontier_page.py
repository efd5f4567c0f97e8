"""Put the scores of results/frontier into docs/when-it-pays.md and README.md, and draw docs/figures/frontier.svg.

`python tools/frontier_page.py` writes all of them anew. Each table stands between two comments.
"""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path

from divebatch.report.frontier import Frontier, Score, read_trials, score

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "results" / "frontier"
FIGURE = ROOT / "docs" / "figures" / "frontier.svg"
BEGIN, END = "<!-- made by tools/frontier_page.py -->\n", "<!-- end -->"

WORKLOADS = {
    "gpt": "byte GPT, AdamW, cosine",
    "gpt-long": "the same, three times as long",
    "lstm": "byte LSTM, AdamW, cosine",
    "linear": "linear regression, SGD, cosine",
    "linear-long": "the same, three times as long",
    "linear-adam": "linear regression, Adam, cosine",
    "mlp": "teacher and student, SGD, constant rate",
    "cnn10": "small CNN, CIFAR-10, SGD, cosine",
    "cnn100": "small CNN, CIFAR-100, SGD, cosine",
}
METHODS = {
    "auto": "`Auto`",
    "seesaw-doublings": "Seesaw",
    "late-switch": "late switch",
    "noise-doubling": "`NoiseDoubling`",
    "adabatch": "AdaBatch",
    "divebatch": "DiveBatch",
}
PAGES = {"docs/when-it-pays.md": tuple(METHODS), "README.md": ("auto", "seesaw-doublings", "adabatch", "divebatch")}
"""The methods in the table of each page."""
EDGE = 11.0
"""The right end of the picture's axis."""
COLORS = ("#0072B2", "#009E73", "#E69F00", "#882255", "#56B4E9", "#D55E00")


def scores() -> dict[str, Frontier]:
    """Return the frontier of each workload that has records, in the order of the page."""
    found = {each.workload: each for each in score(read_trials(RECORDS))}
    return {name: found[name] for name in WORKLOADS if name in found}


def of_method(frontier: Frontier, method: str) -> Score | None:
    """Return the score with the most seeds, and of several the one whose first batch is nearest to the knee."""
    own = [each for each in frontier.scores if each.method == method and each.num_seeds]
    knee = frontier.knee or 1
    return max(own, key=lambda each: (each.num_seeds, -abs(math.log(each.batch_size / knee))), default=None)


def cell(found: Score | None, seeds: int) -> str:
    """Return the words of a score; `seeds` is how many the row has."""
    if found is None:
        return ""
    fewer = f", {found.num_seeds} seed{'s' * (found.num_seeds > 1)}" if found.num_seeds < seeds else ""
    if found.ratio is None:
        if "diverged" in found.problem:
            return "diverges" + fewer
        return ("more than the knee's" if "flat" in found.problem else "worse than all sizes") + fewer
    bound = "<= " if found.is_bound else ""
    interval = f" ({found.interval[0]:.2f} to {found.interval[1]:.2f})" if found.interval and not found.is_bound else ""
    return f"{bound}{found.ratio:.2f}{interval}{fewer}"


def table(found: dict[str, Frontier], methods: Sequence[str]) -> str:
    """Return a table with a row for each workload and a column for each method; the lowest ratio is bold."""
    heads = " | ".join(METHODS[method] for method in methods)
    lines = [f"| workload | start | {heads} |", "|" + "---|" * (len(methods) + 2)]
    for name, each in found.items():
        if each.problems:
            lines.append(f"| {WORKLOADS[name]} | | not scored: {each.problems[0]} |" + " |" * (len(methods) - 1))
            continue
        own = {method: of_method(each, method) for method in methods}
        start = next((str(one.batch_size) for one in own.values() if one), "")
        seeds = max((one.num_seeds for one in own.values() if one), default=0)
        words = {method: cell(one, seeds) for method, one in own.items()}
        ratios = {method: one.ratio for method, one in own.items() if one and one.ratio is not None}
        best = min(ratios, key=lambda method: ratios[method], default="")
        cells = [f"**{each}**" if method == best else each for method, each in words.items()]
        lines.append(f"| {WORKLOADS[name]} ({seeds} seeds) | {start} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Frontier], path: Path) -> None:
    """Draw a line of points for each workload: ratios, with their intervals."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "frontier"
    from matplotlib.figure import Figure

    shown = {name: each for name, each in found.items() if not each.problems}
    figure = Figure(figsize=(8.4, 0.62 * len(shown) + 1.3), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1.0, color="#999999", linewidth=1)
    for number, (method, label) in enumerate(METHODS.items()):
        color, is_named = COLORS[number], False
        for row, each in enumerate(shown.values()):
            one = of_method(each, method)
            if one is None or "flat" in one.problem:
                continue
            place = -row + 0.3 - 0.12 * number
            if one.ratio is None:
                axes.plot(EDGE, place, "x", color=color, markersize=5, clip_on=False)
                continue
            low, high = one.interval or (one.ratio, one.ratio)
            axes.plot([low, high], [place, place], color=color, linewidth=1.5)
            marker = "<" if one.is_bound else "D" if method == "auto" else "o"
            axes.plot(one.ratio, place, marker, color=color, label=None if is_named else label.strip("`"))
            is_named = True
    axes.plot([], [], "<", color="#666666", label="at most")
    axes.plot([], [], "x", color="#666666", label="worse than all sizes, or diverged")
    axes.set_yticks([-row for row in range(len(shown))], [WORKLOADS[name] for name in shown])
    axes.set_xscale("log", base=2)
    ticks = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0)
    axes.set_xlim(0.28, EDGE)
    axes.set_xticks(ticks, [f"{each:g}" for each in ticks])
    axes.set_xlabel("steps over those of tuned fixed batches, at equal loss")
    axes.minorticks_off()
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def page(text: str, made: str) -> str:
    """Return a page with a table in its place."""
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    return re.sub(pattern, lambda _: BEGIN + made + END, text, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args(arguments)
    found = scores()
    draw(found, options.figure)
    for name, methods in PAGES.items():
        path = ROOT / name
        path.write_text(page(path.read_text(), table(found, methods)))
    print(table(found, tuple(METHODS)))


if __name__ == "__main__":
    main()
