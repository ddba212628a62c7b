"""Conversations and instructions as tokens with flags for those that are trained on.

[Note: marked tokens]
A conversation is a row with "messages", or with "prompt" and "completion", each a text or messages.
Rows in Alpaca's format ("instruction", optionally "input", and "output") and in ShareGPT's
("conversations" of "from" and "value") are converted to messages first.
A conversation is encoded as uint32: the lower 30 bits are the token, the flag `FIRST` is set on the
first token of a conversation, `TRAINED` on tokens whose loss counts. The assistant's turns are
located as character ranges of the rendered text, and the tokens that overlap them are flagged, so
that a text is tokenized once and in full.
The ranges are those that the chat template puts between {% generation %} and {% endgeneration %}.
If a template has no such tags, prefixes of the conversation are rendered: turn i is the text by
which the rendering of the first i + 1 messages extends that of the first i messages with the
generation prompt. That requires both to be prefixes of the full rendering, which is checked. If a
template renders the last message differently from the same message before others (with an empty
thought, say), the conversation is rendered again with other content in that message: the common
suffix of both renderings is the text after the content. Rendering both only up to that message
gives a shorter common suffix, the text between the content and the end of the message.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from infinity.errors import ConfigError, first_lines
from infinity.train.texts import TextSource, Tokenizer, as_utf8, read_rows

FIRST, TRAINED = 1 << 30, 1 << 31
TOKEN = FIRST - 1
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OTHER_CONTENT = "\N{SYMBOL FOR NULL}"  # content that no conversation has
_BATCH_ROWS = 256  # most conversations of a tokenizer call
_BATCH_CHARACTERS = 1 << 20  # about the most characters of a tokenizer call
_MAX_CHARACTERS = 1 << 23  # of a conversation; tokenizing takes about a kilobyte per token
_FIELDS = (
    "'messages', or 'prompt' and 'completion', or as Alpaca's 'instruction' and 'output', or as "
    "ShareGPT's 'conversations'"
)
# Role in chat templates of each speaker ("from") in rows in ShareGPT's format.
_ROLE_OF_SPEAKER = {
    "system": "system",
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip

Row = tuple[str, Any]  # location for messages, and content
Messages = list[dict[str, Any]]


class _Rendered(NamedTuple):
    """A text, the character ranges trained on, and whether it is plain, not from a template."""

    text: str
    trained: Sequence[tuple[int, int]]
    plain: bool


def holds_conversations(sources: Sequence[TextSource], text_field: str, errors: str) -> bool:
    """Return True if the first row of all sources is a conversation without `text_field`."""
    rows = chain.from_iterable(read_rows(source, errors, lambda _: None) for source in sources)
    _, row = next(rows, ("", None))
    return isinstance(row, dict) and text_field not in row and _is_conversation(row)


def _is_conversation(row: dict[str, Any]) -> bool:
    pairs = ({"prompt", "completion"}, {"instruction", "output"})
    return bool(row.keys() & {"messages", "conversations"}) or any(p <= row.keys() for p in pairs)


def _with_messages(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row; add "messages" if it is in Alpaca's or ShareGPT's format."""
    if "messages" in row or {"prompt", "completion"} <= row.keys():
        return row
    if "conversations" in row:
        messages = _sharegpt_messages(where, row["conversations"])
    else:
        texts = {name: row.get(name) or "" for name in ("instruction", "input", "output")}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise ConfigError(f"{where}: the field {name!r} is {text!r:.60}, no text")
        question = "\n\n".join(filter(None, (texts["instruction"], texts["input"])))
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": texts["output"]},
        ]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return row | {"messages": messages}


def _sharegpt_messages(where: str, turns: Any) -> list[Any]:
    messages = []
    for number, turn in enumerate(turns if isinstance(turns, list | tuple) else [turns], start=1):
        if isinstance(turn, dict) and "role" in turn:
            messages.append(turn)
            continue
        speaker = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(speaker, str) or speaker not in _ROLE_OF_SPEAKER or "value" not in turn:
            raise ConfigError(
                f"{where}: turn {number} of 'conversations' is {turn!r:.80}",
                because="a turn has 'value', and 'from', one of " + ", ".join(_ROLE_OF_SPEAKER),
                remedy='{"from": "human", "value": "..."}; or \'messages\' with \'role\' and '
                "'content'",
            )
        messages.append({"role": _ROLE_OF_SPEAKER[speaker], "content": turn["value"]})
    return messages


