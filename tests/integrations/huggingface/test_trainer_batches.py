"""Tests of InfinityTrainer with `activations.tokens`: the plan sets the micro-batches of a step.

The reference is the same trainer without that key: every batch is a micro-batch. Where samples are
regrouped, the numbers equal those of `transformers.Trainer` to 2e-6, with SGD: AdamW may turn the
rounding of a gradient near 0 into a full step.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support.hf_runs import (
    FP32,
    LENGTH,
    VOCABULARY,
    Texts,
    assert_close_history,
    assert_same_bits,
    history,
    llama,
    masters,
    trainer_for,
)
from torch import Tensor

import infinity
from infinity.errors import InfinityWarning
from infinity.integrations.huggingface.batches import can_concatenate, cut, joined
from infinity.integrations.huggingface.trainer import InfinityTrainer
from infinity.plan.batch_schedule import choose_schedule

BATCHES, SAMPLES = 3, 2  # batches per step, samples per batch
TOKENS = SAMPLES * LENGTH
TOLERANCE = 2e-6


def with_tokens(config: Any = FP32, **activations: Any) -> dict[str, Any]:
    return {**config, "activations": {"tokens": TOKENS, **activations}}


def llama_without_dropout() -> Any:
    return llama(dropout=0.0)


def gpt2_without_dropout() -> Any:
    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1,
            eos_token_id=2, **dropout,
        )
    )  # fmt: skip


def ragged(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate texts of different lengths, some of them padded on the left."""
    lengths = [4 + int(item["input_ids"][0]) % (LENGTH - 3) for item in items]
    longest = max(lengths)
    batch: dict[str, list[Tensor]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for number, (item, length) in enumerate(zip(items, lengths, strict=True)):
        padding = longest - length
        pad = (padding, 0) if number % 2 else (0, padding)
        ones = torch.ones(length, dtype=torch.long)
        values = (item["input_ids"][:length], item["labels"][:length], ones)
        for (name, rows), value, fill in zip(batch.items(), values, (0, -100, 0), strict=True):
            rows.append(torch.nn.functional.pad(value, pad, value=fill))
            assert name in batch
    return {name: torch.stack(rows) for name, rows in batch.items()}


def run(
    kind: Any,
    out: Path,
    config: Any = None,
    make: Callable[[], Any] = llama_without_dropout,
    options: Any = None,
    **changed: Any,
) -> tuple[Any, list[int]]:
    """Train; return the trainer and the number of samples of each training forward."""
    model, rows = make(), []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, given: rows.append(len(given[0])) if module.training else None
    )
    given = {} if config is None else {"infinity_config": config}
    trainer = trainer_for(kind, out, model, {**given, **(options or {})}, **changed)
    trainer.train()
    return trainer, rows


# --- numbers equal to those of Trainer -----------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "activations", "micro_batches", "sizes"),
    [
        (llama_without_dropout, {}, None, [6]),
        (gpt2_without_dropout, {"slices": 3, "checkpoint": "units"}, None, [6]),
        (llama_without_dropout, {"slices": 2}, 2, [3, 3]),
        (gpt2_without_dropout, {}, 6, [1] * 6),
    ],
    ids=["one-micro-batch", "sliced", "two-sliced", "a-sample-each"],
)
def test_rescheduled_step_matches_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, activations: Any,
    micro_batches: int | None, sizes: list[int],
) -> None:  # fmt: skip
    """26 samples: four full steps per epoch, and one of a single batch."""

    def chosen(case: Any, requested: Any, samples: int, others: Any) -> Any:
        return choose_schedule(
            case, replace(requested, micro_batches=micro_batches), samples, others
        )

    monkeypatch.setattr("infinity.integrations.huggingface.batches.choose_schedule", chosen)
    options = {"data_collator": ragged}
    changed = {"eval_strategy": "epoch", "optim": "sgd", "learning_rate": 0.5}
    stock, _ = run(hf.Trainer, tmp_path / "a", None, make, options, **changed)
    offloaded, rows = run(
        InfinityTrainer, tmp_path / "b", with_tokens(**activations), make, options, **changed
    )
    with offloaded:
        short = [1, 1] if sizes[0] == 1 else [2]  # a step of one batch
        assert rows == [*sizes * 4, *short, *sizes * 2]
        assert offloaded.engine._step_runner.counters.micro_batches == len(rows)
        assert_close_history(offloaded, stock, TOLERANCE)
        for name, value in stock.model.state_dict().items():
            torch.testing.assert_close(
                offloaded.engine.state_dict()[name], value, rtol=0, atol=TOLERANCE, msg=name
            )


