"""Corpora to batches: lossless, disjoint, deterministic; and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lowcomm.experiment.batches import TokenData, differences
from lowcomm.experiment.config import CorpusConfig, DataConfig
from lowcomm.experiment.corpora import documents, sources
from lowcomm.experiment.data import END_OF_TEXT, Tokenizer, prepare
from lowcomm.experiment.project import Project
from lowcomm.experiment.source import sha256
from lowcomm.experiment.train import train_in_threads
from lowcomm.settings import ConfigError
from pipelines import project
from pipelines.project import ROOT
from tests.conftest import DATA, VOCAB, small_run

SMALL = DATA


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Tokenizer:
    return Tokenizer((corpus / "tokenizer.model").read_bytes())


def test_the_tokenizer_is_lossless(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    alphabet = [
        *"abz 09\n\t\r\0",
        "\u2581",
        "\u00e9",
        "\u65e5",
        "\U0001f600",
        "\ufeff",
        "\u200b",
        "</s>",
        "<0x0A>",
        "  ",
    ]
    texts = ["", " ", "\u2581", " \u2581 ", *("".join(rng.choices(alphabet, k=rng.randint(1, 40))) for _ in range(500))]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_knows_the_training_split_only(tmp_path: Path) -> None:
    """Text that only validation holds does not move the vocabulary."""
    rows = [{"text": f"document {i} says nothing new, {i} times over, in plain words"} for i in range(4000)]
    path = tmp_path / "rows.json"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig("rows", 300, tokenizer_characters=10**9)
    prepare(CorpusConfig("json", path=str(path)), config, tmp_path / "a")
    held_out = Tokenizer((tmp_path / "a" / "tokenizer.model").read_bytes())
    card = json.loads((tmp_path / "a" / "card.json").read_text())
    validation = np.fromfile(tmp_path / "a" / card["splits"]["validation"]["shards"][0]["file"], dtype="<u2")
    texts = [held_out.decode(part.tolist()) for part in np.split(validation, np.flatnonzero(validation == END_OF_TEXT))]
    kept = {t.strip() for t in texts}
    train_rows = [r for r in rows if r["text"] not in kept]
    assert len(train_rows) == card["splits"]["train"]["documents"]
    again = Tokenizer.train((r["text"] for r in train_rows), 300)
    assert again.model == held_out.model


def test_preparing_twice_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    prepare(CorpusConfig("docstrings"), SMALL, tmp_path / "again")
    names = sorted(p.name for p in corpus.iterdir())
    assert names == sorted(p.name for p in (tmp_path / "again").iterdir())
    for name in names:
        assert (corpus / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_duplicates_are_dropped_and_splits_share_no_document(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = [{"text": f"line {i % 1000} of a corpus in which each stands twice"} for i in range(2000)]
    path.write_text("\n".join(map(json.dumps, rows)))
    card = prepare(CorpusConfig("json", path=str(path)), DataConfig("rows", 300, validation_percent=20), tmp_path / "d")
    counts = {split: card["splits"][split]["documents"] for split in ("train", "validation")}
    assert card["duplicates"] == 1000
    assert sum(counts.values()) == 1000
    assert 120 < counts["validation"] < 280  # 200 expected, sd 13


def test_the_tuning_split_comes_out_of_training_alone(tmp_path: Path) -> None:
    """Validation is the same with and without it, no document is of two splits, and only who asks is told losses."""
    path = tmp_path / "rows.json"
    path.write_text("\n".join(json.dumps({"text": f"row {i} of a corpus of three parts"}) for i in range(3000)))
    held_out = {}
    for name, percent in (("two", 0.0), ("three", 10.0)):
        config = DataConfig("rows", 300, validation_percent=10, tuning_percent=percent)
        prepare(CorpusConfig("json", path=str(path)), config, tmp_path / name)
        tokens = TokenData(tmp_path / name, seq_len=16, global_batch=2, seed=0)
        text = Tokenizer((tmp_path / name / "tokenizer.model").read_bytes())
        shards = {s: tokens.card["splits"][s]["shards"][0]["file"] for s in tokens.card["splits"]}
        held_out[name] = {s: text.decode(np.fromfile(tmp_path / name / f, "<u2").tolist()) for s, f in shards.items()}
    rows = {s: set(text.split("row ")) - {""} for s, text in held_out["three"].items()}
    assert held_out["three"]["validation"] == held_out["two"]["validation"]
    assert not rows["train"] & rows["tuning"]
    assert not rows["validation"] & rows["tuning"]
    assert len(rows["train"] | rows["tuning"] | rows["validation"]) == 3000
    assert 220 < len(rows["tuning"]) < 380  # 300 expected, sd 16
    assert not torch.equal(tokens.held_out(4, "tuning"), tokens.held_out(4))
    with pytest.raises(ConfigError, match="no tuning split, only train, validation"):
        TokenData(tmp_path / "two", seq_len=16, global_batch=2, seed=0).held_out(4, "tuning")


def test_a_run_is_evaluated_on_the_split_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else rates would be chosen on the text that tables report."""
    path, asked, plain = tmp_path / "rows.json", [], TokenData.held_out
    path.write_text(
        "\n".join(json.dumps({"text": file.read_text()}) for file in sorted((ROOT / "lowcomm").rglob("*.py")))
    )

    def held_out(self: TokenData, windows: int, split: str = "validation") -> torch.Tensor:
        asked.append(split)
        return plain(self, windows, split)

    monkeypatch.setattr(TokenData, "held_out", held_out)
    for split in ("tuning", "validation"):
        data = {"tuning_percent": 20.0, "validation_percent": 20.0}
        config = small_run("data_parallel", replicas=1, data=data, train={"steps": 2, "eval_split": split})
        if split == "tuning":
            prepare(CorpusConfig("json", path=str(path)), config.data, tmp_path / "corpus")
        train_in_threads(config, tmp_path / "corpus", tmp_path / split)
        assert set(asked) == {split}
        asked.clear()


