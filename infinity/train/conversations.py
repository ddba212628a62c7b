"""Conversations and instructions as tokens that say which of them are trained on.

[Note: marked tokens]
A conversation is a row with "messages", or with "prompt" and "completion": texts, or messages too.
Rows as Alpaca has them ("instruction", maybe "input", and "output") and as ShareGPT has them
("conversations" of "from" and "value") are turned into messages first.
It becomes tokens of 32 bits: the lower 30 are the token, `FIRST` is the first of a conversation,
`TRAINED` one whose loss counts. What an assistant said is found in the rendered text, as ranges of
characters, and the tokens that overlap them are marked; so a text is tokenised once, as a whole.
Those ranges are what the chat template puts between {% generation %} and {% endgeneration %}. A
template without these marks is asked for the beginnings of the conversation: what the rendering of
the first i + 1 messages has beyond that of the first i, with the prompt for an answer, is turn i.
That holds if both are beginnings of the whole rendering, which is checked. Where the last message
is written in another way than the same one before others (with an empty thought, say), its end is
found from behind: what stays the same behind a message when it says something else comes after its
words, and of that, what stays the same where it is the last one still belongs to it.
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
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OTHER = "\N{SYMBOL FOR NULL}"  # what nobody says
_BATCH, _CHARACTERS = 256, 1 << 20  # conversations, or so much, that are worth a call
_LONGEST = 1 << 23  # characters of one; a token takes a kilobyte while it is made
_FIELDS = (
    "'messages', or 'prompt' and 'completion', or as Alpaca's 'instruction' and 'output', or as "
    "ShareGPT's 'conversations'"
)
# Who speaks in rows like ShareGPT's, by the roles of chat templates.
_SPEAKERS = {
    "system": "system",
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip

Row = tuple[str, Any]  # where it is, and what it says
Messages = list[dict[str, Any]]


class _Rendered(NamedTuple):
    """A text, the ranges of characters that are trained on, and whether it is no template's."""

    text: str
    trained: Sequence[tuple[int, int]]
    plain: bool


def holds_conversations(sources: Sequence[TextSource], text_field: str, errors: str) -> bool:
    """Whether the first row of all sources is a conversation, and has no text of its own."""
    rows = chain.from_iterable(read_rows(source, errors, lambda _: None) for source in sources)
    _, row = next(rows, ("", None))
    return isinstance(row, dict) and text_field not in row and _is_conversation(row)


def _is_conversation(row: dict[str, Any]) -> bool:
    pairs = ({"prompt", "completion"}, {"instruction", "output"})
    return bool(row.keys() & {"messages", "conversations"}) or any(p <= row.keys() for p in pairs)


