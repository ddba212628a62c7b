"""Text that the model of a run generates at the end, for report.html."""

from __future__ import annotations

from typing import Any

import torch

from infinity.common.accelerators import fork_rng
from infinity.engine import Engine
from infinity.errors import ConfigError, explained
from infinity.integrations.huggingface.packages import transformers
from infinity.train.loop import Loop
from infinity.train.preparation import Prepared

TOKENS = 100


def record_sample(loop: Loop) -> None:
    """Generate text that continues the run's `training.sample`, if set, and record it.

    Each token is a forward of the full model; all ranks draw the same tokens, from the run's seed.
    If the run is on conversations and there is a chat template, the prompt is a user message. An
    error of the generation is passed to the watcher and does not end the run.
    """
    prompt = loop.prepared.config.training.sample
    if prompt is None:
        return
    try:
        with explained("training.sample: no text can be generated"):
            text = _generate(loop.engine, loop.prepared, prompt)
    except ConfigError as error:
        loop.watcher.note(str(error))
    else:
        loop.record({"event": "sample", "step": loop.step, "prompt": prompt, "text": text})


def _generate(engine: Engine, prepared: Prepared, prompt: str) -> str:
    assert prepared.tokenizer is not None
    wrapped, facts = prepared.tokenizer.wrapped, prepared.facts
    is_chat = prepared.train.corpus.marked and bool(wrapped.chat_template)
    context = facts.context or prepared.length + TOKENS
    count = min(TOKENS, context // 2)
    ids = prepared.tokenizer.encode_prompt(prompt, is_chat=is_chat)[:, count - context :]
    ids = ids.to(engine.device)
    module: Any = engine.module  # peft's `generate` takes inputs by keyword only
    settings = transformers().GenerationConfig(
        max_new_tokens=count,
        do_sample=True,
        temperature=0.8,
        eos_token_id=prepared.tokenizer.end,
        pad_token_id=prepared.tokenizer.end or 0,
    )
    engine.eval()
    try:
        with fork_rng([engine.device]):
            torch.manual_seed(prepared.engine.seed or 0)
            output = module.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
            )
    finally:
        engine.train()
    text: str = wrapped.decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=True)
    return text
