"""Tests of corpora of runs: files to tokens, tokens to windows, tokenizers and errors."""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from support.runs import settings

from infinity.common.files import LockFile
from infinity.errors import CheckpointError, ConfigError, DoesNotFitError, MachineError
from infinity.integrations.huggingface.packages import package
from infinity.train import data, texts
from infinity.train.data import CorpusSpec, prepare
from infinity.train.preparation import prepare_run, read_facts
from infinity.train.settings import load_run_config
from infinity.train.texts import ByteTokenizer, Tokenizer, find_sources, find_tokenizer
from infinity.train.windows import BatchIterator, Windows, split

END = 256


def recipe(*paths: Path, form: str = "auto", **changes: Any) -> CorpusSpec:
    made = CorpusSpec(
        sources=find_sources("data.train", [str(path) for path in paths], form),
        tokenizer=ByteTokenizer(),
        size=257,
        end=END,
        text_field="text",
        errors="strict",
        token_dtype=None,
    )
    return replace(made, **changes)


def tokens_of(made: CorpusSpec, cache: Path) -> list[int]:
    corpus = prepare(made, cache)
    return [int(token) for token in corpus.read(0, corpus.num_tokens)]


def packed(*documents: str) -> list[int]:
    return [token for text in documents for token in [*text.encode(), END]]