@dataclass(frozen=True)
class Conversations:
    """Encoder of rows as marked tokens; see [Note: marked tokens].

    `end` is the token appended to a completion that is plain text. Tokens of assistant turns or of
    completions are trained on; with `everything`, all tokens. Raises `ConfigError` for a tokenizer
    without character offsets.
    """

    tokenizer: Tokenizer
    end: int | None
    everything: bool
    errors: str

    def __post_init__(self) -> None:
        if self.tokenizer.fast is None:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name} gives no positions of tokens in a text",
                because="it has no tokenizer.json, so the assistant's tokens cannot be found",
                remedy="tokenizer: DIR with a tokenizer.json",
            )

    @property
    def identity(self) -> str:
        """Hash of the settings: equal ones encode equal rows equally, given equal tokenizers."""
        template = getattr(self.tokenizer.wrapped, "chat_template", None)
        facts = repr((template, self.tokenizer.wrapped.special_tokens_map, self.everything))
        return hashlib.sha256(facts.encode()).hexdigest()

    def encode(self, rows: Iterable[Row]) -> Iterator[NDArray[np.uint32]]:
        """Yield the marked tokens of each row; raise `ConfigError` for other rows."""
        rendered = (self._render_row(*row) for row in rows)
        for plain, group in groupby(rendered, lambda conversation: conversation.plain):
            while batch := _take_batch(group):
                texts = [conversation.text for conversation in batch]
                fast: Any = self.tokenizer.fast
                encodings = fast.encode_batch(texts, add_special_tokens=plain)
                for conversation, encoding in zip(batch, encodings, strict=True):
                    yield self._mark_tokens(conversation, encoding)

    def _mark_tokens(self, rendered: _Rendered, encoding: Any) -> NDArray[np.uint32]:
        count = len(encoding.ids)
        if rendered.plain:  # drop special tokens at the end: `end` is appended below
            added = encoding.special_tokens_mask
            while count and added[count - 1]:
                count -= 1
        tokens = np.asarray(encoding.ids[:count], np.uint32)
        offsets = np.asarray(encoding.offsets[:count], np.int64).reshape(-1, 2)
        for begin, end in rendered.trained:
            first = np.searchsorted(offsets[:, 1], begin, side="right")
            last = np.searchsorted(offsets[:, 0], end, side="left")
            tokens[first:last] |= TRAINED
        if rendered.plain and self.end is not None:
            tokens = np.append(tokens, np.uint32(self.end | TRAINED))
        if len(tokens):  # the first token has no context that could predict it
            tokens[0] = (tokens[0] & TOKEN) | FIRST
        return tokens

    # --- rendering -------------------------------------------------------------------------------

    def _render_row(self, where: str, row: Any) -> _Rendered:
        if not isinstance(row, dict) or not _is_conversation(row):
            keys = ", ".join(map(repr, row)) if isinstance(row, dict) else "no object"
            raise ConfigError(
                f"{where} is no conversation: it has {keys or 'no fields'}",
                because=f"conversations have {_FIELDS}, and the rows before this one do",
                remedy="rename its fields so; data.records: text trains on a text in each row",
            )
        row = _with_messages(where, row)
        if "messages" in row:
            rendered = self._render_dialogue(
                where, _messages(where, "messages", row), row.get("tools")
            )
        elif isinstance(row["prompt"], str) and isinstance(row["completion"], str):
            prompt, text = row["prompt"], row["prompt"] + row["completion"]
            rendered = _Rendered(text, [(len(prompt), len(text))], True)
        else:
            # First the one that is no text, so that the error names it.
            fields = sorted(("prompt", "completion"), key=lambda name: isinstance(row[name], str))
            messages = {name: _messages(where, name, row) for name in fields}
            prompt_messages, completion_messages = messages["prompt"], messages["completion"]
            text, _ = self._render(where, prompt_messages + completion_messages, row.get("tools"))
            prefix, _ = self._render(where, prompt_messages, row.get("tools"), prompts=True)
            if not text.startswith(prefix):
                _refuse_turn(where, len(prompt_messages))
            rendered = _Rendered(text, [(len(prefix), len(text))], False)
        text = as_utf8(where, rendered.text, self.errors)
        if len(text) > _MAX_CHARACTERS:
            raise ConfigError(
                f"{where} is one conversation of {len(text):,} characters",
                because=f"more than {_MAX_CHARACTERS:,} are in no window, and take gigabytes to "
                "tokenize",
                remedy="one conversation a line: are these several, or a file in one of them?",
            )
        return rendered._replace(trained=[(0, len(text))]) if self.everything else rendered

    def _render_dialogue(self, where: str, messages: Messages, tools: Any) -> _Rendered:
        text, trained = self._render(where, messages, tools)
        if trained is not None or self.everything:
            return _Rendered(text, trained or [], False)
        ranges = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prefix = self._render(where, messages[:i], tools, prompts=True)[0] if i else None
                end = self._end_of_turn(where, messages, i, tools, text)
                if prefix is None or end < len(prefix) or not text.startswith(prefix):
                    _refuse_turn(where, i)
                ranges.append((len(prefix), end))
        return _Rendered(text, ranges, False)

    def _end_of_turn(self, where: str, messages: Messages, i: int, tools: Any, text: str) -> int:
        """Return the end of message i in the rendered conversation; -1 if it is ambiguous."""
        prefix = self._render(where, messages[: i + 1], tools)[0]
        if text.startswith(prefix):
            return len(prefix)
        altered = [*messages[:i], messages[i] | {"content": _OTHER_CONTENT}, *messages[i + 1 :]]
        suffix = _common_suffix_length(text, self._render(where, altered, tools)[0])
        tail = _common_suffix_length(prefix, self._render(where, altered[: i + 1], tools)[0])
        end = len(text) - suffix + tail
        return end if text[:end].endswith(prefix[len(prefix) - tail :]) and tail <= suffix else -1

    def _render(
        self, where: str, messages: Messages, tools: Any, *, prompts: bool = False
    ) -> tuple[str, Sequence[tuple[int, int]] | None]:
        """Return the text, and its ranges if the template has generation tags, else None."""
        wrapped = self.tokenizer.wrapped
        if not getattr(wrapped, "chat_template", None):
            raise ConfigError(
                f"{where} has messages, and the tokenizer {self.tokenizer.name} has no chat "
                "template",
                because="that of a model which was not trained on conversations has none",
                remedy="data.chat_template: FILE, with a Jinja template; or tokenizer: DIR of a "
                "model for conversations",
            )
        library: Any = importlib.import_module("transformers.utils.chat_template_utils")
        try:
            template = wrapped.get_chat_template(tools=tools)
            marked = bool(_GENERATION_TAG.search(template))
            (text,), ranges = library.render_jinja_template(
                [messages], tools=tools, chat_template=template, add_generation_prompt=prompts,
                return_assistant_tokens_mask=marked, **wrapped.special_tokens_map,
            )  # fmt: skip
        except Exception as error:  # templates may raise any exception
            raise ConfigError(
                f"{where}: the chat template of {self.tokenizer.name} does not take it",
                because=first_lines(error),
                remedy="correct that row; or data.chat_template: FILE, with another template",
            ) from error
        for number, message in enumerate(messages, start=1):
            content = message.get("content")
            is_in_parts = isinstance(content, list) and any(isinstance(p, dict) for p in content)
            if is_in_parts and str(content) in text:
                raise ConfigError(
                    f"{where}: the chat template writes the content of message {number} as "
                    f"{content!r:.80}",
                    because="it takes texts alone, and this content is in parts",
                    remedy='give a text: {"role": ..., "content": "..."}; or '
                    "data.chat_template: FILE, with a template that takes parts",
                )
        return text, ranges[0] if marked else None