def _with_messages(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row with "messages", where it is like Alpaca's or ShareGPT's."""
    if "messages" in row or {"prompt", "completion"} <= row.keys():
        return row
    if "conversations" in row:
        found = _turns(where, row["conversations"])
    else:
        texts = {name: row.get(name) or "" for name in ("instruction", "input", "output")}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise ConfigError(f"{where}: the field {name!r} is {text!r:.60}, no text")
        asked = "\n\n".join(filter(None, (texts["instruction"], texts["input"])))
        found = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": texts["output"]},
        ]
    if row.get("system"):
        found.insert(0, {"role": "system", "content": row["system"]})
    return row | {"messages": found}


def _turns(where: str, given: Any) -> list[Any]:
    found = []
    for number, turn in enumerate(given if isinstance(given, list | tuple) else [given], start=1):
        if isinstance(turn, dict) and "role" in turn:
            found.append(turn)
            continue
        speaker = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(speaker, str) or speaker not in _SPEAKERS or "value" not in turn:
            raise ConfigError(
                f"{where}: turn {number} of 'conversations' is {turn!r:.80}",
                because="a turn has 'value', and 'from', one of " + ", ".join(_SPEAKERS),
                remedy='{"from": "human", "value": "..."}; or \'messages\' with \'role\' and '
                "'content'",
            )
        found.append({"role": _SPEAKERS[speaker], "content": turn["value"]})
    return found


@dataclass(frozen=True)
class Conversations:
    """How rows become marked tokens.

    `end` is the token that ends a completion that is plain text. Losses are of what assistants
    said, or of completions, or where `everything` of all tokens. Raises `ConfigError` for a
    tokenizer that does not say where its tokens are.
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
        """Equal where equal rows give equal tokens, by tokenizers that are equal."""
        template = getattr(self.tokenizer.wrapped, "chat_template", None)
        facts = repr((template, self.tokenizer.wrapped.special_tokens_map, self.everything))
        return hashlib.sha256(facts.encode()).hexdigest()

    def encode(self, rows: Iterable[Row]) -> Iterator[NDArray[np.uint32]]:
        """The marked tokens of each row; raises `ConfigError` for one that is no conversation."""
        rendered = (self._rendered(*row) for row in rows)
        for plain, batch in groupby(rendered, lambda one: one.plain):
            while held := _batch(batch):
                texts = [one.text for one in held]
                fast: Any = self.tokenizer.fast
                found = fast.encode_batch(texts, add_special_tokens=plain)
                for one, encoding in zip(held, found, strict=True):
                    yield self._marked(one, encoding)

    def _marked(self, one: _Rendered, encoding: Any) -> NDArray[np.uint32]:
        count = len(encoding.ids)
        if one.plain:  # what the tokenizer adds at the end is `end`, or nothing that is wanted here
            added = encoding.special_tokens_mask
            while count and added[count - 1]:
                count -= 1
        tokens = np.asarray(encoding.ids[:count], np.uint32)
        offsets = np.asarray(encoding.offsets[:count], np.int64).reshape(-1, 2)
        for begin, end in one.trained:
            first = np.searchsorted(offsets[:, 1], begin, side="right")
            last = np.searchsorted(offsets[:, 0], end, side="left")
            tokens[first:last] |= TRAINED
        if one.plain and self.end is not None:
            tokens = np.append(tokens, np.uint32(self.end | TRAINED))
        if len(tokens):  # nothing comes before the first, so nothing predicts it
            tokens[0] = (tokens[0] & TOKEN) | FIRST
        return tokens

    # --- rendering -------------------------------------------------------------------------------

    def _rendered(self, where: str, row: Any) -> _Rendered:
        if not isinstance(row, dict) or not _is_conversation(row):
            keys = ", ".join(map(repr, row)) if isinstance(row, dict) else "no object"
            raise ConfigError(
                f"{where} is no conversation: it has {keys or 'no fields'}",
                because=f"conversations have {_FIELDS}, and the rows before this one do",
                remedy="rename its fields so; data.records: text trains on a text in each row",
            )
        row = _with_messages(where, row)
        if "messages" in row:
            found = self._dialogue(where, _messages(where, "messages", row), row.get("tools"))
        elif isinstance(row["prompt"], str) and isinstance(row["completion"], str):
            prompt, text = row["prompt"], row["prompt"] + row["completion"]
            found = _Rendered(text, [(len(prompt), len(text))], True)
        else:
            asked = _messages(where, "prompt", row)
            answered = _messages(where, "completion", row)
            text, _ = self._render(where, asked + answered, row.get("tools"))
            before, _ = self._render(where, asked, row.get("tools"), prompts=True)
            if not text.startswith(before):
                _refuse_turn(where, len(asked))
            found = _Rendered(text, [(len(before), len(text))], False)
        text = as_utf8(where, found.text, self.errors)
        if len(text) > _LONGEST:
            raise ConfigError(
                f"{where} is one conversation of {len(text):,} characters",
                because=f"more than {_LONGEST:,} are in no window, and take gigabytes to tokenise",
                remedy="one conversation a line: are these several, or a file in one of them?",
            )
        return found._replace(trained=[(0, len(text))]) if self.everything else found

    def _dialogue(self, where: str, messages: Messages, tools: Any) -> _Rendered:
        text, trained = self._render(where, messages, tools)
        if trained is not None or self.everything:
            return _Rendered(text, trained or [], False)
        found = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(where, messages[:i], tools, prompts=True)[0] if i else None
                end = self._end_of_turn(where, messages, i, tools, text)
                if before is None or end < len(before) or not text.startswith(before):
                    _refuse_turn(where, i)
                found.append((len(before), end))
        return _Rendered(text, found, False)

    def _end_of_turn(self, where: str, messages: Messages, i: int, tools: Any, text: str) -> int:
        """Return the end of message i in the rendered conversation; -1 if it is ambiguous."""
        last = self._render(where, messages[: i + 1], tools)[0]
        if text.startswith(last):
            return len(last)
        other = [*messages[:i], messages[i] | {"content": _OTHER}, *messages[i + 1 :]]
        suffix = _same_at_the_end(text, self._render(where, other, tools)[0])
        tail = _same_at_the_end(last, self._render(where, other[: i + 1], tools)[0])
        end = len(text) - suffix + tail
        return end if text[:end].endswith(last[len(last) - tail :]) and tail <= suffix else -1

    def _render(
        self, where: str, messages: Messages, tools: Any, *, prompts: bool = False
    ) -> tuple[str, Sequence[tuple[int, int]] | None]:
        """The text, and the ranges of a template that marks them, else None."""
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
            marked = bool(_MARKED.search(template))
            (text,), ranges = library.render_jinja_template(
                [messages], tools=tools, chat_template=template, add_generation_prompt=prompts,
                return_assistant_tokens_mask=marked, **wrapped.special_tokens_map,
            )  # fmt: skip
        except Exception as error:  # of whatever kind a template, or what it is given, raises
            raise ConfigError(
                f"{where}: the chat template of {self.tokenizer.name} does not take it",
                because=first_lines(error),
                remedy="correct that row; or data.chat_template: FILE, with another template",
            ) from error
        for number, message in enumerate(messages, start=1):
            parts = message.get("content")
            in_parts = isinstance(parts, list) and any(isinstance(p, dict) for p in parts)
            if in_parts and str(parts) in text:
                raise ConfigError(
                    f"{where}: the chat template writes the content of message {number} as "
                    f"{parts!r:.80}",
                    because="it takes texts alone, and this content is in parts",
                    remedy='give a text: {"role": ..., "content": "..."}; or '
                    "data.chat_template: FILE, with a template that takes parts",
                )
        return text, ranges[0] if marked else None


def _batch(rendered: Iterable[_Rendered]) -> list[_Rendered]:
    """The next ones that are worth a call of the tokenizer."""
    held, size = [], 0
    for one in rendered:
        held.append(one)
        size += len(one.text)
        if len(held) == _BATCH or size >= _CHARACTERS:
            break
    return held


def _messages(where: str, field: str, row: dict[str, Any]) -> Messages:
    """Messages without fields that are None, as transformers leaves them out."""
    given = row[field]
    proper = isinstance(given, list | tuple) and given
    if proper and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in given):
        found = [{name: value for name, value in m.items() if value is not None} for m in given]
        for number, message in enumerate(found, start=1):
            # A template writes nothing where it finds none, and that would be trained on.
            if "content" not in message and "tool_calls" not in message:
                raise ConfigError(
                    f"{where}: message {number} of {field!r} has no content: it has "
                    f"{', '.join(map(repr, given[number - 1]))}",
                    because="a message has 'content' or 'tool_calls'",
                    remedy='rename its field so; "" is an empty answer',
                )
        return found
    raise ConfigError(
        f"{where}: {field!r} is {given!r:.80}",
        because="it must be a list of objects with 'role' and 'content'"
        + ("" if field == "messages" else ", or a text as the other of prompt and completion is"),
        remedy='{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}',
    )


def _same_at_the_end(one: str, other: str) -> int:
    """How many characters at the ends of two texts are the same."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _refuse_turn(where: str, turn: int) -> NoReturn:
    raise ConfigError(
        f"{where}: the chat template does not show where message {turn + 1} begins and ends",
        because="it writes the messages before it, or itself, in another way where others follow "
        "(it leaves out earlier reasoning, say), or nothing comes before it",
        remedy="data.chat_template: FILE, with {% generation %} and {% endgeneration %} around "
        "the assistant's turns; or data.loss_on: all",
    )


def use_template(tokenizer: Tokenizer, path: Path) -> None:
    """Give a tokenizer the chat template in a file, which is saved with it."""
    try:
        tokenizer.wrapped.chat_template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template: {path} cannot be read: {error}",
            remedy="the path of a Jinja file; left out, the tokenizer's own template is taken",
        ) from error
