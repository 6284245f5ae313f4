"""Draw the figures of README.md into docs/assets/benchmarks.svg.

python benchmarks/plots.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
OURS, THEIRS = "#3b6fd4", "#b9bec9"

STEPS = {  # step over torch's best, sequence 64 and 256 (90dbd172)
    "zbpp 1F1B": (0.997, 1.003),
    "zbpp ZBH1": (0.943, 0.955),
    "zbpp ZBH2": (0.921, 0.928),
    "zbpp ZBV": (1.277, 1.308),
    "torch 1F1B": (1.000, 1.000),
    "torch ZeroBubble": (1.096, 1.072),
}
SPLIT = {  # (B + W) / full backward: ours, torch's (8bac2bcd)
    "MLP": (0.998, 1.009),
    "block": (1.010, 1.050),
    "softmax": (1.000, 1.041),
    "dropout": (1.015, 1.043),
    "long": (0.974, 1.033),
    "conv": (1.006, 1.075),
    "experts": (1.012, 1.028),
}
GAINS = {  # % over the barrier: measured, simulated (fc6b34ab)
    "1F1B, 4": (0.6, 0.6),
    "ZBH1, 4": (0.8, 0.7),
    "ZBH2, 4": (11.8, 12.1),
    "ZBV, 4": (6.0, 6.1),
    "1F1B, 8": (0.1, 0.4),
    "ZBH1, 8": (1.1, 0.5),
    "ZBH2, 8": (13.2, 14.0),
    "ZBV, 8": (6.7, 7.0),
}


def bars(ax: Any, title: str, table: dict[str, Any], names: tuple[str, str]) -> None:
    """Two bars for each name."""
    places = range(len(table))
    for side, name in enumerate(names):
        heights = [pair[side] for pair in table.values()]
        shifted = [place + 0.4 * side - 0.2 for place in places]
        ax.bar(shifted, heights, 0.38, label=name, color=(OURS, THEIRS)[side])
    ax.set_xticks(places, table, rotation=35, ha="right", fontsize=8)
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=8)


def plans(ax: Any) -> None:
    """Bubbles of published generators and of zbpp, with one and with two chunks."""
    import sys

    sys.path.append(str(ROOT / "benchmarks" / "planner"))
    from public import KINDS, case_of, judged

    rows = json.loads((ROOT / "tests" / "data" / "peers_public.json").read_text())
    for mode, kind in KINDS.items():
        points = [
            (row[kind]["bubble"], judged(mode, row["p"], row["m"],
             case_of(row, row["limit"]), "fast")[0])
            for row in rows["rows"] if kind in row
        ]  # fmt: skip
        ax.scatter(*zip(*points, strict=True), s=12, label=mode)
    most = ax.get_xlim()[1]
    ax.plot((0, most), (0, most), color=THEIRS, lw=1)
    ax.set_xlabel("bubble, best published generator", fontsize=8)
    ax.set_ylabel("bubble, zbpp, same memory", fontsize=8)
    ax.set_title("Plans", fontsize=10)
    ax.legend(fontsize=8)


def main() -> None:
    """Draw four panels."""
    plt.rcParams |= {"svg.hashsalt": "zbpp", "svg.fonttype": "none"}  # always the same
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    bars(axes[0, 0], "Step / torch's best", STEPS, ("sequence 64", "256"))
    axes[0, 0].set_ylim(0.8, 1.35)
    bars(axes[0, 1], "(B + W) / full backward", SPLIT, ("zbpp", "torch"))
    axes[0, 1].set_ylim(0.9, 1.1)
    gains = "Gain of post-validation, % (mode, stages)"
    bars(axes[1, 0], gains, GAINS, ("measured", "simulated"))
    plans(axes[1, 1])
    out = ROOT / "docs" / "assets" / "benchmarks.svg"
    figure.savefig(out, metadata={"Date": None})
    print(out)


if __name__ == "__main__":
    main()
