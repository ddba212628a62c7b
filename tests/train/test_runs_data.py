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


def make_spec(*paths: Path, form: str = "auto", **changes: Any) -> CorpusSpec:
    spec = CorpusSpec(
        sources=find_sources("data.train", [str(path) for path in paths], form),
        tokenizer=ByteTokenizer(),
        size=257,
        end=END,
        text_field="text",
        errors="strict",
        token_dtype=None,
    )
    return replace(spec, **changes)


def tokens_of(spec: CorpusSpec, cache: Path) -> list[int]:
    corpus = prepare(spec, cache)
    return [int(token) for token in corpus.read(0, corpus.num_tokens)]


def expected_tokens(*documents: str) -> list[int]:
    return [token for text in documents for token in [*text.encode(), END]]


def test_documents_of_all_formats_end_with_end_token(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ein Wört\nzwei", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n\n{"text": "", "n": 1}\n{"text": "yz"}')
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("in gzip")
    np.save(tmp_path / "d.npy", np.asarray([1, 2, 3], dtype=np.int64))
    (tmp_path / "e.txt").write_text("")
    (tmp_path / "ignored.log").write_text("no known ending")
    found = tokens_of(make_spec(tmp_path), tmp_path / "cache")
    assert found == [*expected_tokens("ein Wört\nzwei", "x", "yz", "in gzip"), 1, 2, 3]
    assert tokens_of(make_spec(tmp_path / "a.txt", end=None), tmp_path / "cache") == list(
        "ein Wört\nzwei".encode()
    )


def test_tokens_do_not_depend_on_batch_boundaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text slices and batches are small, so that every boundary is crossed."""
    monkeypatch.setattr(texts, "_PIECE_CHARACTERS", 50)
    monkeypatch.setattr(data, "_BATCH_CHARACTERS", 120)
    monkeypatch.setattr(data, "_CHUNK", 7)
    contents = ["wörter " * 30, "o" * 333, "kurz\r\n" * 7, "ü" * 60]
    for index, text in enumerate(contents):
        (tmp_path / f"{index}.txt").write_text(text, encoding="utf-8", newline="")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in contents)
    (tmp_path / "4.jsonl").write_text(rows)
    np.save(tmp_path / "5.npy", np.arange(200, dtype=np.int32))
    expected = [*expected_tokens(*contents, *contents), *range(200)]
    corpus = prepare(make_spec(tmp_path), tmp_path / "cache")
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
        return prepare(make_spec(text, **changes), cache).identity

    first = identity()
    builds = []
    monkeypatch.setattr(data, "_make", lambda *a, make=data._make: builds.append(make(*a)))
    assert identity() == first
    assert not builds
    os.utime(text, ns=(1, 1))
    assert identity() == first  # same content, other time stamp
    text.write_text("zwei")
    assert identity() != first
    assert identity(end=None) != first
    assert len(builds) == 3


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
        prepare(make_spec(tmp_path / "a.jsonl"), cache)
    assert sorted(p.name for p in cache.iterdir()) == ["0123.partial-cd", "0123.partial-cd.lock"]


@pytest.mark.parametrize("damage", ["cut", "index", "gone"])
def test_damaged_cache_is_refused(tmp_path: Path, damage: str) -> None:
    text = tmp_path / "a.txt"
    text.write_text("wort " * 50_000)
    directory = prepare(make_spec(text), tmp_path / "cache").directory
    if damage == "cut":
        os.truncate(directory / "tokens.bin", 1000)
    elif damage == "gone":
        (directory / "tokens.bin").unlink()
    else:
        index = directory / "index.json"
        index.write_text(index.read_text().replace('"documents": 1', '"documents": 2'))
    with pytest.raises(CheckpointError, match="rm -r"):
        prepare(make_spec(text), tmp_path / "cache")


def test_token_files_are_read_and_validated(tmp_path: Path) -> None:
    raw = tmp_path / "a.bin"
    np.asarray([5, 6, 7, 8], dtype="<u2").tofile(raw)
    cache = tmp_path / "cache"
    assert tokens_of(make_spec(raw, token_dtype="uint16"), cache) == [5, 6, 7, 8]
    assert raw.stat().st_size == 8
    for spec, message in (
        (make_spec(raw), "data.token_dtype"),
        (make_spec(raw, token_dtype="uint32"), "393221 at 0, and the model has 257"),
        (make_spec(raw, token_dtype="uint16", size=7), "holds the token 7 at 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(spec, cache)
    compressed = tmp_path / "a.bin.gz"
    compressed.write_bytes(gzip.compress(raw.read_bytes() * 5))
    with pytest.raises(ConfigError, match=r"a\.bin\.gz is compressed"):
        prepare(make_spec(compressed, token_dtype="uint16", size=1 << 16), cache)
    raw.write_bytes(b"abc")
    with pytest.raises(ConfigError, match=r"is no file of uint16: (.|\n)*it has 3 bytes"):
        prepare(make_spec(raw, token_dtype="uint16"), cache)
    for name, array, message in (
        ("f", np.zeros(3), "float64 of shape"),
        ("two", np.zeros((2, 2), dtype=np.int32), r"shape \(2, 2\)"),
        ("minus", np.asarray([1, -1]), "holds the token -1 at 1"),
    ):
        path = tmp_path / f"{name}.npy"
        np.save(path, array)
        with pytest.raises(ConfigError, match=message):
            prepare(make_spec(path), cache)
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(ConfigError, match=r"is no \.npy file"):
        prepare(make_spec(tmp_path / "text.npy"), cache)


def test_invalid_text_is_refused(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_bytes(b"gut \xff schlecht")
    with pytest.raises(ConfigError, match=r"a\.txt is not UTF-8 near byte 4"):
        prepare(make_spec(path), cache)
    assert tokens_of(make_spec(path, errors="replace"), cache) == expected_tokens("gut � schlecht")
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
            prepare(make_spec(lines), cache)
    truncated = tmp_path / "c.txt.gz"
    truncated.write_bytes(gzip.compress(b"wort " * 1000)[:30])
    with pytest.raises(ConfigError, match="no complete gzip file"):
        prepare(make_spec(truncated), cache)


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
        prepare(make_spec(tmp_path / "a.txt"), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


# --- the datasets package -------------------------------------------------------------------------


class FakeDatasets:
    """Replaces the package; every dataset has the same rows."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def load_dataset(self, *names: Any, **more: Any) -> Any:
        self.calls.append((names, more))
        if names[0] == "gone":
            raise ConnectionError("no such dataset")
        return iter([{"text": "eins"}, {"text": ""}, {"text": "zwei"}])


def test_parquet_and_hub_names_use_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets, path = FakeDatasets(), tmp_path / "a.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "datasets", datasets)  # type: ignore[arg-type]
    spec = replace(make_spec(), sources=find_sources("", [str(path), "hub:wiki:de:test"], "auto"))
    assert tokens_of(spec, tmp_path / "cache") == expected_tokens("eins", "zwei", "eins", "zwei")
    common = {"split": "train", "streaming": True}
    assert datasets.calls == [
        (("parquet",), {"data_files": str(path), **common}),
        (("wiki", "de"), {**common, "split": "test"}),
    ]
    missing = replace(spec, sources=find_sources("", ["hub:gone"], "auto"))
    with pytest.raises(ConfigError, match="hub:gone cannot be read by the package datasets"):
        prepare(missing, tmp_path / "cache")
    with pytest.raises(ConfigError, match="row 1 has no field 'body': it has 'text'"):
        prepare(replace(spec, text_field="body"), tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the package datasets(.|\n)*pip install"):
        prepare(missing, tmp_path / "cache")


def test_parquet_with_real_datasets_package(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["eins", "", "zwei\nü"]}), tmp_path / "a.parquet")
    assert tokens_of(make_spec(tmp_path), tmp_path / "cache") == expected_tokens("eins", "zwei\nü")