def test_a_card_that_is_older_than_a_setting_has_its_default() -> None:
    wanted = DataConfig("rows", 300, tuning_percent=5.0)
    card = {"settings": {"corpus": "rows", "vocab_size": 300, "shard_tokens": 10}}
    assert differences(card, "settings", wanted) == {"tuning_percent": (0.0, 5.0), "shard_tokens": (10, 100_000_000)}


def test_shards_hold_the_documents_in_order(corpus: Path, tokenizer: Tokenizer) -> None:
    card = json.loads((corpus / "card.json").read_text())
    data = np.concatenate([np.fromfile(corpus / s["file"], "<u2") for s in card["splits"]["train"]["shards"]])
    assert len(data) == card["splits"]["train"]["tokens"]
    assert (data == END_OF_TEXT).sum() == card["splits"]["train"]["documents"]
    first = tokenizer.decode(data[: int(np.argmax(data == END_OF_TEXT))].tolist())
    assert first in set(documents(CorpusConfig("docstrings"), ROOT))


def test_windows_cross_shard_borders(tmp_path: Path) -> None:
    small = DataConfig("docstrings", VOCAB, max_characters=150_000, shard_tokens=1000)
    prepare(CorpusConfig("docstrings"), small, tmp_path / "many")
    prepare(CorpusConfig("docstrings"), SMALL, tmp_path / "one")
    many, one = (TokenData(tmp_path / n, seq_len=37, global_batch=4, seed=3) for n in ("many", "one"))
    assert len(many.card["splits"]["train"]["shards"]) > 30
    for step in range(1, 60):
        assert torch.equal(many.batch(step), one.batch(step))


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_global_batch_is_the_same_for_any_replica_count(replicas: int, corpus: Path) -> None:
    data = TokenData(corpus, seq_len=32, global_batch=8, seed=0)
    for step in (1, 5, data.epoch_steps() + 3):
        parts = [data.batch(step, m, replicas) for m in range(replicas)]
        assert torch.equal(torch.cat(parts), data.batch(step))


