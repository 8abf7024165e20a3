"""Batches of a prepared corpus, without state.

A batch is a pure function of (seed, step, replica). Window w of the corpus belongs to lane w mod B, where
B is the global batch; row r of every global batch comes from lane r, which walks through its windows in
an order drawn from (seed, lane, epoch). Replica m owns lanes m B/M to (m+1) B/M, so replicas
never see each other's windows, and the global batch of a step is the same for every M.

This holds where all windows are dealt alike (`alike` = 1). Otherwise a share `alike` of them is; of the rest, in the
order of the corpus, lane l has the l-th of B equal parts. It still walks through its windows in an order that is drawn.
Corpora are in the order of their sources, so replicas then train on text of unlike kinds.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowcomm.experiment.config import CorpusConfig, DataConfig
from lowcomm.experiment.source import sha256
from lowcomm.settings import ConfigError


def differences(card: dict[str, Any], section: str, wanted: CorpusConfig | DataConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings by which a section of a corpus' card differs from `wanted`: {key: (in the card, wanted)}.

    section: "source" or "settings". A setting that the card lacks, as it is older, counts as the default.
    """
    defaults = {f.name: f.default for f in fields(wanted) if f.default is not MISSING}
    there, asked = (json.loads(json.dumps(d)) for d in (defaults | card.get(section, {}), asdict(wanted)))
    return {key: (there.get(key), value) for key, value in asked.items() if there.get(key) != value}


def prepare_command(corpus: str, scale: str) -> str:
    """Return the command that prepares a corpus, or prepares it again where it is damaged."""
    return f"lowcomm prepare {corpus}" + (f" --scale {scale}" if scale else "")


def read_card(folder: Path) -> dict[str, Any]:
    """Return the card of a prepared corpus. Raises ConfigError where the folder has none, or the card is damaged."""
    file, command = folder / "card.json", prepare_command(folder.name, folder.parent.name)
    try:
        card = json.loads(file.read_text())
        shards = [shard for split in ("train", "validation") for shard in card["splits"][split]["shards"]]
        _ = [(shard["file"], shard["sha256"]) for shard in shards]
        _ = card["corpus"], card["tokenizer_sha256"], card["settings"]["vocab_size"]
        if card["dtype"] not in ("<u2", "<u4"):
            raise ValueError(f"tokens of dtype {card['dtype']!r}")
    except FileNotFoundError:
        raise ConfigError(f"no corpus in {folder}: prepare it first ({command})") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{file} is damaged ({what}): prepare the corpus again ({command})") from None
    return card


def check_files(folder: Path, card: dict[str, Any]) -> None:
    """Raise ConfigError where the tokenizer or a shard of a prepared corpus is gone, or differs from its checksum."""
    files = {shard["file"]: shard["sha256"] for part in card["splits"].values() for shard in part["shards"]}
    files["tokenizer.model"] = card["tokenizer_sha256"]
    for name, digest in files.items():
        path = folder / name
        if not path.exists() or (found := sha256(path)) != digest:
            state = f"has checksum {found[:12]}, the card says {digest[:12]}" if path.exists() else "is gone"
            command = prepare_command(folder.name, folder.parent.name)
            raise ConfigError(f"{path} {state}: prepare the corpus again ({command})")


