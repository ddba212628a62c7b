"""Tests of fine-tuning on conversations: loss masks, packing, best weights and adapters."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import tokenizers
import torch
import transformers
from support.quantized import round_frozen
from support.runs import TEMPLATE, losses_of, settings, train, write_chat
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from infinity.errors import ConfigError, DoesNotFitError
from infinity.train import loop as runs_loop
from infinity.train import run as runs_run
from infinity.train.conversations import FIRST, TOKEN, TRAINED, Conversations, holds_conversations
from infinity.train.data import Corpus
from infinity.train.loop import Loop
from infinity.train.preparation import check_packing, loss_of, read_facts
from infinity.train.run import Run
from infinity.train.settings import load_run_config
from infinity.train.texts import ByteTokenizer, Tokenizer, find_sources
from infinity.train.windows import Packed, pack, split

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
REASONS_IN_LAST_TURN = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' and loop.last %}so: {% endif %}{{ m.content | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TEXTS = ["Is it là?", "  Yes: naïve 😀, yes", "the there them", "no\n\nwell 😀😀", "é", ""]
NO_DROPOUT = {f"model__config__{name}_pdrop": 0.0 for name in ("embd", "attn", "resid")}


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    """Return a tokenizer with merges inside multi-byte characters, and special tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*TEXTS, *TEXTS, "user assistant"], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <|end|>", special_tokens=[("<s>", 0), ("<|end|>", 1)]
    )
    kind = transformers.PreTrainedTokenizerFast
    return kind(tokenizer_object=made, bos_token="<s>", eos_token="<|end|>", chat_template=CHATML)


def encode(hf_tokenizer: Any, row: Any, template: str = CHATML, everything: bool = False) -> Any:
    hf_tokenizer.chat_template = template
    maker = Conversations(Tokenizer("ours", hf_tokenizer), 1, everything, "strict")
    (found,) = maker.encode([("chat.jsonl, line 7", row)])
    return found


def reference_tokens(hf_tokenizer: Any, segments: list[tuple[str, bool]]) -> list[tuple[int, bool]]:
    """Return (token, has loss) for segments of a text, derived byte by byte as a reference."""
    has_loss = [trained for text, trained in segments for _ in text.encode()]
    tokens = hf_tokenizer.encode("".join(text for text, _ in segments), add_special_tokens=False)
    bytes_of = {c: b for b, c in bytes_to_unicode().items()}
    found, at = [], 0
    for index, name in enumerate(hf_tokenizer.convert_ids_to_tokens(tokens)):
        size = len(name) if all(c in bytes_of for c in name) else len(name.encode())
        found.append((tokens[index], index > 0 and any(has_loss[at : at + size])))
        at += size
    assert at == len(has_loss)
    return found


def as_pairs(encoded: Any) -> list[tuple[int, bool]]:
    assert [bool(value & FIRST) for value in encoded] == [True] + [False] * (len(encoded) - 1)
    return [(int(value & TOKEN), bool(value & TRAINED)) for value in encoded]


# --- loss mask -----------------------------------------------------------------------------------


def test_loss_covers_only_assistant_messages(hf_tokenizer: Any) -> None:
    for first in range(len(TEXTS)):
        texts = [TEXTS[(first + i) % len(TEXTS)] for i in range(5)]
        roles = ["system", "user", "assistant", "user", "assistant"]
        messages = [{"role": r, "content": c} for r, c in zip(roles, texts, strict=True)]
        segments = []
        for role, text in zip(roles, texts, strict=True):
            segments += [(f"<|{role}|>\n", False), (f"{text}<|end|>\n", role == "assistant")]
        expected = reference_tokens(hf_tokenizer, segments)
        row = {"messages": messages}
        assert as_pairs(encode(hf_tokenizer, row)) == expected
        assert as_pairs(encode(hf_tokenizer, row, MARKED)) == expected
        everything = reference_tokens(hf_tokenizer, [("".join(text for text, _ in segments), True)])
        assert as_pairs(encode(hf_tokenizer, row, everything=True)) == everything
        # The same messages as prompt and completion: only the completion has a loss.
        row = {"prompt": messages[:3], "completion": messages[3:]}
        start = len("".join(text for text, _ in segments[:6])) + len("<|assistant|>\n")
        full_text = "".join(text for text, _ in segments)
        if first == 0:
            with pytest.raises(ConfigError, match="where message 4 begins"):
                encode(hf_tokenizer, row)  # the completion starts with a user message
        row = {"prompt": messages[:4], "completion": messages[4:]}
        start = len("".join(text for text, _ in segments[:9]))
        expected = reference_tokens(
            hf_tokenizer, [(full_text[:start], False), (full_text[start:], True)]
        )
        assert as_pairs(encode(hf_tokenizer, row)) == expected


