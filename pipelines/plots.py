"""One look for every figure: colour-blind safe, one colour a method, the same bytes each time."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.figure import Figure

#: One colour a method, in all figures (Okabe and Ito's palette, and others for what has come since).
COLOURS = {
    "data_parallel": "#000000",
    "fsdp": "#999999",
    "diloco": "#0072B2",
    "streaming": "#009E73",
    "noloco": "#D55E00",
    "partial": "#CC79A7",
    "subspace": "#E69F00",
    "averaging": "#56B4E9",
    "together": "#7B3294",
    "muon": "#666666",
    "muloco": "#8C564B",
    "sparse": "#17BECF",
    "demo": "#BCBD22",
    "gasloc": "#E7298A",
}
#: One line style a replica count, where a figure shows several.
DASHES = {1: (0, (1, 1)), 2: "-", 4: "--", 8: ":"}

COLUMN_WIDTH = 5.5  # inches


def theme() -> None:
    """Set the look; call it once at the top of a notebook."""
    sns.set_theme(style="whitegrid", context="paper", font_scale=1.0)
    mpl.rcParams |= {
        "svg.hashsalt": "lowcomm",
        "figure.dpi": 110,
        "savefig.dpi": 160,
        "figure.constrained_layout.use": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.linewidth": 0.5,
        "lines.linewidth": 1.4,
        "legend.frameon": False,
    }


def figure(columns: int = 1, height: float = 2.6) -> tuple[Figure, list[plt.Axes]]:
    """A figure of `columns` panels at column width; always a list of axes."""
    fig, axes = plt.subplots(1, columns, figsize=(COLUMN_WIDTH * (1 if columns == 1 else 1.5), height), squeeze=False)
    return fig, list(axes[0])


def save(fig: Figure, path: Path) -> None:
    """Write `path`.svg and `path`.png without dates or versions in them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
    fig.savefig(path.with_suffix(".png"), metadata={"Software": None})