def test_replicas_never_share_a_window_and_see_all_of_theirs(corpus: Path) -> None:
    data = TokenData(corpus, seq_len=32, global_batch=8, seed=0)
    steps = data.epoch_steps()
    seen = [{tuple(row.tolist()) for s in range(1, steps + 1) for row in data.batch(s, m, 2)} for m in range(2)]
    again = {tuple(row.tolist()) for s in range(steps + 1, 2 * steps + 1) for row in data.batch(s, 0, 2)}
    assert len(seen[0]) > 0.99 * 4 * steps  # a few windows of a corpus may be equal
    assert again == seen[0]  # the next epoch: the same windows
    assert len(seen[0] & seen[1]) <= 0.01 * len(seen[0])
    assert [data.batch(1).tolist()] != [data.batch(steps + 1).tolist()]  # in another order


@pytest.mark.parametrize("alike", [0.0, 0.25, 1.0])
def test_windows_that_are_not_dealt_alike_keep_the_corpus_order(alike: float, corpus: Path) -> None:
    """In an epoch each window is used once, whatever share is dealt alike; of the rest each lane has one part."""
    data = TokenData(corpus, seq_len=32, global_batch=8, seed=0, alike=alike)
    plain = TokenData(corpus, seq_len=32, global_batch=8, seed=0)
    steps = data.epoch_steps()
    text = np.concatenate([np.fromfile(p, "<u2") for p in sorted(corpus.glob("train-*.bin"))]).astype(np.int64)
    place = {tuple(text[32 * w : 32 * w + 33]): w for w in reversed(range(8 * steps))}  # of equal windows the first
    seen = torch.stack([data.batch(step) for step in range(1, steps + 1)])  # [steps, lanes, 33]
    places = np.array([[place[tuple(row)] for row in batch] for batch in seen.tolist()])
    assert len(np.unique(places)) == len(place)
    # In order, so that the mean place of lane l is about that of the l-th of 8 parts.
    means = places.mean(0) / (8 * steps)
    spread = means.max() - means.min()
    assert spread == pytest.approx((1 - alike) * 7 / 8, abs=0.05)
    if alike < 1:
        assert (np.diff(means) > 0).all()
    else:
        assert torch.equal(data.batch(3), plain.batch(3))


def test_each_lane_walks_in_an_order_of_its_own(corpus: Path) -> None:
    """Were all orders one, the rows of a batch would be neighbours, the last target of each the next one's first."""
    data = TokenData(corpus, seq_len=32, global_batch=8, seed=0)
    batches = torch.stack([data.batch(step) for step in range(1, 60)])
    assert (batches[:, :-1, -1] == batches[:, 1:, 0]).float().mean() < 0.1


def test_a_batch_depends_on_seed_and_step_alone(corpus: Path) -> None:
    fresh = TokenData(corpus, seq_len=32, global_batch=8, seed=1)
    used = TokenData(corpus, seq_len=32, global_batch=8, seed=1)
    for step in range(1, 20):
        used.batch(step)
    assert torch.equal(fresh.batch(19), used.batch(19))
    assert not torch.equal(fresh.batch(19), TokenData(corpus, seq_len=32, global_batch=8, seed=2).batch(19))


def test_targets_are_the_next_tokens(corpus: Path) -> None:
    data = TokenData(corpus, seq_len=32, global_batch=4, seed=0)
    windows = data.held_out(5)
    shard = np.fromfile(corpus / "validation-00000.bin", "<u2").astype(np.int64)
    assert np.array_equal(windows[0].numpy(), shard[:33])
    assert windows.shape == (5, 33)


