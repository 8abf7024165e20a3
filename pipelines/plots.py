"""One look for all figures: colour-blind safe, with one colour per method, and written as the same bytes each time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axis import Axis
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import Bbox
from numpy.typing import ArrayLike

#: One colour per method, in all figures (Okabe and Ito's palette, and others for what has come since).
COLOURS = {
    "data_parallel": "#000000",
    "fsdp": "#999999",
    "diloco": "#0072B2",
    "streaming": "#009E73",
    "noloco": "#D55E00",
    "partial": "#CC79A7",
    "protocol": "#E69F00",
    "averaging": "#56B4E9",
    "together": "#7B3294",
    "muon": "#666666",
    "muloco": "#8C564B",
    "sparse": "#17BECF",
    "demo": "#BCBD22",
    "gasloc": "#E7298A",
    "selective": "#A6761D",
    "hundred": "#666600",
    "projected": "#B3B300",
}
#: One line style per number of replicas, where a figure shows several.
DASHES = {1: (0, (1, 1)), 2: "-", 4: "--", 8: ":"}

COLUMN_WIDTH = 5.5  # inches


def theme() -> None:
    """Set the look of all figures; call it once at the top of a notebook."""
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
        "legend.handlelength": 3.2,
        "legend.frameon": True,  # white, so that no grid shows through a legend that lies on it
        "legend.framealpha": 0.8,
        "legend.edgecolor": "none",
        "legend.facecolor": "white",
    }


def figure(columns: int = 1, height: float = 2.6) -> tuple[Figure, list[plt.Axes]]:
    """Return a figure of `columns` panels side by side, and the list of their axes, also where there is one.

    A single panel has the width of a column, several together one and a half times that. height: in inches.
    """
    fig, axes = plt.subplots(1, columns, figsize=(COLUMN_WIDTH * (1 if columns == 1 else 1.5), height), squeeze=False)
    return fig, list(axes[0])


def band(ax: plt.Axes, x: ArrayLike, runs: ArrayLike, **style: Any) -> Line2D:
    """Draw the mean of runs [runs, points] as a line, with a shade from the least to the most of them.

    The line is returned.
    """
    values = np.asarray(runs, float)
    (line,) = ax.plot(x, values.mean(0), **style)
    if len(values) > 1:
        ax.fill_between(x, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, lw=0)
    return line


def points(ax: plt.Axes, x: Sequence[float], values: Sequence[Sequence[float]], **style: Any) -> None:
    """Draw the mean of the values at each x, with a bar from the least to the most of them."""
    means = np.array([np.mean(some) for some in values])
    ends = [means - [min(some) for some in values], [max(some) for some in values] - means]
    ax.errorbar(x, means, yerr=ends, elinewidth=0.9, capsize=2, **style)


def intervals(
    ax: plt.Axes,
    x: ArrayLike,
    values: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    hollow: ArrayLike = False,
    **style: Any,
) -> ErrorbarContainer:
    """Draw values, each with a bar from `low` to `high`, and return their handle for a legend.

    There is no bar where these are NaN. hollow: which of the values have a white face, as they are of too few seeds.
    """
    x, values, low, high, hollow = np.broadcast_arrays(*np.atleast_1d(x, values, low, high, hollow))
    style = {"ls": "none", "elinewidth": 0.8} | style
    drawn = ax.errorbar(x, values, yerr=[values - low, high - values], **style)
    if hollow.any():
        face = {name: style[name] for name in ("marker", "ms", "mec", "mew") if name in style}
        color = drawn.lines[0].get_color()
        ax.plot(x[hollow], values[hollow], **{"ls": "none", "color": color, "mfc": "white", "zorder": 3} | face)
    return drawn


def mark_cut(ax: plt.Axes, x: ArrayLike, low: ArrayLike, high: ArrayLike, color: str) -> None:
    """Put a mark on the edge of the axes where a bar from `low` to `high` ends outside of them.

    The limits of the axes must have been set.
    """
    bottom, top = ax.get_ylim()
    x, low, high = np.broadcast_arrays(*(np.asarray(v, float) for v in np.atleast_1d(x, low, high)))
    for outside, edge, mark in ((low < bottom, bottom, "v"), (high > top, top, "^")):
        if outside.any():
            ax.plot(x[outside], np.full(outside.sum(), edge), mark, ms=4, color=color, clip_on=False, zorder=4)


def log_ticks(axis: Axis, subs: Sequence[float] = (1, 3)) -> None:
    """Give a logarithmic axis ticks at the multiples `subs` of each power of ten, labelled with plain numbers."""
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def save(fig: Figure, path: Path) -> None:
    """Write a figure to `path`.svg and `path`.png, without dates or versions in them; make the folder if it is missing.

    The figure is written larger than it is where a legend would be cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    box = _with_legends(fig)
    fig.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None}, bbox_inches=box)
    fig.savefig(path.with_suffix(".png"), metadata={"Software": None}, bbox_inches=box)


def _with_legends(fig: Figure) -> Bbox | None:
    """Return the extent of a figure with its legends, in inches; None where they are within it."""
    fig.draw_without_rendering()  # they are laid out now
    legends = [legend.get_window_extent() for legend in fig.legends]
    extent = Bbox.union([fig.bbox, *legends])
    if extent.width <= fig.bbox.width + 1 and extent.height <= fig.bbox.height + 1:
        return None
    return extent.transformed(fig.dpi_scale_trans.inverted())
