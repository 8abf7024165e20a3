"""The preparation of a corpus, from documents to token shards: deduplicate, split, tokenise.

`prepare` writes one folder: `tokenizer.model` (sentencepiece BPE with byte fallback, lossless),
`train-*.bin` and `validation-*.bin` (token ids, uint16 or uint32; `tuning-*.bin` too, where a part is held out for the
choice of settings), and `card.json`, which names every file with its checksum and is written last. The folder appears
as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece as spm
from tqdm import tqdm

from lowcomm.experiment.batches import check_files, differences, read_card
from lowcomm.experiment.config import CorpusConfig, DataConfig
from lowcomm.experiment.corpora import documents, sources
from lowcomm.experiment.project import Project
from lowcomm.experiment.source import sha256
from lowcomm.settings import ConfigError

END_OF_TEXT = 1  # id of the token between documents
_MARK = "\u2581"  # sentencepiece writes a space so; the character itself must travel as bytes
_SPLITS = ("train", "validation", "tuning")
_PREPARED = rf"(card\.json|tokenizer\.model|({'|'.join(_SPLITS)})(-\d+\.bin|\.parquet))"  # names of files in the folder


class Tokenizer:
    """A lossless sentencepiece BPE: decode(encode(text)) == text for every text."""

    def __init__(self, model: bytes):
        self.model = model
        self._sp = spm.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._sp.vocab_size()
        self._mark_ids = [self._sp.piece_to_id(f"<0x{b:02X}>") for b in _MARK.encode()]

    @staticmethod
    def train(lines: Iterator[str], vocab_size: int) -> Tokenizer:
        """Train a tokenizer on lines of text.

        Raises ConfigError where `vocab_size` cannot hold the bytes and characters, or the words cannot fill it.
        """
        model = io.BytesIO()
        try:
            spm.SentencePieceTrainer.train(
                sentence_iterator=lines,
                model_writer=model,
                vocab_size=vocab_size,
                model_type="bpe",
                byte_fallback=True,
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                split_digits=True,
                character_coverage=0.9995,
                max_sentence_length=1 << 20,
                num_threads=1,
                unk_id=0,
                eos_id=END_OF_TEXT,
                bos_id=-1,
                pad_id=-1,
                minloglevel=3,
            )
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"data.vocab_size = {vocab_size} does not suit the corpus (256 bytes, 2 controls and its"
                f" characters must fit, and its words must fill it): {str(error).strip()}"
            ) from None
        return Tokenizer(model.getvalue())

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        first, *rest = text.split(_MARK)
        ids = self._sp.encode(first)
        for part in rest:
            ids += self._mark_ids + self._sp.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, without END_OF_TEXT."""
        return self._sp.decode(ids)


def _uniform(digest: str) -> float:
    """Return a document's place in [0, 1), which its hash alone decides."""
    return int(digest[:12], 16) / 16**12


def _bounds(config: DataConfig) -> tuple[float, float]:
    """Return the places at which the validation split ends and the training split begins; tuning lies in between."""
    validation = config.validation_percent / 100
    return validation, validation + config.tuning_percent / 100


def _splits(config: DataConfig) -> tuple[str, ...]:
    return _SPLITS if config.tuning_percent else _SPLITS[:2]


class _ShardWriter:
    """Writes the token shards of one split, each of `shard_tokens` tokens but the last."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, dtype: np.dtype):
        self.folder, self.split, self.limit, self.dtype = folder, split, shard_tokens, dtype
        self.shards: list[dict[str, Any]] = []
        self._held: list[np.ndarray] = []
        self._tokens = 0

    def add(self, ids: list[int]) -> None:
        self._held.append(np.asarray(ids, dtype=self.dtype))
        self._tokens += len(ids)
        if self._tokens >= self.limit:
            self._write_whole()

    def _write_whole(self) -> None:
        held = np.concatenate(self._held)
        whole = len(held) // self.limit * self.limit
        for begin in range(0, whole, self.limit):
            self._write(held[begin : begin + self.limit])
        self._held, self._tokens = [held[whole:]], len(held) - whole

    def close(self) -> None:
        if self._tokens:
            self._write(np.concatenate(self._held))

    def _write(self, ids: np.ndarray) -> None:
        path = self.folder / f"{self.split}-{len(self.shards):05d}.bin"
        ids.tofile(path)
        self.shards.append({"file": path.name, "tokens": len(ids), "sha256": sha256(path)})


def _gather(corpus: CorpusConfig, config: DataConfig, folder: Path, root: Path) -> dict[str, dict[str, int]]:
    """Write the deduplicated documents of each split as parquet, and return their counts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("text", pa.string()), ("place", pa.float64())])
    names, (validation, training) = _splits(config), _bounds(config)
    counts = {split: {"documents": 0, "characters": 0} for split in names}
    held: dict[str, list[dict]] = {split: [] for split in names}
    writers = {split: pq.ParquetWriter(folder / f"{split}.parquet", schema) for split in names}
    seen: set[bytes] = set()
    characters = duplicates = 0
    for text in tqdm(documents(corpus, root), desc="documents", unit=" docs", mininterval=1.0):
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if bytes.fromhex(digest) in seen:
            duplicates += 1
            continue
        seen.add(bytes.fromhex(digest))
        place = _uniform(digest)
        split = "validation" if place < validation else "tuning" if place < training else "train"
        # Lone surrogates cannot be written as UTF-8; nothing that is text has them.
        held[split].append({"text": text.encode("utf-8", "replace").decode(), "place": place})
        counts[split]["documents"] += 1
        counts[split]["characters"] += len(text)
        characters += len(text)
        if len(held[split]) == 1000:
            writers[split].write_table(pa.Table.from_pylist(held[split], schema))
            held[split].clear()
        if config.max_characters and characters >= config.max_characters:
            break
    for split, writer in writers.items():
        writer.write_table(pa.Table.from_pylist(held[split], schema))
        writer.close()
    counts["duplicates"] = {"documents": duplicates}
    for split in names:
        if not counts[split]["documents"]:
            raise ConfigError(
                f"corpus {config.corpus!r} gave no {split} documents ({characters} characters, validation_percent"
                f" {config.validation_percent:g}, tuning_percent {config.tuning_percent:g}): it is missing, empty or"
                " too small, as whole documents (each file of text is one) are dealt to the splits"
            )
    return counts