@pytest.mark.parametrize("source", ["json", "parquet", "text", "hub"])
def test_local_files_and_hub_data_sets_are_read(source: str, tmp_path: Path) -> None:
    """A Hub data set is read by the same call from a local folder: the Hub itself is out of a test's reach."""
    import pandas as pd

    texts = [f"document {i}\nwith two lines" for i in range(20)]
    if source == "text":
        for i, text in enumerate(texts):
            (tmp_path / f"{i:02d}.txt").write_text(text)
        corpus = CorpusConfig("text", path=str(tmp_path))
    elif source == "parquet":
        pd.DataFrame({"body": texts}).to_parquet(tmp_path / "a.parquet")
        corpus = CorpusConfig("parquet", path=str(tmp_path / "*.parquet"), field="body")
    else:
        (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
        corpus = CorpusConfig(source, path=str(tmp_path), revision="main" if source == "hub" else "")
    assert list(documents(corpus, ROOT)) == texts


def test_python_sources_are_a_corpus_too() -> None:
    first = next(documents(CorpusConfig("python"), ROOT))
    assert "import" in first or "def " in first
    named = sources(CorpusConfig("python", packages=("numpy",)))
    assert [s["name"] for s in named] == ["python standard library", "numpy"]
    assert "BSD" in named[1]["licence"]


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        (CorpusConfig("json", path="/nowhere/*.json"), "corpus path /nowhere/.*json matches no json file"),
        (CorpusConfig("json"), "corpus source json needs a path"),
        (CorpusConfig("hub", path="owner/name"), "corpus owner/name needs a revision"),
        (CorpusConfig("docstrings", packages=("no-such-package",)), "'no-such-package' is not installed"),
    ],
)
def test_a_missing_corpus_is_named(corpus: CorpusConfig, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(corpus, DataConfig("x", VOCAB), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.fault("a later file of a corpus is damaged", "named, when the reading comes to it")
def test_a_damaged_file_among_others_is_named(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text('{"text": "one"}\n')
    (tmp_path / "1.json").write_text('{"text": "two')
    found = documents(CorpusConfig("json", str(tmp_path)), tmp_path)
    assert next(found) == "one"
    with pytest.raises(ConfigError, match="corpus .* cannot be read: ") as error:
        list(found)
    assert "\n" not in str(error.value)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"text": ""}))
    with pytest.raises(ConfigError, match="'x' gave no train documents .* missing, empty or too small"):
        prepare(CorpusConfig("json", path=str(tmp_path / "a.json")), DataConfig("x", VOCAB), tmp_path / "out")


def test_a_wrong_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"body": "some text"}))
    with pytest.raises(ConfigError, match=r"has columns \['body'\], not 'text'"):
        list(documents(CorpusConfig("json", path=str(tmp_path / "a.json")), ROOT))


@pytest.mark.parametrize("vocab_size", [200, 500_000])
def test_a_vocabulary_that_does_not_suit_is_refused(vocab_size: int, tmp_path: Path) -> None:
    config = DataConfig("docstrings", vocab_size, max_characters=150_000)
    with pytest.raises(ConfigError, match=f"data.vocab_size = {vocab_size} does not suit the corpus"):
        prepare(CorpusConfig("docstrings"), config, tmp_path / "out")


@pytest.mark.fault("a shard of tokens is damaged, or missing", "named at the start")
def test_a_damaged_or_missing_shard_is_named(corpus: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(corpus, tmp_path / "copy")
    shard = folder / "train-00000.bin"
    raw = bytearray(shard.read_bytes())
    raw[100] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"train-00000.bin has checksum .* prepare the corpus again"):
        TokenData(folder, seq_len=32, global_batch=4, seed=0)
    shard.unlink()
    with pytest.raises(ConfigError, match=r"train-00000.bin is gone"):
        TokenData(folder, seq_len=32, global_batch=4, seed=0)


