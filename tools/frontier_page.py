"""Puts the scores of results/frontier into docs/when-it-pays.md and draws docs/figures/frontier.svg from them.

`python tools/frontier_page.py` writes both anew; the table stands between two comments of the page.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from divebatch.report.frontier import Frontier, Score, read_trials, score

ROOT = Path(__file__).parents[1]
RECORDS, PAGE = ROOT / "results" / "frontier", ROOT / "docs" / "when-it-pays.md"
FIGURE = ROOT / "docs" / "figures" / "frontier.svg"
BEGIN, END = "<!-- made by tools/frontier_page.py -->\n", "<!-- end -->"

WORKLOADS = {
    "gpt": "byte GPT, AdamW, cosine",
    "gpt-long": "the same, three times as long",
    "lstm": "byte LSTM, AdamW, cosine",
    "linear": "linear regression, SGD, cosine",
    "linear-long": "the same, three times as long",
    "linear-adam": "linear regression, Adam, cosine; 256 steps",
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
COLORS = ("#0072B2", "#009E73", "#E69F00", "#882255", "#56B4E9", "#D55E00")


def scores() -> dict[str, Frontier]:
    """The frontier of each workload that has records, in the order of the page."""
    found = {each.workload: each for each in score(read_trials(RECORDS))}
    return {name: found[name] for name in WORKLOADS if name in found}


def of_method(frontier: Frontier, method: str) -> Score | None:
    """The score from the largest first batch that is no larger than needed: the one with the most seeds."""
    own = [each for each in frontier.scores if each.method == method and each.num_seeds]
    return max(own, key=lambda each: (each.num_seeds, each.batch_size), default=None)


def cell(found: Score | None) -> str:
    if found is None:
        return ""
    if found.ratio is None:
        if "diverged" in found.problem:
            return "diverges"
        return "more than the knee's" if "flat" in found.problem else "worse than all sizes"
    bound = "<= " if found.is_bound else ""
    interval = f" ({found.interval[0]:.2f} to {found.interval[1]:.2f})" if found.interval else ""
    return f"{bound}{found.ratio:.2f}{interval}"


def table(found: dict[str, Frontier]) -> str:
    """The page's table: a row for each workload."""
    lines = ["| workload | start | " + " | ".join(METHODS.values()) + " |", "|" + "---|" * (len(METHODS) + 2)]
    for name, each in found.items():
        if each.problems:
            lines.append(f"| {WORKLOADS[name]} | | not scored: {each.problems[0]} |" + " |" * (len(METHODS) - 1))
            continue
        own = {method: of_method(each, method) for method in METHODS}
        start = next((str(one.batch_size) for one in own.values() if one), "")
        seeds = max((one.num_seeds for one in own.values() if one), default=0)
        cells = [f"**{cell(one)}**" if method == "auto" else cell(one) for method, one in own.items()]
        lines.append(f"| {WORKLOADS[name]} ({seeds} seeds) | {start} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Frontier], path: Path) -> None:
    """A line of points for each workload: ratios, with their intervals."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "frontier"
    from matplotlib.figure import Figure

    shown = {name: each for name, each in found.items() if not each.problems}
    figure = Figure(figsize=(8.4, 0.62 * len(shown) + 1.1), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1.0, color="#999999", linewidth=1)
    for number, (method, label) in enumerate(METHODS.items()):
        color, is_named = COLORS[number], False
        for row, each in enumerate(shown.values()):
            one = of_method(each, method)
            if one is None or one.ratio is None:
                continue
            low, high = one.interval or (one.ratio, one.ratio)
            place = -row + 0.3 - 0.12 * number
            axes.plot([low, high], [place, place], color=color, linewidth=1.5)
            marker = "D" if method == "auto" else "o"
            axes.plot(one.ratio, place, marker, color=color, label=None if is_named else label.strip("`"))
            is_named = True
    axes.set_yticks([-row for row in range(len(shown))], [WORKLOADS[name] for name in shown])
    axes.set_xscale("log", base=2)
    ticks = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
    axes.set_xticks(ticks, [f"{each:g}" for each in ticks])
    axes.set_xlabel("steps over those of tuned fixed batches, at equal loss")
    axes.minorticks_off()
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def page(text: str, made: str) -> str:
    """The page with the table in its place."""
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    return re.sub(pattern, lambda _: BEGIN + "\n" + made + "\n" + END, text, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args(arguments)
    found = scores()
    draw(found, options.figure)
    PAGE.write_text(page(PAGE.read_text(), table(found)))
    print(table(found))


if __name__ == "__main__":
    main()
