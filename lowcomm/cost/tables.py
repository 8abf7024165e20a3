"""Numbers and tables as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def si_bytes(nbytes: float) -> str:
    """Return a number of bytes as text, in decimal units and with three significant digits: "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError


def markdown(table: pd.DataFrame) -> str:
    """Return a table as GitHub markdown, without its index; missing cells are a dash."""
    head = "| " + " | ".join(map(str, table.columns)) + " |"
    rule = "|" + "---|" * len(table.columns)
    cells = table.astype(object).where(table.notna(), "-")
    return "\n".join([head, rule, *("| " + " | ".join(map(str, row)) + " |" for row in cells.itertuples(index=False))])