@pytest.mark.fault("the tokenizer of a corpus is another one, or missing", "named at the start")
def test_a_changed_or_missing_tokenizer_is_named(corpus: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(corpus, tmp_path / "copy")
    (folder / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(ConfigError, match=r"tokenizer\.model has checksum .* again \(lowcomm prepare copy --scale"):
        TokenData(folder, seq_len=16, global_batch=4, seed=0)
    (folder / "tokenizer.model").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.model is gone: prepare the corpus again"):
        TokenData(folder, seq_len=16, global_batch=4, seed=0)


@pytest.mark.fault("a corpus' card is no card", "the file and the rule are named")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged .Expecting value"),
        ("[1, 2]", "is damaged .list indices must be"),
        ("null", "is damaged .'NoneType' object is not subscriptable"),
        ('{"splits": {"train": {"shards": []}}}', "is damaged .lacks 'validation'"),
    ],
)
def test_a_card_that_is_none_is_named(text: str, message: str, corpus: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(corpus, tmp_path / "copy")
    (folder / "card.json").write_text(text)
    with pytest.raises(ConfigError, match=f"card.json {message}.*prepare the corpus again"):
        TokenData(folder, seq_len=32, global_batch=4, seed=0)


@pytest.mark.fault("a token beyond the vocabulary", "named with its shard")
def test_a_token_beyond_the_vocabulary_is_named(corpus: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(corpus, tmp_path / "copy")
    card = json.loads((folder / "card.json").read_text())
    tokens = np.fromfile(folder / "train-00000.bin", dtype=card["dtype"])
    tokens[7] = 400
    tokens.tofile(folder / "train-00000.bin")
    card["splits"]["train"]["shards"][0]["sha256"] = sha256(folder / "train-00000.bin")
    (folder / "card.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match=r"train-00000.bin holds token 400, and the vocabulary has 400"):
        TokenData(folder, seq_len=32, global_batch=4, seed=0)


def test_a_corpus_shorter_than_a_batch_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="training windows of 32 tokens, fewer than train.global_batch = 1000000"):
        TokenData(corpus, seq_len=32, global_batch=1_000_000, seed=0)
    with pytest.raises(ConfigError, match="no corpus in .*: prepare it first"):
        TokenData(tmp_path, seq_len=32, global_batch=4, seed=0)


def test_an_interrupted_preparation_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(CorpusConfig("docstrings"), SMALL, tmp_path / "out")
    assert (tmp_path / "out.partial").exists()
    assert not (tmp_path / "out").exists()
    prepare(CorpusConfig("docstrings"), SMALL, tmp_path / "out")
    assert "out.partial: left by an interrupted preparation; starting over" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    TokenData(tmp_path / "out", seq_len=32, global_batch=4, seed=0)


def test_a_folder_is_prepared_by_one_process_and_holds_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another_comes(*args, **kwargs):
        with pytest.raises(ConfigError, match=r"out.partial is in use: another process prepares this corpus"):
            prepare(CorpusConfig("docstrings"), SMALL, tmp_path / "out")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "train", another_comes)
        with pytest.raises(KeyboardInterrupt):
            prepare(CorpusConfig("docstrings"), SMALL, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="out holds thesis.tex, which no corpus is of: choose another folder"):
        prepare(CorpusConfig("docstrings"), SMALL, tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").exists()
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out.partial" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="out.partial holds notes.txt, which no corpus is of: choose another folder"):
        prepare(CorpusConfig("docstrings"), SMALL, tmp_path / "out")
    assert (tmp_path / "out.partial" / "notes.txt").exists()


def test_a_folder_that_is_a_link_is_prepared_where_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for _ in range(2):
        prepare(CorpusConfig("docstrings"), SMALL, tmp_path / "out")
    assert (tmp_path / "disk" / "card.json").exists()
    assert (tmp_path / "out").is_symlink()


def test_a_projects_corpus_is_prepared_where_it_is_missing_or_another_or_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Its local path begins at the project's folder, wherever one works."""
    rows = [json.dumps({"text": f"line {i} of a small corpus"}) for i in range(500)]
    (tmp_path / "rows.json").write_text("\n".join(rows))

    def write(**data: float) -> None:
        smoke = {"data": {"vocab_size": 300} | data}
        corpora = {"lines": {"source": "json", "path": "rows.json"}}
        params = {"scale": "smoke", "scales": {"smoke": smoke}, "methods": {}, "runs": {}, "corpora": corpora}
        (tmp_path / "params.yaml").write_text(json.dumps(params))

    monkeypatch.setattr(project, "PROJECT", Project(tmp_path))
    write()
    folder = project.prepared("lines")
    assert folder == tmp_path / "build" / "data" / "smoke" / "lines"
    card = (folder / "card.json").stat()
    assert project.prepared("lines", "smoke") == folder
    assert (folder / "card.json").stat() == card
    write(validation_percent=20)
    project.prepared("lines")
    assert "was prepared with other settings; preparing it again" in capsys.readouterr().out
    assert json.loads((folder / "card.json").read_text())["settings"]["validation_percent"] == 20
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in ("card.json", "tokenizer.model", "train-00000.bin"):
        (folder / name).write_bytes(b"damaged")
        project.prepared("lines")
        said = capsys.readouterr().out
        assert name in said
        assert "(lowcomm prepare lines --scale smoke)" in said
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="output folder .*file/out cannot be written"):
        prepare(CorpusConfig("docstrings"), SMALL, tmp_path / "file" / "out")