def _take_batch(rendered: Iterable[_Rendered]) -> list[_Rendered]:
    """Take the rows of one tokenizer call."""
    batch, size = [], 0
    for conversation in rendered:
        batch.append(conversation)
        size += len(conversation.text)
        if len(batch) == _BATCH_ROWS or size >= _BATCH_CHARACTERS:
            break
    return batch


def _messages(where: str, field: str, row: dict[str, Any]) -> Messages:
    """Return the messages without fields that are None, as transformers does."""
    content = row[field]
    is_list = isinstance(content, list | tuple) and content
    if is_list and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in content):
        messages = [
            {name: value for name, value in m.items() if value is not None} for m in content
        ]
        for number, message in enumerate(messages, start=1):
            # A template renders missing content as an empty turn, which would be trained on.
            if "content" not in message and "tool_calls" not in message:
                raise ConfigError(
                    f"{where}: message {number} of {field!r} has no content: it has "
                    f"{', '.join(map(repr, content[number - 1]))}",
                    because="a message has 'content' or 'tool_calls'",
                    remedy='rename its field so; "" is an empty answer',
                )
        return messages
    raise ConfigError(
        f"{where}: {field!r} is {content!r:.80}",
        because="it must be a list of objects with 'role' and 'content'"
        + ("" if field == "messages" else ", or a text as the other of prompt and completion is"),
        remedy='{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}',
    )


def _common_suffix_length(first: str, second: str) -> int:
    """Return the length of the common suffix of two texts."""
    pairs = zip(reversed(first), reversed(second), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _refuse_turn(where: str, turn: int) -> NoReturn:
    raise ConfigError(
        f"{where}: the chat template does not show where message {turn + 1} begins and ends",
        because="it renders this message, or those before it, differently if others follow (it "
        "leaves out earlier reasoning, say), or nothing comes before it",
        remedy="data.chat_template: FILE, with {% generation %} and {% endgeneration %} around "
        "the assistant's turns; or data.loss_on: all",
    )


def use_template(tokenizer: Tokenizer, path: Path) -> None:
    """Set the chat template of a tokenizer to that in a file; it is saved with the tokenizer."""
    try:
        tokenizer.wrapped.chat_template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template: {path} cannot be read: {error}",
            remedy="the path of a Jinja file; left out, the tokenizer's own template is taken",
        ) from error