def test_documents_of_all_formats_end_with_end_token(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ein Wört\nzwei", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n\n{"text": "", "n": 1}\n{"text": "yz"}')
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("in gzip")
    np.save(tmp_path / "d.npy", np.asarray([1, 2, 3], dtype=np.int64))
    (tmp_path / "e.txt").write_text("")
    (tmp_path / "ignored.log").write_text("no known ending")
    found = tokens_of(recipe(tmp_path), tmp_path / "cache")
    assert found == [*packed("ein Wört\nzwei", "x", "yz", "in gzip"), 1, 2, 3]
    assert tokens_of(recipe(tmp_path / "a.txt", end=None), tmp_path / "cache") == list(
        "ein Wört\nzwei".encode()
    )


def test_tokens_do_not_depend_on_batch_boundaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text slices and batches are small, so that every boundary is crossed."""
    monkeypatch.setattr(texts, "_PIECE_CHARACTERS", 50)
    monkeypatch.setattr(data, "_BATCH_CHARACTERS", 120)
    monkeypatch.setattr(data, "_CHUNK", 7)
    written = ["wörter " * 30, "o" * 333, "kurz\r\n" * 7, "ü" * 60]
    for index, text in enumerate(written):
        (tmp_path / f"{index}.txt").write_text(text, encoding="utf-8", newline="")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in written)
    (tmp_path / "4.jsonl").write_text(rows)
    np.save(tmp_path / "5.npy", np.arange(200, dtype=np.int32))
    expected = [*packed(*written, *written), *range(200)]
    corpus = prepare(recipe(tmp_path), tmp_path / "cache")
    assert corpus.read(0, corpus.num_tokens).tolist() == expected
    assert corpus.num_documents == 8
    generator = random.Random(0)
    for _ in range(200):
        start = generator.randrange(len(expected))
        count = generator.randrange(len(expected) - start + 1)
        assert corpus.read(start, count).tolist() == expected[start : start + count]


def test_tokens_are_cached_until_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text("eins")

    def identity(**changes: Any) -> Any:
        return prepare(recipe(text, **changes), cache).identity

    first = identity()
    made = []
    monkeypatch.setattr(data, "_make", lambda *a, make=data._make: made.append(make(*a)))
    assert identity() == first
    assert not made
    os.utime(text, ns=(1, 1))
    assert identity() == first  # same content, other time stamp
    text.write_text("zwei")
    assert identity() != first
    assert identity(end=None) != first
    assert len(made) == 3


def test_failed_prepare_removes_partial_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    cache = tmp_path / "cache"
    for name in ("0123.partial-ab", "0123.partial-cd"):
        (cache / name).mkdir(parents=True)
        (cache / f"{name}.lock").touch()
    with (
        LockFile(cache / "0123.partial-cd.lock"),  # in use by another process
        pytest.raises(ConfigError, match="line 2: the field 'text' is 3, no text"),
    ):
        prepare(recipe(tmp_path / "a.jsonl"), cache)
    assert sorted(p.name for p in cache.iterdir()) == ["0123.partial-cd", "0123.partial-cd.lock"]


@pytest.mark.parametrize("damage", ["cut", "index", "gone"])
def test_damaged_cache_is_refused(tmp_path: Path, damage: str) -> None:
    text = tmp_path / "a.txt"
    text.write_text("wort " * 50_000)
    directory = prepare(recipe(text), tmp_path / "cache").directory
    if damage == "cut":
        os.truncate(directory / "tokens.bin", 1000)
    elif damage == "gone":
        (directory / "tokens.bin").unlink()
    else:
        index = directory / "index.json"
        index.write_text(index.read_text().replace('"documents": 1', '"documents": 2'))
    with pytest.raises(CheckpointError, match="rm -r"):
        prepare(recipe(text), tmp_path / "cache")


def test_token_files_are_read_and_validated(tmp_path: Path) -> None:
    raw = tmp_path / "a.bin"
    np.asarray([5, 6, 7, 8], dtype="<u2").tofile(raw)
    cache = tmp_path / "cache"
    assert tokens_of(recipe(raw, token_dtype="uint16"), cache) == [5, 6, 7, 8]
    assert raw.stat().st_size == 8
    for made, message in (
        (recipe(raw), "data.token_dtype"),
        (recipe(raw, token_dtype="uint32"), "393221 at 0, and the model has 257"),
        (recipe(raw, token_dtype="uint16", size=7), "holds the token 7 at 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(made, cache)
    raw.write_bytes(b"abc")
    with pytest.raises(ConfigError, match=r"is no file of uint16: (.|\n)*it has 3 bytes"):
        prepare(recipe(raw, token_dtype="uint16"), cache)
    for name, array, message in (
        ("f", np.zeros(3), "float64 of shape"),
        ("two", np.zeros((2, 2), dtype=np.int32), r"shape \(2, 2\)"),
        ("minus", np.asarray([1, -1]), "holds the token -1 at 1"),
    ):
        path = tmp_path / f"{name}.npy"
        np.save(path, array)
        with pytest.raises(ConfigError, match=message):
            prepare(recipe(path), cache)
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(ConfigError, match=r"is no \.npy file"):
        prepare(recipe(tmp_path / "text.npy"), cache)


def test_invalid_text_is_refused(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_bytes(b"gut \xff schlecht")
    with pytest.raises(ConfigError, match=r"a\.txt is not UTF-8 near byte 4"):
        prepare(recipe(path), cache)
    assert tokens_of(recipe(path, errors="replace"), cache) == packed("gut � schlecht")
    lines = tmp_path / "b.jsonl"
    for text, message in (
        (b'{"text": "a"}\nnot json\n', "line 2 is not JSON"),
        (b'{"txt": "a"}\n', "line 1 has no field 'text': it has 'txt'"),
        (b'[{"text": "a"}]\n', "line 1 is a list"),
        (b"1\n", "no object"),
        (b'{"text": "\xff"}\n', "line 1 is not UTF-8"),
        (b'{"text": "\\ud800"}\n', "line 1 is not UTF-8"),
    ):
        lines.write_bytes(text)
        with pytest.raises(ConfigError, match=message):
            prepare(recipe(lines), cache)
    half = tmp_path / "c.txt.gz"
    half.write_bytes(gzip.compress(b"wort " * 1000)[:30])
    with pytest.raises(ConfigError, match="no complete gzip file"):
        prepare(recipe(half), cache)


def test_patterns_without_match_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    patterns = [str(tmp_path / name) for name in ("missing.txt", "*.none", "empty")]
    with pytest.raises(ConfigError) as caught:
        find_sources("data.train", patterns, "auto")
    text = str(caught.value)
    for part in ("missing.txt: does not exist", "no file has such a name", "no file in this dir"):
        assert part in text
    (tmp_path / "a.txt").write_text("a")
    both = [str(tmp_path / "a.txt"), str(tmp_path / "*.txt")]
    assert len(find_sources("data.train", both, "auto")) == 1


def test_disk_full_error_has_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data, "write_sealed", full)
    with pytest.raises(DoesNotFitError, match=r"free there\n.*data\.cache"):
        prepare(recipe(tmp_path / "a.txt"), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


# --- the datasets package -------------------------------------------------------------------------


class Datasets:
    """Replaces the package; every dataset has the same rows."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def load_dataset(self, *names: Any, **more: Any) -> Any:
        self.asked.append((names, more))
        if names[0] == "gone":
            raise ConnectionError("no such dataset")
        return iter([{"text": "eins"}, {"text": ""}, {"text": "zwei"}])


def test_parquet_and_hub_names_use_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, path = Datasets(), tmp_path / "a.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "datasets", package)  # type: ignore[arg-type]
    made = replace(recipe(), sources=find_sources("", [str(path), "hub:wiki:de:test"], "auto"))
    assert tokens_of(made, tmp_path / "cache") == packed("eins", "zwei", "eins", "zwei")
    whole = {"split": "train", "streaming": True}
    assert package.asked == [
        (("parquet",), {"data_files": str(path), **whole}),
        (("wiki", "de"), {**whole, "split": "test"}),
    ]
    gone = replace(made, sources=find_sources("", ["hub:gone"], "auto"))
    with pytest.raises(ConfigError, match="hub:gone cannot be read by the package datasets"):
        prepare(gone, tmp_path / "cache")
    with pytest.raises(ConfigError, match="row 1 has no field 'body': it has 'text'"):
        prepare(replace(made, text_field="body"), tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the package datasets(.|\n)*pip install"):
        prepare(gone, tmp_path / "cache")


def test_parquet_with_real_datasets_package(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["eins", "", "zwei\nü"]}), tmp_path / "a.parquet")
    assert tokens_of(recipe(tmp_path), tmp_path / "cache") == packed("eins", "zwei\nü")