ASKED = [("user", "Is it là?"), ("assistant", "Yes"), ("user", "the"), ("assistant", "well")]
SHARED = [
    {"from": "gpt" if role == "assistant" else "human", "value": text} for role, text in ASKED
]
ADDED = [("user", "Add."), ("assistant", "4")]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        (
            {"instruction": "Add.", "input": "2 2", "output": "4"},
            [("user", "Add.\n\n2 2"), ("assistant", "4")],
        ),
        ({"instruction": "Add.", "input": "", "output": "4"}, ADDED),
        ({"instruction": "Add.", "output": "4", "system": "hm"}, [("system", "hm"), *ADDED]),
        ({"id": "a", "conversations": SHARED}, ASKED),
        ({"conversations": [{"role": role, "content": text} for role, text in ASKED]}, ASKED),
    ],
    ids=["alpaca", "no input", "a system's words", "sharegpt", "roles"],
)
def test_alpaca_and_sharegpt_rows_are_conversations(
    hf_tokenizer: Any, row: dict[str, Any], turns: list[tuple[str, str]], tmp_path: Path
) -> None:
    messages = [{"role": role, "content": text} for role, text in turns]
    assert (encode(hf_tokenizer, row) == encode(hf_tokenizer, {"messages": messages})).all()
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    sources = find_sources("data.train", [str(tmp_path / "rows.jsonl")], "auto")
    assert holds_conversations(sources, "text", "strict")


def test_template_rendering_last_turn_differently(hf_tokenizer: Any) -> None:
    """As in templates that omit the reasoning of earlier answers."""
    for first in range(len(TEXTS)):
        texts = [TEXTS[(first + i) % len(TEXTS)] for i in range(6)]
        segments = []
        for i, text in enumerate(texts):
            role = ("user", "assistant")[i % 2]
            reasoning = "so: " if i == 5 else ""
            segment = (f"{reasoning}{text.strip()}<|end|>\n", role == "assistant")
            segments += [(f"<|{role}|>\n", False), segment]
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
        ]
        assert as_pairs(
            encode(hf_tokenizer, {"messages": messages}, REASONS_IN_LAST_TURN)
        ) == reference_tokens(hf_tokenizer, segments)


def test_loss_covers_completion_and_end_token(hf_tokenizer: Any) -> None:
    for prompt, completion in pairwise(TEXTS[:5]):
        plain = reference_tokens(hf_tokenizer, [(prompt, False), (completion, True)])
        found = as_pairs(encode(hf_tokenizer, {"prompt": prompt, "completion": completion}))
        assert found[0] == (0, False)  # the BOS token
        assert found[1:-1] == [(plain[0][0], False), *plain[1:]]
        assert found[-1] == (1, True)