def _split_rows(folder: Path, split: str) -> Iterator[dict]:
    from datasets import load_dataset

    return load_dataset("parquet", data_files=str(folder / f"{split}.parquet"), split="train", streaming=True)


def prepare(corpus: CorpusConfig, config: DataConfig, out: Path, root: Path | None = None) -> dict[str, Any]:
    """Prepare a corpus in the folder `out`, and return its card.

    root: the folder at which local paths begin, by default the working directory.

    Files that an interrupted call has left are removed, and a message says so. Raises ConfigError where the corpus
    cannot be read or does not suit its settings, where the folder cannot be written or holds files that no preparation
    puts there, and where another process prepares it.
    """
    out = out.resolve()  # where it is a link, the folder that it leads to is replaced
    partial = out.with_name(out.name + ".partial")
    for folder in (out, partial):
        if strangers := sorted(p.name for p in folder.glob("*") if not re.fullmatch(_PREPARED, p.name)):
            raise ConfigError(
                f"{folder} holds {', '.join(strangers[:5])}, which no corpus is of: choose another folder"
            )
    try:
        if partial.exists():
            with _locked(partial):
                tqdm.write(f"{partial.name}: left by an interrupted preparation; starting over")
                shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"output folder {out} cannot be written: {error}") from None
    with _locked(partial):
        return _prepare(corpus, config, out, partial, root or Path.cwd())


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Hold the lock of a folder that is being prepared, inside. Raises ConfigError where another process holds it."""
    fd = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{partial} is in use: another process prepares this corpus") from None
        yield
    finally:
        os.close(fd)


def _prepare(corpus: CorpusConfig, config: DataConfig, out: Path, partial: Path, root: Path) -> dict[str, Any]:
    counts = _gather(corpus, config, partial, root)
    share = config.tokenizer_characters / counts["train"]["characters"]
    _, low = _bounds(config)
    limit = low + (1 - low) * share  # a document's place in [low, 1) decides, so the sample is spread evenly

    def lines() -> Iterator[str]:
        for row in _split_rows(partial, "train"):
            if row["place"] < limit:
                yield from (line for line in row["text"].split("\n") if line)

    tokenizer = Tokenizer.train(lines(), config.vocab_size)
    (partial / "tokenizer.model").write_bytes(tokenizer.model)
    dtype = np.dtype("<u2" if config.vocab_size <= 1 << 16 else "<u4")
    splits = {}
    for split in _splits(config):
        writer = _ShardWriter(partial, split, config.shard_tokens, dtype)
        rows = tqdm(_split_rows(partial, split), total=counts[split]["documents"], desc=f"tokens ({split})")
        for row in rows:
            writer.add([*tokenizer.encode(row["text"]), END_OF_TEXT])
        writer.close()
        tokens = sum(s["tokens"] for s in writer.shards)
        splits[split] = counts[split] | {"tokens": tokens, "shards": writer.shards}
        (partial / f"{split}.parquet").unlink()
    card = {
        "corpus": config.corpus,
        "source": asdict(corpus),
        "settings": asdict(config),
        "dtype": dtype.str,
        "vocab_size": config.vocab_size,
        "tokenizer_sha256": sha256(partial / "tokenizer.model"),
        "duplicates": counts["duplicates"]["documents"],
        "sources": sources(corpus),
        "splits": splits,
    }
    (partial / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)
    return card


def prepared(project: Project, corpus: str, scale: str | None = None) -> Path:
    """Return the folder of a project's corpus, having prepared it where it is missing, damaged or of other settings.

    scale: by default the one that `params.yaml` names.
    """
    scale = scale or project.load_params()["scale"]
    folder = project.data_dir(corpus, scale)
    source, config = project.corpus_configs(corpus, scale=scale)
    if (folder / "card.json").exists():
        try:
            card = read_card(folder)
            check_files(folder, card)
            if not differences(card, "source", source) and not differences(card, "settings", config):
                return folder
            tqdm.write(f"{folder} was prepared with other settings; preparing it again")
        except ConfigError as error:
            tqdm.write(str(error))
    prepare(source, config, folder, project.root)
    return folder