# --- windows -------------------------------------------------------------------------------------


def test_batch_iterator_epochs_and_resume(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(103, dtype=np.uint16))
    corpus = prepare(recipe(tmp_path / "a.npy"), tmp_path / "cache")
    train, held = split(corpus, 4, 0.2)
    assert (len(train), len(held)) == (20, 5)
    assert held.window(0).tolist() == [80, 81, 82, 83]
    reel = BatchIterator(train, 3, seed=7, shuffle=True)
    seen = [int(row[0]) // 4 for _ in range(20) for row in reel.next()]
    assert all(sorted(seen[e * 20 : e * 20 + 20]) == list(range(20)) for e in range(3))
    assert seen[:20] != seen[20:40]
    assert reel.epoch == 3.0
    first = BatchIterator(train, 3, seed=7, shuffle=True)
    for _ in range(5):
        first.next()
    second = BatchIterator(train, 3, seed=7, shuffle=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.next().tolist() for _ in range(5)] == [first.next().tolist() for _ in range(5)]
    with pytest.raises(CheckpointError, match="seed was 7, and is 8"):
        BatchIterator(train, 3, seed=8, shuffle=True).load_state_dict(first.state_dict())
    plain = BatchIterator(Windows(corpus, 4, 0, 3), 2, seed=7, shuffle=False)
    assert [int(row[0]) for _ in range(3) for row in plain.next()] == [0, 4, 8, 0, 4, 8]


# --- tokenizers ----------------------------------------------------------------------------------


def test_tokenizer_ignores_saved_truncation_and_padding(tmp_path: Path) -> None:
    ByteTokenizer().save_pretrained(tmp_path / "plain")
    plain = transformers.AutoTokenizer.from_pretrained(tmp_path / "plain")
    texts = ["a", "dä cab " * 5]
    plain(texts, padding=True, truncation=True, max_length=6)  # the backend stores these settings
    plain.save_pretrained(tmp_path / "cutting")
    kept = json.loads((tmp_path / "cutting" / "tokenizer.json").read_text())
    assert kept["truncation"]["max_length"] == 6
    assert kept["padding"] is not None
    found = find_tokenizer(str(tmp_path / "cutting"))
    assert [one.tolist() for one in found.encode(texts)] == [list(t.encode()) for t in texts]
    assert found.identity == find_tokenizer(str(tmp_path / "plain")).identity
    found.save_pretrained(tmp_path / "exported")
    exported = json.loads((tmp_path / "exported" / "tokenizer.json").read_text())
    assert exported["truncation"] == kept["truncation"]
    assert exported["padding"] == kept["padding"]


def test_remote_code_is_refused_without_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[Any] = []

    def asked(*question: Any) -> str:
        questions.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", asked)
    own = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}
    keys = {"model_type": "own", "auto_map": own}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": own})
    )
    (tmp_path / "own.py").write_text("raise AssertionError('it was run')\n")
    with pytest.raises(ConfigError, match="no tokenizer that transformers can load"):
        find_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="no config that transformers takes"):
        read_facts(load_run_config(settings(tmp_path, model={"path": str(tmp_path)})), None)
    assert questions == []


def test_failed_hub_download_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the network failure, not requirements of tokenizers."""
    asked: list[str] = []

    def download(name: str, **more: Any) -> str:
        asked.append(name)
        raise OSError("Name or service not known")

    monkeypatch.setattr(package("huggingface_hub"), "snapshot_download", download)
    raw = settings(tmp_path, model={"path": "own/model"}, tokenizer="auto")
    with pytest.raises(MachineError, match="the Hugging Face Hub did not give it"):
        prepare_run(load_run_config(raw), tmp_path / "tokens")
    assert asked == ["own/model"]


def test_tokenizer_size_with_gaps_in_vocabulary() -> None:
    class Holes:
        eos_token_id = 70_000

        def __len__(self) -> int:
            return 3

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1, "end": 70_000}

    assert Tokenizer("holes", Holes()).size == 70_001
