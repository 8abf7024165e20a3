"""What figures draw of seeds: means, bars and shades from the least to the most, marks of cut bars; whole legends."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from pipelines import plots


@pytest.fixture
def ax() -> Generator[plt.Axes]:
    """Axes of a figure that is closed again."""
    fig, (ax,) = plots.figure()
    yield ax
    plt.close(fig)


def test_bars_are_from_the_least_to_the_most_of_the_seeds(ax: plt.Axes) -> None:
    plots.points(ax, [1, 2], [[3.0, 4.0, 8.0], [6.0]], color="black")
    assert ax.get_lines()[0].get_ydata().tolist() == [5.0, 6.0]
    (bars,) = ax.collections
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[3.0, 8.0], [6.0, 6.0]]


def test_a_band_is_about_the_mean_of_several_runs_alone(ax: plt.Axes) -> None:
    line = plots.band(ax, [1, 2], [[1.0, 2.0], [3.0, 6.0]], color="black")
    assert line.get_ydata().tolist() == [2.0, 4.0]
    (shade,) = ax.collections
    assert {tuple(point) for point in shade.get_paths()[0].vertices} == {(1, 1), (2, 2), (2, 6), (1, 3)}
    plots.band(ax, [1, 2], [[1.0, 2.0]], color="black")
    assert len(ax.collections) == 1


def test_an_interval_is_about_its_value_and_a_mark_of_too_few_seeds_is_hollow(ax: plt.Axes) -> None:
    style = {"marker": "D", "ms": 5, "color": "red"}
    plots.intervals(
        ax, [1, 2, 3], [5.0, 6.0, 7.0], [4.0, np.nan, 6.5], [8.0, np.nan, 7.5], [False, True, False], **style
    )
    (bars,) = ax.collections
    assert [segment[:, 1].tolist() for segment in bars.get_segments() if len(segment)] == [[4.0, 8.0], [6.5, 7.5]]
    values, hollow = ax.get_lines()
    assert values.get_xydata().tolist() == [[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]
    assert hollow.get_xydata().tolist() == [[2.0, 6.0]]
    faces = [(line.get_marker(), line.get_color(), line.get_markerfacecolor()) for line in (values, hollow)]
    assert faces == [("D", "red", "red"), ("D", "red", "white")]


def test_a_bar_that_is_cut_has_a_mark_on_the_edge(ax: plt.Axes) -> None:
    ax.set(ylim=(0, 10))
    plots.mark_cut(ax, [1, 2, 3, 4], [-1, 2, 3, np.nan], [5, 12, 8, np.nan], "black")
    marks = {line.get_marker(): line.get_xydata().tolist() for line in ax.get_lines()}
    assert marks == {"v": [[1.0, 0.0]], "^": [[2.0, 10.0]]}
    plots.mark_cut(ax, 5, 2, 8, "black")  # a single one, which is inside
    assert len(ax.get_lines()) == 2


def test_ticks_of_a_logarithmic_axis_are_plain_numbers(ax: plt.Axes) -> None:
    ax.set(xscale="log", xlim=(0.5, 8))
    plots.log_ticks(ax.xaxis, (1, 2, 5))
    ax.figure.canvas.draw()
    shown = [label.get_text() for label in ax.get_xticklabels() if 0.5 <= label.get_position()[0] <= 8]
    assert shown == ["0.5", "1", "2", "5"]
    assert not any(label.get_text() for label in ax.get_xticklabels(minor=True))


@pytest.mark.parametrize("entries", [2, 40])
def test_a_legend_is_whole_however_long(entries: int, tmp_path: Path) -> None:
    """A figure grows with a legend that is higher than it is, and else is as large as it was made."""
    with plt.rc_context():
        plots.theme()
        dpi = plt.rcParams["savefig.dpi"]
        fig, (ax,) = plots.figure(1, height=2.0)
        for entry in range(entries):
            ax.plot([0, 1], [0, entry], label=f"entry {entry}")
        fig.legend(loc="outside right upper")
        plots.save(fig, tmp_path / "long")
        plt.close(fig)
    height, width = plt.imread(tmp_path / "long.png").shape[:2]
    assert width == pytest.approx(plots.COLUMN_WIDTH * dpi, abs=dpi / 10)
    if entries == 2:
        assert height == 2 * dpi
    else:
        assert height > 4 * dpi
