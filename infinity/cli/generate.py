"""`infinity generate`: continue a prompt with a trained model."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinity.cli.saved_state import ModelSource, Tag, find_state
from infinity.cli.terminal import BARS, ProgressLine, command
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.engine import Engine
    from infinity.train.saved_model import SavedModel


def generate(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A run_dir, a checkpoint of a run, or a directory of weights with a config.json.",
        ),
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="A text; - reads it from stdin.")],
    tag: Tag = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", help="Tokens to generate at most.", min=1)
    ] = 200,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            help="Sample at this temperature; 0 takes the likeliest token. Default: the "
            "model's generation config.",
            min=0.0,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", metavar="P", help="Sample among the likeliest.", min=0.0, max=1.0),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of sampling.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Pass the prompt as it is, without the chat template.")
    ] = False,
    model: ModelSource = None,
    nvme_path: Annotated[
        Path | None,
        typer.Option("--nvme-path", metavar="PATH", help="For weights that do not fit RAM."),
    ] = None,
) -> None:
    """Continue a prompt with a trained model, and print the text as it is generated.

    For example: infinity generate runs/chat "Explain page faults." --temperature 0.7

    The weights are those of the last checkpoint, adapters included, and may be larger than RAM:
    the configuration of the run decides their placement. The chat template is applied to prompts
    if the run was on conversations.
    """
    with command(), ExitStack() as closing:
        text = sys.stdin.read() if prompt == "-" else prompt
        if not text:
            raise ConfigError("the prompt is empty", remedy="give a text")
        options = _sampling(temperature, top_p) | {"max_new_tokens": max_tokens}
        os.environ.setdefault(BARS[0], "1")  # transformers reads it, too
        with ProgressLine(transient=True) as line:
            line.show(f"loading {directory} ...", 0, 1, edge=True)
            engine, saved = _load(directory.expanduser(), tag, model, nvme_path, line)
        closing.callback(engine.close)
        if saved.tokenizer is None:
            raise ConfigError(
                f"{saved.name} has no tokenizer",
                remedy="--model DIR with one" if model is None else "a directory with one",
            )
        _print_continuation(engine, saved, text, raw, seed, options)


def _load(
    directory: Path, tag: str | None, model: str | None, nvme_path: Path | None, line: ProgressLine
) -> tuple[Engine, SavedModel]:
    """Return an engine over the saved weights, and the description of their model."""
    from infinity._initialize import initialize
    from infinity.train.saved_model import (
        describe,
        engine_config,
        find_description,
        holds_model,
        load_directory,
        load_values,
    )

    changes: dict[str, Any] = {} if nvme_path is None else {"nvme_path": nvme_path}
    if holds_model(directory):
        saved = describe(model or directory)
        config = engine_config(saved, **changes)
        module = load_directory(directory, config)
        return initialize(module, config, progress=line.progress)[0], saved
    state, opener = find_state(directory, tag)
    source = model or find_description(directory, state)
    if source is None:
        raise ConfigError(
            f"the model of {state} is unknown",
            remedy="--model DIR names the directory with its config.json and tokenizer",
        )
    saved = describe(source)
    with opener() as reader:
        config = engine_config(saved, **({"precision": reader.manifest.precision} | changes))
        module = load_values(saved, reader, config.precision)
        return initialize(module, config, progress=line.progress)[0], saved


def _sampling(temperature: float | None, top_p: float | None) -> dict[str, Any]:
    """Return the arguments of transformers' `generate` for the options."""
    if temperature == 0:
        if top_p is not None:
            raise ConfigError(
                "--temperature 0 takes the likeliest token, and --top-p samples",
                remedy="leave one of them out",
            )
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    given = {"temperature": temperature, "top_p": top_p}
    chosen = {name: value for name, value in given.items() if value is not None}
    return {"do_sample": True, **chosen} if chosen else {}


def _print_continuation(
    engine: Engine, saved: SavedModel, text: str, raw: bool, seed: int, options: dict[str, Any]
) -> None:
    import torch

    from infinity.integrations.huggingface.packages import transformers

    assert saved.tokenizer is not None
    wrapped = saved.tokenizer.wrapped
    is_chat = bool(wrapped.chat_template) if saved.is_chat is None else saved.is_chat
    if (is_chat and not raw) or saved.run is not None:
        tokens = saved.tokenizer.encode_prompt(text, is_chat=is_chat and not raw)
    else:  # other trainers, not `infinity train`, begin documents with special tokens
        tokens = wrapped(text, return_tensors="pt")["input_ids"]
    tokens = tokens.to(engine.device)
    streamer = transformers().TextStreamer(wrapped, skip_prompt=True, skip_special_tokens=True)
    torch.manual_seed(seed)
    engine.eval()
    module: Any = engine.module
    end_token = saved.tokenizer.end
    if module.generation_config.pad_token_id is None and end_token is not None:
        options = options | {"pad_token_id": end_token}
    mask = torch.ones_like(tokens)
    module.generate(input_ids=tokens, attention_mask=mask, streamer=streamer, **options)