def test_schedule_with_one_batch_per_micro_batch_bitwise_equal(tmp_path: Path) -> None:
    named = with_tokens({**FP32, "gradient_accumulation_steps": BATCHES}, slices=1)
    options = {"data_collator": ragged}
    plain, _ = run(InfinityTrainer, tmp_path / "a", FP32, options=options)
    scheduled, rows = run(InfinityTrainer, tmp_path / "b", named, options=options)
    with plain, scheduled:
        assert rows == [SAMPLES] * 19
        assert scheduled._step_batches is not None
        assert history(scheduled) == history(plain)
        assert_same_bits(masters(scheduled), masters(plain))


def test_rescheduled_step_reads_weights_once(tmp_path: Path) -> None:
    """From the second step on, a step reads the weights twice, less those resident in slots."""
    disk = {
        **FP32, "nvme_path": str(tmp_path), "prefetch_units": 0,
        "placement": {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"},
    }  # fmt: skip
    found = {}
    for name, config in (("batches", disk), ("schedule", with_tokens(disk))):
        trainer, _ = run(InfinityTrainer, tmp_path / "out", config, max_steps=3)
        with trainer:
            report = trainer.engine.last_report
            found[name] = report.moved
            assert found[name] == trainer.engine.forecast(), name
    assert found["schedule"]["disk_read"] < 0.7 * found["batches"]["disk_read"]
    assert found["schedule"]["disk_write"] < 0.7 * found["batches"]["disk_write"]


# --- where every batch stays a micro-batch -------------------------------------------------------


def own_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    return hf.Trainer.compute_loss(self, model, inputs, *args, **kwargs)


def own_step(self: Any, *args: Any) -> Any:
    return InfinityTrainer.training_step(self, *args)


def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs.logits.float().pow(2).mean() / BATCHES


def packed(items: list[Any]) -> dict[str, Tensor]:
    """Collate with positions that restart within a row, and no mask."""
    batch: dict[str, Tensor] = hf.default_data_collator(items)
    return {**batch, "position_ids": torch.arange(LENGTH).remainder(4).expand(len(items), LENGTH)}


def means() -> Any:
    model = llama_without_dropout()
    model.accepts_loss_kwargs = False  # a mean of the batches' means
    return model


def routed() -> Any:
    torch.manual_seed(0)
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, num_local_experts=2,
            output_router_logits=True,
        )
    )  # fmt: skip


UNSCHEDULED: dict[str, dict[str, Any]] = {
    "a loss of its own": {"methods": {"compute_loss": own_loss}},
    "a step of its own": {"methods": {"training_step": own_step}},
    "compute_loss_func": {"options": {"compute_loss_func": loss_of}},
    "a label smoother": {"changed": {"label_smoothing_factor": 0.1}},
    "means of batches": {"make": means},
    "a router's loss": {"make": routed},
    "packed rows": {"options": {"data_collator": packed}},
}


@pytest.mark.parametrize("way", UNSCHEDULED)
def test_batches_kept_where_rescheduling_is_unsafe(tmp_path: Path, way: str) -> None:
    """In bf16: a plan for one micro-batch would have no memory to accumulate gradients."""
    case = UNSCHEDULED[way]
    kind = type("Own", (InfinityTrainer,), case.get("methods", {}))
    more = {"make": case.get("make", llama_without_dropout), "options": case.get("options")}
    changed = {"max_steps": 2, **case.get("changed", {})}
    sums = {"precision": "bf16", "activations": {"slices": 2}}  # as the plan falls back to
    plain_config = sums if way == "packed rows" else {"precision": "bf16"}
    plain, _ = run(kind, tmp_path / "a", plain_config, **more, **changed)
    with_schedule, rows = run(
        kind, tmp_path / "b", with_tokens({"precision": "bf16"}), **more, **changed
    )
    with plain, with_schedule:
        assert rows == [SAMPLES] * 2 * BATCHES
        assert history(with_schedule) == history(plain)
        assert_same_bits(masters(with_schedule), masters(plain))


# --- resumed runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 5])  # within an epoch, at its end
@pytest.mark.parametrize(
    "first", [{"slices": 3}, {"gradient_accumulation_steps": BATCHES}], ids=lambda first: [*first]
)
def test_resumed_run_keeps_schedule_bitwise(
    tmp_path: Path, first: dict[str, int], step: int
) -> None:
    every = {"save_strategy": "steps", "save_steps": 1}
    config = with_tokens(FP32, **first) if "slices" in first else with_tokens({**FP32, **first})
    through, _ = run(InfinityTrainer, tmp_path, config, llama, **every)
    with through:
        schedule = through._step_batches.schedule
        expected, logged = masters(through), history(through)
    for number in range(step + 1, 8):
        shutil.rmtree(tmp_path / f"checkpoint-{number}")
    options = {"infinity_config": with_tokens()}  # the plan chooses the schedule
    with trainer_for(InfinityTrainer, tmp_path, llama(), options, **every) as resumed:
        resumed.train(resume_from_checkpoint=True)
        assert resumed._step_batches.schedule == schedule
        assert history(resumed)[:-1] == logged[:-1]
        assert_same_bits(masters(resumed), expected)