class TokenData:
    """The batches of a prepared corpus, whose shards are memory-mapped.

    Args:
        folder: the folder that `prepare` wrote.
        seq_len: T; a window holds T + 1 tokens, and begins T tokens after the one before.
        global_batch: B, the sequences per step, over all replicas.
        seed: decides the order of windows, and which of them are dealt alike.
        alike: share of the windows that is dealt to all lanes alike, from 0 to 1.

    Raises ConfigError where the folder is missing, a file of it is damaged, the training split has fewer windows than
    `global_batch`, or another split has none.
    """

    def __init__(self, folder: Path, *, seq_len: int, global_batch: int, seed: int, alike: float = 1.0):
        self.card = read_card(folder)
        check_files(folder, self.card)
        self.seq_len, self.global_batch, self.seed = seq_len, global_batch, seed
        self._splits = {split: self._open(folder, split) for split in self.card["splits"]}
        self._train = self._splits["train"]
        self._windows = self._count(self._train)
        for split, maps in self._splits.items():
            if split != "train" and not self._count(maps):
                raise ConfigError(f"corpus {self.card['corpus']} has no {split} window of {seq_len} tokens")
        if self._windows < global_batch:
            raise ConfigError(
                f"corpus {self.card['corpus']} has {self._windows} training windows of {seq_len} tokens,"
                f" fewer than train.global_batch = {global_batch}"
            )
        self._dealt = None if alike == 1 else self._deal(alike)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # lane -> (epoch, order of its windows)

    def _open(self, folder: Path, split: str) -> list[np.ndarray]:
        maps = []
        for shard in self.card["splits"][split]["shards"]:
            path = folder / shard["file"]
            tokens = np.memmap(path, dtype=self.card["dtype"], mode="r")
            if (highest := int(tokens.max(initial=0))) >= (vocabulary := self.card["settings"]["vocab_size"]):
                raise ConfigError(f"shard {path} holds token {highest}, and the vocabulary has {vocabulary}")
            maps.append(tokens)
        return maps

    def _count(self, maps: list[np.ndarray]) -> int:
        return max(0, (sum(len(m) for m in maps) - 1) // self.seq_len)

    def _window(self, maps: list[np.ndarray], index: int) -> np.ndarray:
        """Return the T + 1 tokens of a split from token `index` T on, across the borders of shards."""
        begin, need = index * self.seq_len, self.seq_len + 1
        parts = []
        for m in maps:
            if begin < len(m) and need:
                part = m[begin : begin + need]
                parts.append(part)
                need -= len(part)
                begin = 0
            elif need:
                begin -= len(m)
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def epoch_steps(self) -> int:
        """Return the number of steps in which each lane goes through all of its windows once."""
        return self._windows // self.global_batch

    def _deal(self, alike: float) -> np.ndarray:
        """Return the windows of each lane [B, windows per lane], of which the share `alike` is dealt to all alike."""
        lanes, each = self.global_batch, self.epoch_steps()
        count = round(alike * each) * lanes
        mixed = np.random.default_rng([self.seed, lanes]).permutation(lanes * each)
        shared, rest = np.sort(mixed[:count]), np.sort(mixed[count:])
        return np.concatenate([shared.reshape(-1, lanes).T, rest.reshape(lanes, -1)], axis=1)

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Tensor:
        """Return the tokens [B/M, T + 1], int64, of inner step `step` (from 1) for one of M replicas (from 0)."""
        rows = self.global_batch // replicas
        epoch, place = divmod(step - 1, self.epoch_steps())
        out = np.empty((rows, self.seq_len + 1), dtype=np.int64)
        for row, lane in enumerate(range(replica * rows, (replica + 1) * rows)):
            known, order = self._orders.get(lane, (-1, None))
            if known != epoch:
                order = np.random.default_rng([self.seed, lane, epoch]).permutation(self.epoch_steps())
                self._orders[lane] = (epoch, order)
            number = int(order[place])
            window = number * self.global_batch + lane if self._dealt is None else int(self._dealt[lane, number])
            out[row] = self._window(self._train, window)
        return torch.from_numpy(out)

    def held_out(self, sequences: int, split: str = "validation") -> Tensor:
        """Return the tokens [n, T + 1], int64, of windows spread evenly over a split that is not trained on.

        n is `sequences`, or the number of all windows where there are fewer. Raises ConfigError where the corpus was
        prepared without that split.
        """
        if split not in self._splits:
            raise ConfigError(f"corpus {self.card['corpus']} has no {split} split, only {', '.join(self._splits)}")
        maps = self._splits[split]
        have = self._count(maps)
        chosen = np.linspace(0, have - 1, min(sequences, have)).astype(int)
        return torch.from_numpy(np.stack([self._window(maps, int(i)).astype(np.int64) for i in chosen]))
