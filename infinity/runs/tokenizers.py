"""Text to tokens: a pretrained tokenizer, or one whose tokens are bytes."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from infinity.errors import ConfigError, first_lines
from infinity.huggingface.library import transformers
from infinity.runs.settings import BYTES

Tokens = NDArray[np.generic]


class Tokenizer(Protocol):
    """What a corpus and an export need of a tokenizer."""

    name: str
    size: int
    """One more than the largest token."""
    end: int | None
    """The token that ends a document; None where it has none."""
    identity: str
    """Equal for tokenizers that give equal tokens."""

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, without special ones."""

    def save_pretrained(self, directory: str | os.PathLike[str]) -> Any:
        """Write the files that `transformers.AutoTokenizer` reads."""


class ByteTokenizer:
    """A token is a byte of UTF-8; 256 ends a document."""

    name = BYTES
    size = 257
    end: int | None = 256
    identity = BYTES

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def save_pretrained(self, directory: str | os.PathLike[str]) -> Any:
        """The same tokens as a byte-level BPE without merges."""
        return byte_level().save_pretrained(directory)


def byte_level() -> Any:
    """The tokens of `ByteTokenizer` as a tokenizer of transformers."""
    kind = transformers().PreTrainedTokenizerFast
    library = importlib.import_module("tokenizers")  # comes with transformers
    end = "<|endoftext|>"
    vocabulary = {char: byte for byte, char in enumerate(_characters_of_bytes())}
    model = library.models.BPE(vocab=vocabulary, merges=[])
    made = library.Tokenizer(model)
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens([library.AddedToken(end, special=True)])
    return kind(tokenizer_object=made, eos_token=end, bos_token=end, pad_token=end)


def _characters_of_bytes() -> list[str]:
    """What byte-level tokenizers write for each byte: itself, or a character from 256 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    stand_in = {byte: 256 + index for index, byte in enumerate(others)}
    return [chr(stand_in.get(byte, byte)) for byte in range(256)]


class PretrainedTokenizer:
    """A tokenizer of transformers."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._fast = _whole(getattr(tokenizer, "backend_tokenizer", None))
        self.size = len(tokenizer)
        end = tokenizer.eos_token_id
        self.end: int | None = end if isinstance(end, int) else None
        text = self._fast.to_str() if self._fast is not None else _vocabulary(tokenizer)
        self.identity = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, without special ones; long texts are not cut."""
        if self._fast is not None:
            found = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.asarray(one.ids, dtype=np.uint32) for one in found]
        lists = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [np.asarray(one, dtype=np.uint32) for one in lists]

    def save_pretrained(self, directory: str | os.PathLike[str]) -> Any:
        """As transformers saves it."""
        return self._tokenizer.save_pretrained(os.fspath(directory))


def _whole(backend: Any) -> Any:
    """A copy that neither cuts texts nor fills them up, whatever its tokenizer.json says."""
    if backend is None:
        return None
    copied = copy.deepcopy(backend)  # what is exported stays as it was
    copied.no_truncation()
    copied.no_padding()
    return copied


def _vocabulary(tokenizer: Any) -> str:
    return json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])


def find_tokenizer(source: str) -> Tokenizer:
    """The tokenizer in a directory or of a Hub id, or that of bytes.

    Raises `ConfigError` where there is none.
    """
    if source == BYTES:
        return ByteTokenizer()
    path = Path(source).expanduser()
    if not path.is_dir() and (path.is_absolute() or source.startswith((".", "~"))):
        raise _no_tokenizer(source, "there is no such directory")
    try:
        name = str(path) if path.is_dir() else source
        found = transformers().AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise _no_tokenizer(source, first_lines(error)) from error
    if not len(found):
        raise _no_tokenizer(source, "it has no tokens")
    return PretrainedTokenizer(source, found)


def _no_tokenizer(source: str, because: str) -> ConfigError:
    return ConfigError(
        f"{source} has no tokenizer that transformers can load",
        because=because,
        remedy=f"tokenizer: DIR names another directory with a tokenizer.json; tokenizer: {BYTES} "
        "needs no files",
    )
