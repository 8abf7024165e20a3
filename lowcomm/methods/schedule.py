"""Schedules of the outer rate and momentum: lines between points of a run.

Short runs feel how an outer momentum begins and ends. Pier (Fan and Zhang, 2025, arXiv:2511.17849) lets it fall from
0.99 to 0.9 while the outer rate rises to 1.1, SNOO and MuLoCo keep both, and Khaled et al. (2025, arXiv:2509.10439)
find that rates above 1 may be right and a warm-up wrong. A point "0.7@0.1" says that the value is 0.7 when a tenth of
the run's inner steps are done; before the first point and after the last it stays. A turn has the values of the step
after which it is sent.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from lowcomm.settings import ConfigError


class Points:
    """A value that is given at some points of a run, and is linear between them.

    Args:
        texts: the points, each as "VALUE@SHARE"; shares of the run are from 0 to 1 and ascending.
        where: the name of the setting, for error messages.

    Raises ConfigError for a text that is no point, for values that are not finite, and for shares out of order.
    """

    def __init__(self, texts: Sequence[str], where: str):
        self.shares, self.values = [], []
        for text in texts:
            value, _, share = text.partition("@")
            try:
                self.shares.append(float(share))
                self.values.append(float(value))
            except ValueError:
                raise ConfigError(f'{where}: {text!r} is no point of a run, as "0.7@0.1" is') from None
        ascending = all(a < b for a, b in zip(self.shares, self.shares[1:], strict=False))
        if not all(map(math.isfinite, self.values)):
            raise ConfigError(f"{where} = {list(texts)}: values must be finite")
        if not ascending or not all(0 <= share <= 1 for share in self.shares):
            raise ConfigError(f"{where} = {list(texts)}: shares of a run go from 0 to 1, each above the one before")

    def at(self, share: float) -> float:
        """Return the value when a share of the run, from 0 to 1, is done."""
        after = bisect.bisect_right(self.shares, share)
        if after in (0, len(self.shares)):
            return self.values[min(after, len(self.values) - 1)]
        (x0, x1), (y0, y1) = (of[after - 1 : after + 1] for of in (self.shares, self.values))
        return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