def test_resume_with_existing_engine_warns_of_schedule(tmp_path: Path) -> None:
    every = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    first, _ = run(InfinityTrainer, tmp_path, with_tokens(slices=3), **every)
    first.close()
    options = {"infinity_config": with_tokens()}
    with trainer_for(
        InfinityTrainer, tmp_path, llama_without_dropout(), options, **every
    ) as resumed:
        resumed.evaluate()  # creates the engine
        with pytest.warns(InfinityWarning, match=r"1 micro-batches, blocks in 3 slices"):
            resumed.train(resume_from_checkpoint=True)


# --- DeepSpeed's configuration -------------------------------------------------------------------


def test_deepspeed_infinity_section_sets_activations(tmp_path: Path) -> None:
    deepspeed_config = {
        "train_micro_batch_size_per_gpu": SAMPLES, "gradient_accumulation_steps": BATCHES,
        "train_batch_size": SAMPLES * BATCHES, "gradient_clipping": "auto",
        "infinity": {"activations": {"tokens": TOKENS}},
    }  # fmt: skip
    expected, _ = run(InfinityTrainer, tmp_path / "a", with_tokens(), max_steps=2)
    translated, rows = run(InfinityTrainer, tmp_path / "b", deepspeed_config, max_steps=2)
    with expected, translated:
        assert rows == [SAMPLES * BATCHES] * 2
        assert translated.engine.train_batch_size() == SAMPLES * BATCHES
        assert_same_bits(masters(translated), masters(expected))
    # With `initialize` the user's loop passes micro-batches: the configured batch sizes apply.
    deepspeed_config |= {
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine, *_ = infinity.initialize(model=llama_without_dropout(), config=deepspeed_config)
    with engine:
        batches = [hf.default_data_collator([Texts(6)[i], Texts(6)[i + 1]]) for i in (0, 2, 4)]
        engine.train_batch(iter(batches))
        assert engine.get_batch_info() == (SAMPLES * BATCHES, SAMPLES, BATCHES)
        assert engine.global_steps == 1
        notes = {row.key: row.note for row in engine.translation.rows}
        assert "InfinityTrainer" in notes["gradient_accumulation_steps"]


# --- joining and cutting -------------------------------------------------------------------------


def batch(rows: int, length: int, **more: Any) -> dict[str, Any]:
    ids = torch.arange(rows * length).view(rows, length) + 1
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), **more}


def test_cut_keeps_order_and_pads_to_longest() -> None:
    batches = [batch(2, 3), batch(1, 5), batch(3, 4)]
    found = [joined(batch_slices, pad_token=7) for batch_slices in cut(batches, 4)]
    assert [tuple(micro_batch["input_ids"].shape) for micro_batch in found] == [(4, 5), (2, 4)]
    assert found[0]["input_ids"][:, -1].tolist() == [7, 7, 5, 7]
    assert found[0]["labels"][0].tolist() == [1, 2, 3, -100, -100]
    assert found[0]["attention_mask"].sum(1).tolist() == [3, 3, 5, 4]
    assert torch.equal(found[1]["input_ids"], batches[2]["input_ids"][1:])
    (single,) = cut([batches[0]], 2)
    assert single == [batches[0]]  # unchanged
    square = joined([batch(3, 3)], slices=2)  # equal sizes would be ambiguous to slices
    assert square["input_ids"].shape == (3, 4)


@pytest.mark.parametrize(
    "other",
    [
        (torch.ones(2, 3),),
        batch(2, 3, pixel_values=torch.ones(2, 3)),
        batch(2, 3, use_cache=True),
        batch(2, 3, labels=torch.ones(6, 1)),
        batch(2, 3, labels=torch.ones(2, 3)),
        {k: v for k, v in batch(2, 3).items() if k != "labels"},
        {},
    ],
    ids=["tuple", "unknown", "flag", "rows", "dtype", "names", "empty"],
)
def test_can_join_rejects_incompatible_batches(other: Any) -> None:
    assert can_concatenate([batch(2, 3), batch(1, 5)])
    assert not can_concatenate([batch(2, 3), other])


def test_can_join_without_mask_requires_equal_lengths() -> None:
    bare = [
        {k: v for k, v in b.items() if k != "attention_mask"} for b in (batch(2, 3), batch(2, 4))
    ]
    assert can_concatenate([bare[0], bare[0]])
    assert not can_concatenate(bare)
