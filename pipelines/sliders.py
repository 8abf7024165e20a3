"""The planner with sliders, which set its question, above the figure and the table of its answer (notebook 71)."""

from __future__ import annotations

import html
import io
import time
from typing import Any

import ipywidgets as widgets
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lowcomm.cost.ingredients import Penalties
from lowcomm.cost.planner import Cluster, Job, plan, shown
from lowcomm.cost.predict import Links
from lowcomm.model.accounting import parameters
from lowcomm.model.presets import PRESETS
from lowcomm.settings import ConfigError
from pipelines import plots

#: What an answer shows of its table: the first `BEST` rows and the front, but no more than `ROWS` rows.
BEST, ROWS = 6, 14


def draw(table: pd.DataFrame, title: str = "") -> Figure:
    """Return a figure of loss against time of all configurations in a plan's table.

    The front is a line, and the advised configuration, the first, is a star.
    """
    fig, (ax,) = plots.figure(height=4.0)
    local, subspace = table["sync_every_steps"] > 0, table["ratio"] > 1
    dense_colour, local_colour, face = (plots.COLOURS[n] for n in ("data_parallel", "diloco", "protocol"))
    kinds = {
        "gradients": (~local & ~subspace, dense_colour, dense_colour),
        "gradients over a subspace": (~local & subspace, dense_colour, face),
        "local updates": (local & ~subspace, local_colour, local_colour),
        "local updates over a subspace": (local & subspace, local_colour, face),
    }
    for name, (chosen, edge, fill) in kinds.items():
        look = {"ms": 5, "mec": edge, "mfc": fill, "mew": 1.2, "alpha": 0.7, "ls": ""}
        ax.plot(table["days"][chosen], table["loss_percent"][chosen], "o", label=name, **look)
    front, advised = table[table["front"]].sort_values("days"), table.iloc[0]
    ax.step(front["days"], front["loss_percent"], where="post", color=plots.COLOURS["together"], lw=1, label="front")
    told = f"advised: {advised['method']}; on {advised['replicas']} x {advised['stages']} machines"
    star = {"ms": 15, "mfc": "#FFD92F", "mec": "black", "ls": "", "zorder": 3}
    ax.plot(advised["days"], advised["loss_percent"], "*", label="advised", **star)
    ax.set(xlabel="days", ylabel="loss over data-parallel, %", xscale="log")
    ax.set_title("\n".join(line for line in (title, told) if line), fontsize=9)
    plots.log_ticks(ax.xaxis)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return fig


def questions() -> dict[str, Any]:
    """Return the widgets that set a question, by the names of the numbers that they set."""
    look = {"layout": widgets.Layout(width="30em"), "style": {"description_width": "12em"}}
    late = look | {"continuous_update": False}
    log = late | {"readout_format": ".3g", "step": 0.1}
    sized = [name for name, config in PRESETS.items() if parameters(config).total > 3e8]
    return {
        "preset": widgets.Dropdown(options=sized, value="partial_updates/1.3b", description="model", **look),
        "nodes": widgets.SelectionSlider(options=[2, 4, 8, 16, 32, 64], value=8, description="machines", **late),
        "memory": widgets.FloatSlider(min=8, max=192, step=8, value=24, description="GB per machine", **late),
        "tflops": widgets.FloatLogSlider(min=0, max=3, value=60, description="TFLOP/s sustained", **log),
        "mbit": widgets.FloatLogSlider(min=0, max=5, value=100, description="Mbit/s", **log),
        "latency": widgets.FloatSlider(min=0, max=300, step=10, value=40, description="latency, ms", **late),
        "stragglers": widgets.FloatSlider(min=0, max=1, step=0.05, description="stragglers, std / mean", **late),
        "tokens": widgets.FloatSlider(min=5, max=200, step=5, value=20, description="tokens per parameter", **late),
    }


class Sliders:
    """Sliders, and below them a line that tells the state of the answer, its figure and its table.

    While an answer is computed the line says so, and the table of the answer before is pale.

    Args:
        penalties: the penalties of ingredients, by which methods are planned.

    Attributes:
        asked: the widgets that set the question (`questions`).
        view: the widget that holds all of this, to be displayed.
    """

    def __init__(self, penalties: Penalties):
        self.penalties, self.asked = penalties, questions()
        self.line, self.table = widgets.HTML(), widgets.HTML()
        self.figure = widgets.Image(format="png", layout=widgets.Layout(max_width="52em", display="none"))
        grid = widgets.GridBox(
            list(self.asked.values()), layout=widgets.Layout(grid_template_columns="repeat(auto-fit, 32em)")
        )
        self.view = widgets.VBox([grid, self.line, self.figure, self.table])
        for widget in self.asked.values():
            widget.observe(self.answer, names="value")
        self.answer()

    def answer(self, change: dict[str, Any] | None = None) -> None:
        """Compute and show the answer for the values that the sliders have now.

        change: the change of a widget that calls this, which is not read.
        """
        asked = {name: widget.value for name, widget in self.asked.items()}
        told = f"{asked['preset']}, {asked['nodes']} machines, {asked['mbit']:.3g} Mbit/s"
        before, began = self.table.value, time.perf_counter()
        self.line.value = f"&#8987; <b>computing</b>: {html.escape(told)} ..."
        self.table.value = f'<div style="opacity: 0.3">{before}</div>'
        try:
            table = self._plan(**asked)
        except (ConfigError, ValueError) as error:
            self._nothing(str(error))
            return
        if table.empty:
            self._nothing(f"nothing fits into {asked['memory']:g} GB on {asked['nodes']} machines")
            return
        fig, picture = draw(table, title=told), io.BytesIO()
        fig.savefig(picture, format="png")
        plt.close(fig)
        self.figure.value, self.figure.layout.display = picture.getvalue(), None
        page = shown(table[(table.index < BEST) | table["front"]].head(ROWS)).to_html(index=False, border=0)
        self.table.value = f'<div class="jp-RenderedHTMLCommon">{page}</div>'
        self.line.value = f"{len(table)} configurations fit, best first ({time.perf_counter() - began:.1f} s)"

    def _plan(
        self,
        preset: str,
        nodes: int,
        memory: float,
        tflops: float,
        mbit: float,
        latency: float,
        stragglers: float,
        tokens: float,
    ) -> pd.DataFrame:
        model = PRESETS[preset]
        cluster = Cluster(nodes, memory, tflops, Links(mbit, latency_ms=latency, stragglers=stragglers))
        return plan(cluster, Job(model, tokens * parameters(model).total), self.penalties)

    def _nothing(self, why: str) -> None:
        """Show why there is no answer, and hide the table and the figure."""
        self.line.value, self.table.value, self.figure.layout.display = html.escape(why), "", "none"