def test_loss_mask_matches_transformers(hf_tokenizer: Any) -> None:
    """Masks differ only in a multi-token last character: transformers marks its first token."""
    row = {"messages": [{"role": r, "content": TEXTS[1]} for r in ("user", "assistant")]}
    pairs = as_pairs(encode(hf_tokenizer, row, MARKED))
    expected = hf_tokenizer.apply_chat_template(
        row["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    assert [token for token, _ in pairs] == expected["input_ids"]
    assert [trained for _, trained in pairs] == [bool(m) for m in expected["assistant_masks"]]


DROPS_EARLIER_TURNS = "{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}"
RAISES = "{{ raise_exception('roles must alternate') }}"


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"text": "x"}, CHATML, r"it has 'text'\n.*'prompt' and 'completion'(.|\n)*records: text"),
        ([], CHATML, "it has no object"),
        ({"messages": "hi"}, CHATML, r"'messages' is 'hi'\n.*list of objects with 'role'"),
        ({"messages": [{"content": "x"}]}, CHATML, r"'messages' is \[\{'content'"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "value": "y"}]},
            CHATML,
            "message 2 of 'messages' has no content: it has 'role', 'value'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
            CHATML,
            r"content of message 1 as \[\{'type'(.|\n)*takes texts alone",
        ),
        ({"prompt": "x", "completion": 3}, CHATML, "'completion' is 3"),
        ({"instruction": "x", "output": 3}, CHATML, "the field 'output' is 3, no text"),
        (
            {"conversations": [{"from": "bot", "value": "x"}]},
            CHATML,
            r"turn 1 of 'conversations' is \{'from': 'bot'(.|\n)*one of system, human, user, gpt",
        ),
        ({"conversations": "hi"}, CHATML, "turn 1 of 'conversations' is 'hi'"),
        ({"conversations": [{"from": "gpt"}]}, CHATML, "turn 1 of 'conversations'"),
        ({"messages": [{"role": "user", "content": "x"}]}, RAISES, "roles must alternate"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, CHATML, "where message 1 begins"),
        (
            {"messages": [{"role": r, "content": r} for r in ("user", "assistant") * 2]},
            DROPS_EARLIER_TURNS,
            r"where message 2 begins(.|\n)*generation %\}(.|\n)*data\.loss_on: all",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            "",
            r"no chat template(.|\n)*data\.chat_template: FILE",
        ),
        ({"prompt": "\ud800", "completion": "x"}, CHATML, "is not UTF-8"),
    ],
)
def test_invalid_row_is_named(hf_tokenizer: Any, row: Any, template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^chat\.jsonl, line 7(.|\n)*{message}"):
        encode(hf_tokenizer, row, template)


def test_messages_with_tool_calls_or_content_parts(hf_tokenizer: Any) -> None:
    template = CHATML.replace(
        "{{ m.content }}", "{{ m.content[0].text if m.content else 'called' }}"
    )
    question = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    tool_call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    plain = [{"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "called"))]
    found = encode(hf_tokenizer, {"messages": [question, tool_call]}, template)
    assert found.tolist() == encode(hf_tokenizer, {"messages": plain}).tolist()


def test_tokenizer_batches_are_bounded_by_characters(
    hf_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(f"line {n}", {"prompt": "a" * n, "completion": "b"}) for n in (1, 30, 5, 70, 3, 1)]
    maker = Conversations(Tokenizer("ours", hf_tokenizer), 1, False, "strict")
    expected = [found.tolist() for found in maker.encode(rows)]
    calls: list[int] = []

    class Counts:
        def __init__(self, fast: Any) -> None:
            self.fast = fast

        def encode_batch(self, texts: list[str], **more: Any) -> Any:
            calls.append(len(texts))
            return self.fast.encode_batch(texts, **more)

    maker.tokenizer.fast = Counts(maker.tokenizer.fast)
    monkeypatch.setattr("infinity.train.conversations._BATCH_CHARACTERS", 33)
    assert [found.tolist() for found in maker.encode(rows)] == expected
    assert calls == [2, 2, 2]
    monkeypatch.setattr("infinity.train.conversations._MAX_CHARACTERS", 70)
    with pytest.raises(ConfigError, match=r"line 70 is one conversation of 71 characters"):
        list(maker.encode(rows))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data__train": "one.json", "data__held_out": 0.5}, "nothing can be held out"),
        (
            {"data__evaluate": "t.txt", "data__held_out": None},
            r"t\.txt has no rows\n.*chat\.jsonl has conversations",
        ),
        ({"data__train": "bots.json"}, "none of 2 (.|\n)*no message in them has the role 'ass"),
    ],
)
def test_unusable_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("said " * 99)
    (tmp_path / "one.json").write_text('{"prompt": "x", "completion": "y"}')
    bots = '{"messages": [{"role": "human", "content": "x"}, {"role": "bot", "content": "y"}]}\n'
    (tmp_path / "bots.json").write_text(2 * bots)
    raw = settings(tmp_path, **(write_chat(tmp_path) | change))
    with Run(load_run_config(raw)) as run, pytest.raises(ConfigError, match=message):
        run.prepare()


# --- packing -------------------------------------------------------------------------------------


def test_pack_puts_each_conversation_in_one_window() -> None:
    random = np.random.RandomState(0)
    for size, count in ((64, 200), (7, 50), (100, 1), (5, 0)):
        lengths = random.randint(1, size + 1, count)
        windows = pack(lengths, size)
        assert sorted(i for window in windows for i in window) == list(range(count))
        assert all(lengths[window].sum() <= size for window in windows)
        assert windows == sorted(windows)


def corpus_of(folder: Path) -> Corpus:
    (directory,) = [path for path in (folder / "run" / "data").iterdir() if path.is_dir()]
    return Corpus(directory)


def llama(**more: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=257, max_position_embeddings=64, bos_token_id=256,
        eos_token_id=256, **more,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def mean_loss_unpacked(model: Any, windows: Packed) -> Tensor:
    """Return the mean loss of all conversations, each run separately without padding."""
    total, count = torch.zeros(()), 0
    for start, length in zip(windows.documents.starts, windows.documents.lengths, strict=True):
        encoded = torch.from_numpy(windows.corpus.read(int(start), int(length)))
        tokens, trained = (encoded & TOKEN)[None], (encoded & TRAINED) != 0
        logits = model(input_ids=tokens).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
        total = total + losses[trained[1:]].sum()
        count += int(trained[1:].sum())
    return total / count


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_packed_conversations_do_not_attend_to_each_other(
    tmp_path: Path, kind: str, attention: str
) -> None:
    raw = settings(tmp_path, **write_chat(tmp_path), data__sequence_length=64, data__held_out=None)
    with Run(load_run_config(raw)) as run:
        windows = run.prepare().train
    assert isinstance(windows, Packed)
    assert len(windows) < len(windows.documents.starts) / 2
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=257, max_position_embeddings=64, head_dim=8,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.eval()
    compute = loss_of(model)
    weights = [windows.weight(i) for i in range(len(windows))]
    batches = torch.stack([windows.window(i) for i in range(len(windows))])
    with torch.no_grad():
        expected = mean_loss_unpacked(model, windows)
        assert compute(model, batches).item() == pytest.approx(expected.item(), rel=1e-5)
        total = sum(compute(model, b[None]) * w for b, w in zip(batches, weights, strict=True))
        assert total.item() / sum(weights) == pytest.approx(expected.item(), rel=1e-5)
        # Changing one conversation does not change the logits of the others.
        window = batches[:1].clone()
        starts = window[0, 2].eq(0).nonzero().flatten().tolist()
        inputs = {"position_ids": window[:, 2], "use_cache": False}
        before = model(input_ids=window[:, 0], **inputs).logits
        window[0, 0, starts[1] : starts[2]] = 7
        after = model(input_ids=window[:, 0], **inputs).logits
    same = (before == after).all(dim=2)[0]
    assert not same[starts[1]]
    assert same[: starts[1]].all()
    assert same[starts[2] :].all()


def test_packed_step_matches_unpacked_step(tmp_path: Path) -> None:
    """Loss and gradient norm of one step over all conversations, packed and one per window."""
    llama().save_pretrained(tmp_path / "base")
    results = []
    for packing in (True, False):
        raw = settings(
            tmp_path, **write_chat(tmp_path), data__sequence_length=64, data__held_out=None,
            data__packing=packing, model={"path": str(tmp_path / "base")}, training__steps=1,
            training__micro_batch=1, run_dir=str(tmp_path / f"packed-{packing}"),
            training__export="none",
        )  # fmt: skip
        with Run(load_run_config(raw)) as run:
            windows = run.prepare().train
        raw["engine"]["gradient_accumulation_steps"] = len(windows)
        _, watcher = train(raw)
        results += [(watcher.steps[0].loss, watcher.steps[0].grad_norm)]
    assert isinstance(windows, Packed)
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loss = mean_loss_unpacked(model, windows)
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    assert results[0] == pytest.approx((loss.item(), norm.item()), rel=1e-4)


def test_packing_is_refused_for_unsupported_models(tmp_path: Path) -> None:
    for config, message in (
        ({"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1}, "pass state from"),
        ({"model_type": "bloom", "hidden_size": 16, "n_layer": 1, "n_head": 2}, "no use_cache"),
        (
            {
                "model_type": "lfm2",
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "layer_types": ["conv", "full_attention"],
            },
            "conv layers pass state",
        ),
    ):
        facts = read_facts(
            load_run_config(settings(tmp_path, model={"config": config})), ByteTokenizer()
        )
        with pytest.raises(ConfigError, match=rf"{message}(.|\n)*data\.packing=false"):
            check_packing(facts, None)
    raw = settings(tmp_path, model={"config": {"model_type": "llama"}})
    facts = read_facts(load_run_config(raw), ByteTokenizer())
    check_packing(facts, "sdpa")
    with pytest.raises(ConfigError, match="have not been compared"):
        check_packing(facts, "flash_attention_2")


def test_long_conversations_are_truncated_or_dropped_with_notes(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * n, "completion": "b" * 9} for n in (3, 12, 30)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    raw = settings(tmp_path, data__train=str(path), data__held_out=None, data__sequence_length=16)
    with Run(load_run_config(raw)) as run:
        prepared = run.prepare()
    filled, first, second = prepared.notes
    assert filled.startswith("91% of a window are tokens")  # 13 + 16 of 32
    raw["data"]["held_out"], raw["run_dir"] = 0.5, str(tmp_path / "held")
    with Run(load_run_config(raw)) as run:  # counts include held-out windows
        assert run.prepare().notes[1:] == [first, second]
    assert "2 conversations are longer than the 16 tokens" in first
    assert "1 conversations have nothing to train on" in second
    assert [prepared.train.weight(i) for i in range(len(prepared.train))] == [10, 4]
    tokens, labels, positions = prepared.train.window(0)
    assert tokens.tolist() == [97] * 3 + [98] * 9 + [256, 0, 0, 0]
    assert labels.tolist() == [-100] * 3 + [98] * 9 + [256] + [-100] * 3
    assert positions.tolist() == [*range(13), 0, 1, 2]
    path.write_text(json.dumps(rows[2]))
    raw["run_dir"] = str(tmp_path / "other")
    with (
        Run(load_run_config(raw)) as run,
        pytest.raises(ConfigError, match="none of 1 conversations has a token to train on"),
    ):
        run.prepare()


def test_windows_do_not_depend_on_chunk_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = settings(tmp_path, **write_chat(tmp_path), data__sequence_length=20)
    with Run(load_run_config(raw)) as run:
        run.prepare()
    found = []
    for chunk in (1 << 20, 1, 7):
        monkeypatch.setattr("infinity.train.windows._CHUNK", chunk)
        windows, held = split(corpus_of(tmp_path), 20, 0.1)
        assert isinstance(windows, Packed)
        assert len(windows.documents.starts) == 36
        found.append([[w.window(i).tolist() for i in range(len(w))] for w in (windows, held)])
    assert found[0] == found[1] == found[2]


# --- best weights and early stop -----------------------------------------------------------------


def chat_run(folder: Path, **more: Any) -> dict[str, Any]:
    changes = {
        "data__sequence_length": 64,
        "training__steps": 12,
        "training__evaluate_every": 2,
        "training__checkpoint_every": 4,
        "engine__scheduler": None,
        "engine__optimizer__lr": 3e-2,
    }
    return settings(folder, **write_chat(folder), **(changes | more))


def test_best_weights_and_early_stop_survive_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also bitwise equal after stops and crashes, from checkpoints and with state on disk."""
    losses_by_step = {0: 9.0, 2: 5.0, 4: 4.0, 6: 4.5, 8: 4.0, 10: 4.2}
    evaluate = runs_loop.Loop.evaluate
    evaluated_steps: list[int] = []

    def evaluated(self: Any) -> float:
        evaluated_steps.append(self.step)
        evaluate(self)
        return losses_by_step[self.step]

    monkeypatch.setattr(runs_loop.Loop, "evaluate", evaluated)
    uninterrupted = tmp_path / "whole"
    uninterrupted.mkdir()
    result, watcher = train(chat_run(uninterrupted, training__early_stop=3))
    assert (result.steps, result.stopped, result.stopped_early) == (10, False, True)
    assert (result.best, result.best_step) == (4.0, 4)
    assert result.best_model == uninterrupted / "run" / "best"
    assert result.model is not None
    assert [n for n in watcher.notes if "best so far" in n] == [
        f"best so far: {result.best_model} (step {step})" for step in (2, 4)
    ]
    assert any("3 evaluations in a row found nothing better than 4.0000 at step 4" in n
               for n in watcher.notes)  # fmt: skip
    best_weights = (result.best_model / "model.safetensors").read_bytes()
    assert best_weights != (result.model / "model.safetensors").read_bytes()
    assert (result.best_model / "chat_template.jinja").read_text() == TEMPLATE

    state = tmp_path / "state"
    state.mkdir()
    for name, more in {
        "checkpoints": {},
        "disk": {
            "engine__nvme_path": str(state),
            "engine__placement": dict.fromkeys(("weights", "optimizer_state", "gradients"), "disk"),
            "engine__durable": True,
            "training__checkpoint_every": None,
        },
    }.items():
        (folder := tmp_path / name).mkdir()
        raw = chat_run(folder, training__early_stop=3, **more)
        train(raw, stop_after=3)
        with pytest.raises(KeyboardInterrupt):
            train(raw, "auto", die_after=6)
        evaluated_steps.clear()
        resumed, _ = train(raw, "auto")
        assert evaluated_steps == [6, 8, 10]
        assert losses_of(folder) == losses_of(uninterrupted)
        assert (resumed.steps, resumed.stopped_early, resumed.best_step) == (10, True, 4)
        assert (folder / "run" / "best" / "model.safetensors").read_bytes() == best_weights
        resumed, watcher = train(raw, "auto")
        assert (resumed.steps, resumed.stopped_early) == (10, True)
        assert any("larger training.early_stop goes on" in note for note in watcher.notes)
    other_directory = raw | {"run_dir": str(tmp_path / "elsewhere")}
    losses_by_step[10] = 4.1  # worse than the best, but the new run has none saved
    found, _ = train(other_directory, str(uninterrupted / "run" / "checkpoints" / "step8"))
    assert (found.best_step, found.best_model) == (4, tmp_path / "elsewhere" / "best")
    raw["training"]["early_stop"] = 5
    losses_by_step[12] = 3.0
    more_steps, _ = train(raw, "auto")
    assert (more_steps.steps, more_steps.best_step, more_steps.stopped_early) == (12, 12, False)


def test_no_best_weights_if_worse_than_initial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses_by_step = {0: 3.0, 3: 3.5, 6: 3.2}
    monkeypatch.setattr(Loop, "evaluate", lambda loop: losses_by_step[loop.step])
    result, watcher = train(settings(tmp_path, training__keep_best=True))
    assert (result.best, result.best_step, result.best_model) == (3.0, 0, None)
    assert not (tmp_path / "run" / "best").exists()
    assert not any("best so far" in note for note in watcher.notes)


def test_failed_save_of_best_weights_does_not_end_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, full = runs_run.save_pretrained, [True]

    def saving(engine: Any, place: Path, **more: Any) -> Any:
        if place.name == "best" and full.pop():
            full.append(False)
            raise DoesNotFitError("the disk is full")
        full.append(False)
        return save(engine, place, **more)

    monkeypatch.setattr(runs_run, "save_pretrained", saving)
    result, watcher = train(chat_run(tmp_path, training__keep_best=True, training__steps=4))
    (note,) = [n for n in watcher.notes if "were not saved" in n]
    assert "step 2, the best so far, were not saved: the disk is full" in note
    assert result.best_step == 4
    assert result.best_model is not None


def test_run_without_space_for_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = chat_run(tmp_path, training__steps=2)
    free = [100]
    monkeypatch.setattr(runs_run, "free_bytes", lambda path: free[0])
    message = r"a checkpoint takes 137\..* KiB, and 100 B are free(.|\n)*run_dir=\.\.\. on"
    with pytest.raises(DoesNotFitError, match=message):
        train(raw)
    assert not (tmp_path / "run" / "run.json").exists()
    free[0] = 200 << 10
    result, watcher = train(raw)
    assert any("there are 3 while one is written" in note for note in watcher.notes)
    assert result.checkpoint is not None
    saved = sum(p.stat().st_size for p in result.checkpoint.glob("*.safetensors"))
    assert saved == pytest.approx(137 << 10, rel=0.1)  # files also have headers


def test_keep_best_and_early_stop_require_evaluation(tmp_path: Path) -> None:
    for name, value in (("early_stop", 2), ("keep_best", True)):
        raw = chat_run(tmp_path, data__held_out=None, **{f"training__{name}": value})
        with pytest.raises(ConfigError, match=rf"training: {name} needs data\.evaluate: FILES"):
            load_run_config(raw)
    raw = chat_run(tmp_path, training__early_stop=2, training__evaluate_every=0)
    with pytest.raises(ConfigError, match="early_stop needs evaluate_every: 50"):
        load_run_config(raw)


# --- adapters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_adapters_train_on_conversations(kind: str, tmp_path: Path) -> None:
    """With qlora the base has the values stored as nf4."""
    llama().save_pretrained(tmp_path / "base")
    raw = chat_run(
        tmp_path, model={"path": str(tmp_path / "base")}, training__early_stop=2,
        adapter={"type": kind, "r": 4, "targets": ["q_proj", "v_proj"]}, training__steps=4,
    )  # fmt: skip
    result, watcher = train(raw)
    assert watcher.steps[-1].loss < watcher.steps[0].loss
    assert result.model is not None
    base_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    if kind == "qlora":
        round_frozen(base_model.requires_grad_(False), "nf4", torch.float32)
    weights = {name: value.clone() for name, value in base_model.state_dict().items()}
    model = peft.PeftModel.from_pretrained(base_model, result.model).eval()
    assert model.peft_config["default"].r == 4
    assert model.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    assert model.peft_config["default"].lora_alpha == 8
    base = model.get_base_model().state_dict()
    for name, value in weights.items():
        found = base.get(name, base.get(name.replace(".weight", ".base_layer.weight")))
        assert found is not None
        assert torch.equal(found, value), name
    _, held = split(corpus_of(tmp_path), 64, 0.1)
    assert isinstance(held, Packed)
    with torch.no_grad():
        assert mean_loss_unpacked(model, held).item() == pytest.approx(result.evaluation, rel=1e-4)

    config = load_run_config(raw)
    meta = read_facts(config, ByteTokenizer()).on_meta
    trained = {n: p.shape for n, p in model.named_parameters() if "lora_" in n}
    assert {n: p.shape for n, p in meta.named_parameters() if p.requires_grad} == trained
    bad = load_run_config(raw, ["adapter.targets=[q_prjo]"])
    with pytest.raises(
        ConfigError, match=r"adapter\.targets(.|\n)*all-linear, or a list of .*q_pr"
    ):
        _ = read_facts(bad, ByteTokenizer()).on_meta