# --- windows -------------------------------------------------------------------------------------


def test_batch_iterator_epochs_and_resume(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(103, dtype=np.uint16))
    corpus = prepare(make_spec(tmp_path / "a.npy"), tmp_path / "cache")
    train, held = split(corpus, 4, 0.2)
    assert (len(train), len(held)) == (20, 5)
    assert held.window(0).tolist() == [80, 81, 82, 83]
    batches = BatchIterator(train, 3, seed=7, shuffle=True)
    seen = [int(row[0]) // 4 for _ in range(20) for row in batches.next()]
    assert all(sorted(seen[e * 20 : e * 20 + 20]) == list(range(20)) for e in range(3))
    assert seen[:20] != seen[20:40]
    assert batches.epoch == 3.0
    first = BatchIterator(train, 3, seed=7, shuffle=True)
    for _ in range(5):
        first.next()
    second = BatchIterator(train, 3, seed=7, shuffle=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.next().tolist() for _ in range(5)] == [first.next().tolist() for _ in range(5)]
    with pytest.raises(CheckpointError, match="seed was 7, and is 8"):
        BatchIterator(train, 3, seed=8, shuffle=True).load_state_dict(first.state_dict())
    unshuffled = BatchIterator(Windows(corpus, 4, 0, 3), 2, seed=7, shuffle=False)
    assert [int(row[0]) for _ in range(3) for row in unshuffled.next()] == [0, 4, 8, 0, 4, 8]


# --- tokenizers ----------------------------------------------------------------------------------


def test_tokenizer_ignores_saved_truncation_and_padding(tmp_path: Path) -> None:
    ByteTokenizer().save_pretrained(tmp_path / "plain")
    plain = transformers.AutoTokenizer.from_pretrained(tmp_path / "plain")
    texts = ["a", "dä cab " * 5]
    plain(texts, padding=True, truncation=True, max_length=6)  # the backend stores these settings
    plain.save_pretrained(tmp_path / "cutting")
    saved = json.loads((tmp_path / "cutting" / "tokenizer.json").read_text())
    assert saved["truncation"]["max_length"] == 6
    assert saved["padding"] is not None
    found = find_tokenizer(str(tmp_path / "cutting"))
    assert [one.tolist() for one in found.encode(texts)] == [list(t.encode()) for t in texts]
    assert found.identity == find_tokenizer(str(tmp_path / "plain")).identity
    found.save_pretrained(tmp_path / "exported")
    exported = json.loads((tmp_path / "exported" / "tokenizer.json").read_text())
    assert exported["truncation"] == saved["truncation"]
    assert exported["padding"] == saved["padding"]


def test_remote_code_is_refused_without_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[Any] = []

    def fake_input(*question: Any) -> str:
        questions.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", fake_input)
    auto_map = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}
    config = {"model_type": "own", "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": auto_map})
    )
    (tmp_path / "own.py").write_text("raise AssertionError('it was run')\n")
    with pytest.raises(ConfigError, match="no tokenizer that transformers can load"):
        find_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="no config that transformers takes"):
        read_facts(load_run_config(settings(tmp_path, model={"path": str(tmp_path)})), None)
    assert questions == []


def test_failed_hub_download_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the network failure, not requirements of tokenizers."""
    downloads: list[str] = []

    def download(name: str, **more: Any) -> str:
        downloads.append(name)
        raise OSError("Name or service not known")

    monkeypatch.setattr(package("huggingface_hub"), "snapshot_download", download)
    raw = settings(tmp_path, model={"path": "own/model"}, tokenizer="auto")
    with pytest.raises(MachineError, match="the Hugging Face Hub did not provide it"):
        prepare_run(load_run_config(raw), tmp_path / "tokens")
    assert downloads == ["own/model"]


def test_tokenizer_size_with_gaps_in_vocabulary() -> None:
    class SparseVocabulary:
        eos_token_id = 70_000

        def __len__(self) -> int:
            return 3

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1, "end": 70_000}

    assert Tokenizer("holes", SparseVocabulary()).size == 70_001
