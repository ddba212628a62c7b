"""Tests of the translation of DeepSpeed configurations: keys, batch sizes, placement, sources."""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small import ON_DISK, assert_nothing_left, batch, masters, same, small_model, train
from torch.utils.data import TensorDataset

import infinity
from infinity.config.optimizer import LossScaleConfig
from infinity.config.schema import DEEPSPEED_KEYS, Config, load_config
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.config import Translation, translate_deepspeed
from infinity.integrations.deepspeed.key_table import TABLE, Key, KeyStatus
from infinity.integrations.deepspeed.keys import KEYS, RENAMED_KEYS, SECTIONS, names_in
from infinity.integrations.deepspeed.settings import read_settings
from infinity.integrations.deepspeed.source import find_source, is_deepspeed

LEAST = {"train_batch_size": 8, "optimizer.type": "AdamW"}
ZERO = "zero_optimization"
PARAMS, OFFLOAD = "optimizer.params", f"{ZERO}.offload_optimizer"


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}"""
    raw: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        section = raw
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return raw


def each(cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Run the decorated check on every case and report all failures; tuples are unpacked."""

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        def test() -> None:
            failures = []
            for case in cases:
                try:
                    check(*(case if isinstance(case, tuple) else (case,)))
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"{str(case)[:200]}: {type(error).__name__}: {error}")
            assert not failures, "\n".join([f"{len(failures)} cases fail:", *failures])

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def translated(more: Mapping[str, Any] | None = None, **options: Any) -> Translation:
    return translate_deepspeed(nested({**LEAST, **(more or {})}), **options)


def refusal(more: Mapping[str, Any] | None = None, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        translated(more, **options)
    return str(caught.value)


def values(config: Config) -> dict[str, Any]:
    return {name: entry["value"] for name, entry in config.resolved().items()}


def row(translation: Translation, key: str) -> dict[str, Any]:
    (found,) = [r for r in translation.table() if r["key"] == key]
    return found


def scheduled(kind: str, **params: Any) -> dict[str, Any]:
    """Return the keys of a scheduler section of this type."""
    return {"scheduler.type": kind} | {f"scheduler.params.{k}": v for k, v in params.items()}


# --- every row of the table ------------------------------------------------------------------

NVME = {f"{ZERO}.offload_param.device": "nvme", f"{ZERO}.offload_param.nvme_path": "/fast"}
CYCLE = scheduled("OneCycle", cycle_min_lr=1e-5, cycle_max_lr=1e-3)
DECAY = scheduled("WarmupDecayLR", total_num_steps=100)
COSINE = scheduled("WarmupCosineLR", total_num_steps=100)
RANGE = scheduled("LRRangeTest")
WARMUP = scheduled("WarmupLR")
HALF = {"fp16.enabled": True}

# For each key with verdict DONE: a value, the resulting config values, and other required keys.
DONE: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "train_batch_size": (6.0, {"gradient_accumulation_steps": 1}, {}),
    "train_micro_batch_size_per_gpu": (2, {"gradient_accumulation_steps": 4}, {}),
    "gradient_accumulation_steps": (2, {"gradient_accumulation_steps": 2}, {}),
    "gradient_clipping": (0.5, {"gradient_clipping": 0.5}, {}),
    "dataloader_drop_last": (True, {}, {}),
    "managed_gradient_accumulation": (False, {}, {}),
    "torch_autocast.enabled": (True, {"autocast": True}, {}),
    "torch_autocast.dtype": ("bfloat16", {"autocast": True}, {"torch_autocast.enabled": True}),
    "bf16.enabled": (True, {"precision": "bf16"}, {}),
    "bf16.bf16_optimizer_states": (True, {"optimizer.moments": "bf16"}, {"bf16.enabled": True}),
    "bf16.auto_cast": (True, {"cast_inputs": True}, {"bf16.enabled": True}),
    "fp16.enabled": (True, {"precision": "fp16", "loss_scale.value": 0.0}, {}),
    "fp16.auto_cast": (True, {"cast_inputs": True}, HALF),
    "fp16.loss_scale": (128, {"loss_scale.value": 128.0}, HALF),
    "fp16.initial_scale_power": (12, {"loss_scale.initial_power": 12}, HALF),
    "fp16.loss_scale_window": (1e2, {"loss_scale.window": 100}, HALF),
    "fp16.hysteresis": (3, {"loss_scale.hysteresis": 3}, HALF),
    "fp16.consecutive_hysteresis": (True, {"loss_scale.consecutive_hysteresis": True}, HALF),
    "fp16.min_loss_scale": (0.5, {"loss_scale.min": 0.5}, HALF),
    "data_types.param_dtype": ("fp32", {"precision": "fp32"}, {}),
    "optimizer.type": ("Adam", {"optimizer.type": "AdamW"}, {}),
    f"{PARAMS}.lr": ("3e-4", {"optimizer.lr": 3e-4}, {}),
    f"{PARAMS}.betas": ([0.8, 0.99], {"optimizer.betas": [0.8, 0.99]}, {}),
    f"{PARAMS}.eps": (1e-6, {"optimizer.eps": 1e-6}, {}),
    f"{PARAMS}.weight_decay": (0.1, {"optimizer.weight_decay": 0.1}, {}),
    f"{PARAMS}.momentum": (0.9, {"optimizer.momentum": 0.9}, {"optimizer.type": "SGD"}),
    f"{PARAMS}.dampening": (0.1, {"optimizer.dampening": 0.1}, {"optimizer.type": "SGD"}),
    f"{PARAMS}.nesterov": (
        True, {"optimizer.nesterov": True}, {"optimizer.type": "SGD", f"{PARAMS}.momentum": 0.9},
    ),
    f"{PARAMS}.lr_decay": (0.1, {"optimizer.lr_decay": 0.1}, {"optimizer.type": "Adagrad"}),
    f"{PARAMS}.initial_accumulator_value": (
        0.1, {"optimizer.initial_accumulator_value": 0.1}, {"optimizer.type": "Adagrad"},
    ),
    f"{PARAMS}.maximize": (True, {"optimizer.maximize": True}, {}),
    f"{PARAMS}.adam_w_mode": (False, {"optimizer.type": "Adam"}, {"optimizer.type": "Adam"}),
    f"{PARAMS}.torch_adam": (True, {"optimizer.weight_decay": 0.01}, {}),
    f"{PARAMS}.fp32_optimizer_states": (False, {"optimizer.moments": "bf16"}, {}),
    f"{PARAMS}.max_grad_norm": (2, {"gradient_clipping": 2.0}, {}),
    "scheduler.type": ("StepLR", {"scheduler.type": "StepLR"}, {"scheduler.params.step_size": 5}),
    "scheduler.params.warmup_min_lr": (1e-6, {}, WARMUP),
    "scheduler.params.warmup_max_lr": ([1e-3], {}, WARMUP),
    "scheduler.params.warmup_num_steps": (1e2, {}, WARMUP),
    "scheduler.params.warmup_type": ("linear", {}, WARMUP),
    "scheduler.params.total_num_steps": (1e3, {}, DECAY),
    "scheduler.params.warmup_min_ratio": (0.1, {}, COSINE),
    "scheduler.params.cos_min_ratio": (0.2, {}, COSINE),
    "scheduler.params.lr_range_test_min_lr": (1e-4, {}, RANGE),
    "scheduler.params.lr_range_test_step_size": (7, {}, RANGE),
    "scheduler.params.lr_range_test_step_rate": (3.0, {}, RANGE),
    "scheduler.params.lr_range_test_staircase": (True, {}, RANGE),
    "scheduler.params.cycle_min_lr": (1e-6, {}, CYCLE),
    "scheduler.params.cycle_max_lr": (1e-2, {}, CYCLE),
    "scheduler.params.cycle_first_step_size": (10, {}, CYCLE),
    "scheduler.params.cycle_second_step_size": (20, {}, CYCLE),
    "scheduler.params.cycle_first_stair_count": (3, {}, CYCLE),
    "scheduler.params.cycle_second_stair_count": (4, {}, CYCLE),
    "scheduler.params.decay_step_size": (5, {}, CYCLE),
    "scheduler.params.decay_lr_rate": (0.1, {}, CYCLE),
    "scheduler.params.cycle_momentum": (False, {}, CYCLE),
    "scheduler.params.cycle_min_mom": (0.7, {}, CYCLE),
    "scheduler.params.cycle_max_mom": (0.95, {}, CYCLE),
    "scheduler.params.decay_mom_rate": (0.01, {}, CYCLE),
    "scheduler.params.last_batch_iteration": (-1, {}, WARMUP),
    f"{ZERO}.stage": (3, {}, {}),
    f"{ZERO}.sub_group_size": (1e5, {"chunk_size": 48 * 2048}, {}),
    f"{ZERO}.stage3_prefetch_bucket_size": (0, {"prefetch_units": 0}, {}),
    f"{ZERO}.stage3_max_live_parameters": (3e8, {"hints.live_parameters": 300_000_000}, {}),
    f"{ZERO}.offload_param.max_in_cpu": (1e9, {"hints.max_params_in_cpu": 10**9}, {}),
    f"{ZERO}.cpu_offload": (True, {"placement.optimizer_state": "host"}, {}),
    f"{ZERO}.cpu_offload_param": (True, {"placement.weights": "host"}, {}),
    f"{ZERO}.offload_param.device": ("cpu", {"placement.weights": "host"}, {}),
    f"{ZERO}.offload_param.nvme_path": (
        "/a", {"placement.weights": "disk", "nvme_path": ["/a"]}, NVME,
    ),
    f"{OFFLOAD}.device": ("none", {"placement.optimizer_state": "device"}, {}),
    f"{OFFLOAD}.nvme_path": (
        ["/a", "/b"], {"placement.optimizer_state": "disk", "nvme_path": ["/a", "/b"]},
        {f"{OFFLOAD}.device": "nvme"},
    ),
    f"{OFFLOAD}.ratio": (0.4, {"placement.optimizer_state": "auto"}, {f"{OFFLOAD}.device": "cpu"}),
    "aio.block_size": (2**21, {"io.block_size": 2**21}, {}),
    "aio.queue_depth": (32.0, {"io.queue_depth": 32}, {}),
    "aio.intra_op_parallelism": (8, {"io.num_threads": 8}, {}),
    "steps_per_print": (10, {}, {}),
    "tensorboard.enabled": (True, {}, {}),
    "tensorboard.output_path": ("/l", {}, {}),
    "tensorboard.job_name": ("run", {}, {}),
    "wandb.enabled": (True, {}, {}),
    "wandb.group": ("ours", {}, {}),
    "wandb.team": ("ours", {}, {}),
    "wandb.project": ("ours", {}, {}),
    f"{ZERO}.zero_quantized_nontrainable_weights": (True, {"frozen.format": "int8"}, {}),
    "activation_checkpointing.cpu_checkpointing": (True, {"activations.offload": "host"}, {}),
    f"{PARAMS}.ns_method": ("standard", {}, {"optimizer.type": "Muon"}),
}  # fmt: skip

# For each key with verdict REFUSED: a refused value, an accepted value, and other required keys.
REFUSED: dict[str, tuple[Any, ...]] = {
    "amp": ({"enabled": True, "opt_level": "O1"}, {"enabled": False, "opt_level": "O1"}),
    "data_types.buffer_dtype": ("fp32", None),
    f"{PARAMS}.bias_correction": (False, True),
    f"{PARAMS}.amsgrad": (True, False),
    f"{PARAMS}.per_head_muon": (True, False, {"optimizer.type": "Muon"}),
    f"{ZERO}.ignore_unused_parameters": (False, True),
    f"{ZERO}.zero_hpz_partition_size": (8, 1),
    f"{ZERO}.zero_quantized_weights": (True, False),
    f"{ZERO}.zero_quantized_gradients": (True, False),
    f"{ZERO}.zeropp_loco_param": ({"err_beta": 0.8}, {}),
    f"{ZERO}.mics_shard_size": (4, -1),
    f"{ZERO}.zenflow": ({"topk_ratio": 0.1}, None),
    "aio.use_gds": (True, False),
    "compile.deepcompile": (True, False),
    "compile.autoep_non_moe": (True, False),
    "sequence_parallel_size": (2, 1),
    "data_parallel_size": (2, 1.0),
    "tensor_parallel": ({"autotp_size": 2}, {"autotp_size": 1, "tp": {"tp_size": 1}}),
    "pipeline": ({"stages": 2}, {"stages": "auto", "partition": "best"}),
    "expert_parallel": ({"enabled": True, "autoep_size": 2}, {"enabled": False}),
    "elasticity": ({"enabled": True}, {"enabled": False, "max_train_batch_size": 2000}),
    "autotuning": ({"enabled": True}, {"enabled": False}),
    "hybrid_engine": ({"enabled": True}, {"enabled": False}),
    "nebula": ({"enabled": True}, {"enabled": False}),
    "datastates_ckpt": ({"host_cache_size": 16}, False),
    "weight_quantization": ({"post_init_quant": {"fc": {"num_bits": 4}}}, {"enabled": False}),
    "compression_training": (
        {"weight_quantization": {"shared_parameters": {"enabled": True}, "different_groups": {}}},
        {"weight_quantization": {"shared_parameters": {"enabled": False}}},
    ),
    "quantize_training": ({"enabled": True}, {"enabled": False}),
    "eigenvalue": ({"enabled": True}, {"enabled": False}),
    "progressive_layer_drop": ({"enabled": True, "theta": 0.5}, {"enabled": False}),
    "sparse_attention": ({"mode": "fixed", "block": 16}, {}),
    "random_ltd": ({"enabled": True}, {"enabled": False}),
    "curriculum_learning": ({"enabled": True}, {"enabled": False}),
    "data_efficiency": (
        {"enabled": True, "data_sampling": {"enabled": True}},
        {"enabled": False, "data_sampling": {"enabled": True}},
    ),
}  # fmt: skip


def keys_with(verdict: KeyStatus) -> list[Key]:
    return [key for key in KEYS.values() if key.verdict is verdict]


@each(keys_with(KeyStatus.DONE))
def test_key_done_sets_config_value(key: Key) -> None:
    value, expected, required = DONE[key.name]
    found = translated({**required, key.name: value})
    config = values(found.config)
    for name, expected_value in expected.items():
        assert config[name] == expected_value, name
    if key.name.startswith("scheduler.params."):
        assert config["scheduler.params"][key.name.rpartition(".")[2]] == value
    if not expected and not required and key.name != "dataloader_drop_last":
        assert config == values(translated().config)
    assert found.drop_last == (key.name == "dataloader_drop_last")
    table_row = row(found, key.name)
    assert (table_row["given"], table_row["verdict"]) == (value, "done")
    assert table_row["note"]


@each(keys_with(KeyStatus.ACCEPTED))
def test_key_accepted_changes_nothing(key: Key) -> None:
    value = 128 if isinstance(key.kind, str) else key.kind[-1]
    found = translated({key.name: value})
    assert values(found.config) == values(translated().config)
    assert row(found, key.name) == {
        "key": key.name,
        "given": "***" if key.name == "comet.api_key" else value,
        "verdict": "accepted",
        "note": key.note,
    }
    assert len(key.note) < 100


@each(keys_with(KeyStatus.REFUSED))
def test_key_refused_where_enabled(key: Key) -> None:
    on, off, *required = REFUSED[key.name]
    given: dict[str, Any] = required[0] if required else {}
    text = refusal({**given, key.name: on})
    assert text.startswith("1 mistake in the DeepSpeed configuration:")
    assert f"{key.name}: " in text
    assert key.note in text
    assert key.remedy in text
    found = translated({**given, key.name: off})
    assert row(found, key.name)["verdict"] == "accepted"
    assert values(found.config) == values(translated(given).config)


def test_key_table_matches_test_cases() -> None:
    assert DONE.keys() == {key.name for key in keys_with(KeyStatus.DONE)}
    assert REFUSED.keys() == {key.name for key in keys_with(KeyStatus.REFUSED)}
    assert len(KEYS) == len(TABLE), "a key stands in the table twice"
    for key in KEYS.values():
        assert key.default, key.name
        assert key.note, key.name
        assert bool(key.when) == bool(key.remedy) == (key.verdict is KeyStatus.REFUSED)


@each(KEYS.values())
def test_key_auto_and_null_are_defaults(key: Key) -> None:
    null = translated({key.name: None}, lenient=True)
    assert row(null, key.name)["given"] is None
    auto = translated({key.name: "auto"}, lenient=True)
    assert "auto" in row(auto, key.name)["note"] + str(row(auto, key.name)["given"])


@each(KEYS.values())
def test_key_value_of_wrong_type_raises(key: Key) -> None:
    if key.kind == "anything":
        return
    wrong = 3 if key.kind == "text" else [[]]
    assert f"  - {key.name}: should be" in refusal({key.name: wrong})


# --- DeepSpeed's own schema ------------------------------------------------------------------


def test_key_table_covers_installed_deepspeed_schema() -> None:
    """Compare with its pydantic schema, field by field, if DeepSpeed is installed."""
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    precision = pytest.importorskip("deepspeed.runtime.precision_config")
    monitor = pytest.importorskip("deepspeed.monitor.config")
    compiled = pytest.importorskip("deepspeed.compile.config")
    sections = {
        ZERO: zero.DeepSpeedZeroConfig,
        f"{ZERO}.offload_param": zero.DeepSpeedZeroOffloadParamConfig,
        OFFLOAD: zero.DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": precision.DeepSpeedFP16Config,
        "bf16": precision.DeepSpeedBF16Config,
        "tensorboard": monitor.TensorBoardConfig,
        "wandb": monitor.WandbConfig,
        "csv_monitor": monitor.CSVConfig,
        "comet": monitor.CometConfig,
        "compile": compiled.CompileConfig,
    }
    known = {*KEYS, *RENAMED_KEYS, *SECTIONS}
    for section, schema in sections.items():
        for name, info in schema.model_fields.items():
            for word in {name, info.alias or name}:
                assert f"{section}.{word}" in known, f"{section}.{word}"


# --- batch sizes -----------------------------------------------------------------------------


def deepspeeds_batches(
    total: int | None, micro: int | None, steps: int | None
) -> tuple[int, int, int] | None:
    """Return (total, micro, steps) by DeepSpeed's documented rules; None where it raises."""
    if total is None and micro is None:
        return None
    found = None
    for t, m, s in itertools.product(range(1, 65), range(1, 9), range(1, 9)):
        given = zip((total, micro, steps), (t, m, s), strict=True)
        if t != m * s or any(a is not None and a != b for a, b in given):
            continue
        if steps is None and (total is None or micro is None) and s != 1:
            continue  # accumulation is 1 unless both others are given
        assert found is None, "the rules leave no choice"
        found = (t, m, s)
    return found


CHOICES = (None, 1, 2, 3, 4, 6, 8)


@each(CHOICES)
def test_batch_sizes_match_documented_rules(total: int | None) -> None:
    for micro, steps in itertools.product(CHOICES, CHOICES):
        numbers = {
            "train_batch_size": total,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
        }
        expected = deepspeeds_batches(total, micro, steps)
        if expected is None:
            assert "train_batch_size" in refusal(numbers)
            continue
        found = translated(numbers)
        got = (found.batch_size, found.config.gradient_accumulation_steps)
        assert got == expected[1:], numbers


def test_documented_batch_rules_match_installed_deepspeed() -> None:
    module = pytest.importorskip("deepspeed.runtime.config")
    for total, micro, steps in itertools.product(CHOICES, CHOICES, CHOICES):
        ds_config = object.__new__(module.DeepSpeedConfig)
        ds_config.world_size, ds_config.train_batch_size = 1, total
        ds_config.train_micro_batch_size_per_gpu = micro
        ds_config.gradient_accumulation_steps = steps
        try:
            ds_config._configure_train_batch_size()
            found = (
                ds_config.train_batch_size,
                ds_config.train_micro_batch_size_per_gpu,
                ds_config.gradient_accumulation_steps,
            )
        except AssertionError:
            found = None
        assert found == deepspeeds_batches(total, micro, steps), (total, micro, steps)


def test_batch_sizes_inconsistent_error_has_numbers() -> None:
    text = refusal({"train_batch_size": 10, "gradient_accumulation_steps": 4})
    assert "train_batch_size 10 is not train_micro_batch_size_per_gpu 2 (derived) x " in text
    assert "gradient_accumulation_steps 4 x 1 process" in text
    assert "must be given" in refusal({"train_batch_size": None})


def test_batch_sizes_auto_resolved_or_filled() -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = translated(dict.fromkeys(names, "auto"))
    assert (found.batch_size, found.config.gradient_accumulation_steps) == (1, 1)
    assert row(found, "train_batch_size")["note"] == "auto: 1, from the others"
    filled = translated(
        dict.fromkeys(names, "auto"),
        fill={"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    )
    assert (filled.batch_size, filled.config.gradient_accumulation_steps) == (4, 2)
    assert "filled in with 4" in row(filled, "train_micro_batch_size_per_gpu")["note"]


# --- precision, optimizer, schedule, placement ---------------------------------------------------

ADAM = ("optimizer.type", "optimizer.lr", "optimizer.weight_decay")
CPU = {f"{OFFLOAD}.device": "cpu"}
NVME_MOMENTS = {f"{OFFLOAD}.device": "nvme", f"{OFFLOAD}.nvme_path": "/a"}


def adam(*wanted: Any) -> dict[str, Any]:
    return dict(zip(ADAM, wanted, strict=True))


def rule(kind: str | None, **params: Any) -> dict[str, Any]:
    return {"optimizer.type": kind} | {f"{PARAMS}.{k}": v for k, v in params.items()}


@each(
    [
        ({}, {"precision": "fp32", "gradient_clipping": 1.0}),
        ({"bf16.enabled": True}, {"precision": "bf16"}),
        ({"bfloat16.enabled": True}, {"precision": "bf16"}),
        ({"bf16.enabled": False, "fp16.enabled": False}, {"precision": "fp32"}),
        ({"bf16.enabled": "auto", "fp16.enabled": "auto"}, {"precision": "bf16"}),
        ({"bf16.enabled": True, "data_types.param_dtype": "bf16"}, {"precision": "bf16"}),
        ({"fp16.enabled": True, "bf16.enabled": False}, {"precision": "fp16"}),
        ({"fp16.enabled": True, "data_types.param_dtype": "fp16"}, {"precision": "fp16"}),
        (rule("Adam"), adam("AdamW", 1e-3, 0.0)),
        (rule("adamw"), adam("AdamW", 1e-3, 0.0)),
        (rule("AdamW", adam_w_mode=False), adam("AdamW", 1e-3, 0.0)),
        (rule("Adam", adam_w_mode=False), adam("Adam", 1e-3, 0.0)),
        (rule("Adam", torch_adam=True), adam("AdamW", 1e-3, 0.01)),
        (rule("Adam", torch_adam=True, adam_w_mode=False), adam("Adam", 1e-3, 0.0)),
        (rule("AdamW", weight_decay="auto"), adam("AdamW", 1e-3, 0.0)),
        (rule("Lion"), adam("Lion", 1e-3, 0.0) | {"optimizer.betas": [0.9, 0.999]}),
        (rule("Adagrad"), adam("Adagrad", 1e-2, 0.0)),
        (rule("SGD", lr=0.1), adam("SGD", 0.1, 0.0)),
        (rule("SGD", max_grad_norm=1.5), {"gradient_clipping": 1.5}),
        ({f"{PARAMS}.max_grad_norm": 1.5, "gradient_clipping": 1.5}, {"gradient_clipping": 1.5}),
        ({**CPU, f"{OFFLOAD}.ratio": 1.0}, {"placement.optimizer_state": "host"}),
        ({**CPU, f"{OFFLOAD}.ratio": 0}, {"placement.optimizer_state": "device"}),
        ({**NVME_MOMENTS, f"{OFFLOAD}.ratio": 0.5}, {"placement.optimizer_state": "disk"}),
        ({**CPU, f"{ZERO}.cpu_offload": True}, {"placement.optimizer_state": "host"}),
        ({f"{ZERO}.cpu_offload": False}, {"placement.optimizer_state": "auto"}),
        ({f"{OFFLOAD}.buffer_count": 0}, {"placement.optimizer_state": "auto"}),
        ({"aio.thread_count": 1}, {"io.num_threads": 4}),  # fewer than a disk needs
        ({"aio.thread_count": 16}, {"io.num_threads": 16}),
        # Hints never stop a run; commonly copied values are ignored.
        ({f"{ZERO}.sub_group_size": 1}, {"chunk_size": 2048}),
        ({f"{ZERO}.sub_group_size": 1e9}, {"chunk_size": "auto"}),
        ({f"{ZERO}.stage3_prefetch_bucket_size": 1}, {"prefetch_units": 2}),
        ({f"{ZERO}.stage3_max_live_parameters": 1e9}, {"hints.live_parameters": None}),
        ({f"{ZERO}.stage3_max_live_parameters": 0}, {"hints.live_parameters": 0}),
    ]
)
def test_translation_sets_expected_values(more: dict[str, Any], expected: dict[str, Any]) -> None:
    config = values(translated(more).config)
    assert {name: config[name] for name in expected} == expected


@each(
    [
        ({"bf16.enabled": True, "fp16.enabled": True}, "cannot both be enabled"),
        ({"bf16.enabled": True, "data_types.param_dtype": "fp32"}, "the run computes in bf16"),
        ({**HALF, "data_types.param_dtype": "bf16"}, "the run computes in fp16"),
        (
            {**HALF, "fp16.min_loss_scale": 100, "fp16.initial_scale_power": 3},
            "fp16.min_loss_scale: 100 is above the first scale",
        ),
        (rule("Lamb"), "needs the norm of each full parameter"),
        (rule("OneBitAdam", freeze_step=3), "compressed gradients"),
        (rule("Muon", adam_betas=[0.9, 0.9]), "did you mean 'betas'?"),
        (
            rule("RMSprop", lr=0.1, alpha=0.9),
            "initialize(optimizer=lambda groups: torch.optim.RMSprop(groups, lr=0.1, alpha=0.9))",
        ),
        (rule("AdmW"), "did you mean 'AdamW'?"),
        (rule(None, lr=1), "optimizer.type: must be given"),
        (rule("AdamW", beta=1), "did you mean 'betas'?"),
        (rule("AdamW", momentum=0.9), "AdamW does not take it"),
        (rule("SGD", adam_w_mode=True), "SGD does not take it"),
        (rule("AdamW", lr="auto"), "auto was not resolved"),
        (rule("AdamW", lr=-1), "optimizer.params.lr: should be greater"),
        (rule("AdamW", betas=[0.9]), "optimizer.params.betas: should be two"),
        ({"optimizer.parms": {}}, "did you mean 'optimizer.params'?"),
        (
            {f"{PARAMS}.max_grad_norm": 1.5, "gradient_clipping": 0.5},
            "is 1.5, but gradient_clipping is 0.5",
        ),
        (scheduled("WarmupLr"), "did you mean 'WarmupLR'?"),
        (scheduled("WarmupLR", warmup_steps=3), "did you mean 'warmup_num_steps'?"),
        (scheduled("WarmupLR", total_num_steps=3), "WarmupLR does not take total_num"),
        (scheduled("WarmupDecayLR"), "needs total_num_steps"),
        (scheduled("WarmupLR", warmup_type="cubic"), "should be one of 'log', 'linear'"),
        (scheduled("WarmupLR", warmup_num_steps=1.5), "should be a whole number"),
        (scheduled("StepLR", step=3), "did you mean 'step_size'? it takes"),
        ({**CPU, f"{OFFLOAD}.ratio": 2}, "should be between 0 and 1"),
        ({"aio.thread_count": 65}, "aio.thread_count: should be less than or equal to 64"),
        ({f"{OFFLOAD}.device": "nvme"}, f"{OFFLOAD}.nvme_path: must be given where device is nvme"),
        ({f"{ZERO}.cpu_offload": True, f"{OFFLOAD}.device": "none"}, "is 'none'; remove one"),
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'?"),
        ({f"{ZERO}.stge": 3}, "did you mean 'zero_optimization.stage'?"),
        ({f"{OFFLOAD}.devices": "cpu"}, f"did you mean '{OFFLOAD}.device'?"),
        ({"offload_optimizer": {}}, f"did you mean '{OFFLOAD}'?"),
        ({"aio.threads_count": 2}, "did you mean 'aio.thread_count'?"),
        ({"nvme_path": "/x"}, 'write "infinity": {"nvme_path": ...}'),
        ({"qqqq": 1}, "unknown key; known at the top: train_batch_size"),
        ({"aio": 3}, "aio: should be a section of keys and values, got 3"),
        ({"bf16": True}, "bf16: should be a section"),
        ({"infinity": {"placement": {"gradient": "host"}}}, "placement.gradient: unknown key"),
        ({"infinity": 3}, "infinity: should be a section"),
        # A wrong value is not reported as missing.
        ({**NVME, f"{ZERO}.offload_param.nvme_path": 5}, "offload_param.nvme_path: should be"),
        ({"train_batch_size": "x"}, "train_batch_size: should be"),
        ({"optimizer.type": 5}, "optimizer.type: should be"),
    ]
)
def test_translation_error_reports_one_mistake(more: dict[str, Any], words: str) -> None:
    text = refusal(more)
    assert words in text
    assert text.startswith("1 mistake in the DeepSpeed configuration:")


def test_loss_scale_options_disabled_dynamic_and_static() -> None:
    given = {"fp16.initial_scale_power": 5, "fp16.hysteresis": 4, "fp16.loss_scale": 0}
    off = translated(given)
    assert values(off.config) == values(translated().config)
    assert row(off, "fp16.hysteresis")["note"] == "not used: fp16 is not enabled"
    dynamic = translated({**HALF, **given}).config.loss_scale
    assert (dynamic.value, dynamic.initial_power, dynamic.hysteresis) == (0.0, 5, 4)
    static = translated({**HALF, **given, "fp16.loss_scale": 64})
    assert static.config.loss_scale == LossScaleConfig(value=64.0)
    assert row(static, "fp16.hysteresis")["note"] == "not used: the scale is constant, 64"


def test_scheduler_auto_params_resolved_or_refused() -> None:
    auto = {f"scheduler.params.{name}": "auto" for name in ("warmup_min_lr", "warmup_max_lr")}
    more = {**scheduled("WarmupDecayLR", total_num_steps=10), **auto, f"{PARAMS}.lr": 3e-4}
    scheduler = translated(more).config.scheduler
    assert scheduler is not None
    assert scheduler.params == {"total_num_steps": 10, "warmup_max_lr": 3e-4}
    unknown = {**more, "scheduler.params.total_num_steps": "auto"}
    assert "scheduler.params.total_num_steps: auto was not resolved" in refusal(unknown)
    assert translated(unknown, lenient=True).config.scheduler is None
    fill = {"scheduler.params.total_num_steps": 99}
    filled = translated(unknown, fill=fill).config.scheduler
    assert filled is not None
    assert filled.params["total_num_steps"] == 99


@each([{}, {"ns_method": "gram"}, {"ns_method": "standard"}])
def test_muon_note_on_newton_schulz_of_torch(given: dict[str, str]) -> None:
    found = translated(rule("Muon", **given))
    has_note = "standard" not in given.values()
    assert ("as in torch.optim.Muon" in row(found, "optimizer.type")["note"]) is has_note
    if given:
        assert row(found, f"{PARAMS}.ns_method")["verdict"] == ("accepted" if has_note else "done")


def test_muon_options_split_between_muon_and_adamw() -> None:
    """DeepSpeed applies `lr` and `weight_decay` to both rules, `betas` and `eps` to AdamW only."""
    params = {"lr": 0.1, "muon_lr": 0.02, "weight_decay": 0.5, "betas": [0.8, 0.9], "momentum": 0.9}
    found = translated(rule("Muon", **params)).config.optimizer
    expected = {"lr": 0.02, "adam_lr": 0.1, "weight_decay": 0.5, "adam_weight_decay": 0.5}
    expected |= {"adam_betas": (0.8, 0.9), "adam_eps": 1e-10, "momentum": 0.9}
    assert expected.items() <= found.parameters().items()


def test_client_optimizer_and_scheduler_take_precedence() -> None:
    more = {"optimizer.type": "Lamb", f"{PARAMS}.lr": "auto", **scheduled("Nonesuch")}
    found = translated(more, client_optimizer=True, client_scheduler=True)
    assert not found.config.optimizer.model_fields_set
    assert found.config.scheduler is None
    for key in ("optimizer.type", f"{PARAMS}.lr", "scheduler.type"):
        assert "takes precedence" in row(found, key)["note"]
    assert "must be given" in refusal({"optimizer.type": None})
    assert translated({"optimizer.type": None}, lenient=True).config.optimizer.type == "AdamW"


# --- placement -----------------------------------------------------------------------------------

DEVICES = {None: "auto", "none": "device", "cpu": "host", "nvme": "disk"}


@each(itertools.product([0, 1, 2, 3, True], DEVICES, DEVICES))
def test_offload_devices_map_to_placement_at_any_stage(
    stage: int, weights: str | None, moments: str | None
) -> None:
    zero: dict[str, Any] = {"stage": stage}
    if weights:
        zero["offload_param"] = {"device": weights, "nvme_path": "/fast"}
    if moments:
        zero["offload_optimizer"] = {"device": moments, "nvme_path": "/fast"}
    config = translated({ZERO: zero}).config if stage is not True else translated({
        ZERO: {key: value for key, value in zero.items() if key != "stage"}
    }).config  # fmt: skip
    assert config.placement.weights == DEVICES[weights]
    assert config.placement.optimizer_state == DEVICES[moments]
    assert config.placement.gradients == "auto"
    paths = (Path("/fast"),) if "nvme" in (weights, moments) else ()
    assert config.nvme_path == paths


def test_zero_optimization_true_is_stage_1() -> None:
    assert row(translated({ZERO: True}), f"{ZERO}.stage")["given"] == 1
    assert "stage 0" in row(translated({ZERO: False}), f"{ZERO}.stage")["note"]


def test_nvme_paths_collected_or_unused() -> None:
    one, two = f"{ZERO}.offload_param", OFFLOAD
    both = {f"{one}.device": "nvme", f"{one}.nvme_path": "/a",
            f"{two}.device": "nvme", f"{two}.nvme_path": "/b"}  # fmt: skip
    found = translated(both)
    assert found.config.nvme_path == (Path("/a"), Path("/b"))
    assert "striped over 2 paths" in row(found, f"{two}.nvme_path")["note"]
    unused = translated({f"{two}.device": "cpu", f"{two}.nvme_path": "/local_nvme"})
    assert unused.config.nvme_path == ()
    assert "not used" in row(unused, f"{two}.nvme_path")["note"]
    left = translated({f"{two}.nvme_path": "/fast"})
    assert left.config.nvme_path == (Path("/fast"),)
    assert left.config.placement.optimizer_state == "auto"


# --- names -----------------------------------------------------------------------------------


@each([name for name in RENAMED_KEYS if RENAMED_KEYS[name] in KEYS])
def test_deprecated_key_equals_current_key(old: str) -> None:
    key = KEYS[RENAMED_KEYS[old]]
    value = DONE[key.name][0] if key.name in DONE else 128
    found = translated({old: value})
    assert values(found.config) == values(translated({key.name: value}).config)
    assert row(found, old)["verdict"] == str(key.verdict)
    assert translated({old: value, key.name: value}).config == found.config
    other = not value if isinstance(value, bool) else value + 1
    text = refusal({old: value, key.name: other})
    assert "two names of one key" in text
    assert old in text
    assert key.name in text


def test_autocast_requires_fp32_and_bfloat16() -> None:
    on = {"torch_autocast.enabled": True}
    assert "keep one of them" in refusal({**on, "bf16.enabled": True})
    assert "needs loss scaling" in refusal({**on, "torch_autocast.dtype": "torch.float16"})
    assert not translated({"torch_autocast.dtype": "float16"}).config.autocast


def test_translation_error_reports_all_mistakes() -> None:
    text = refusal(
        {
            "train_batch_size": 3, "gradient_accumulation_steps": 2, "amp": {"enabled": True},
            f"{ZERO}.stage": 4, f"{ZERO}.stge": 3, f"{OFFLOAD}.device": "nvme",
            "aio.queue_depth": 1000, "aio.block_size": 5000, "optimizer.type": "Lamb",
            "scheduler.type": "None", "aio.thread_count": 2, "aio.intra_op_parallelism": 3,
            "steps_per_print": "often", "gradient_clipping": -1,
        }
    )  # fmt: skip
    assert text.startswith("12 mistakes in the DeepSpeed configuration:")
    assert "aio.queue_depth: should be less than or equal to 256, got 1000" in text
    assert "aio.block_size: should be a multiple of 4096 bytes; write 4096, got 5000" in text
    assert "gradient_clipping: should be greater than or equal to 0" in text


def test_infinity_section_takes_precedence() -> None:
    ours = {"placement": {"gradients": "host"}, "seed": 3, "optimizer": {"moments": "8bit"}}
    ours["gradient_clipping"] = 0.25
    more = {"infinity": ours, f"{PARAMS}.lr": 2e-4, "gradient_clipping": 4}
    found = translated(more, overrides=["seed=4"])
    assert found.config.gradient_clipping == 0.25
    assert found.config.placement.gradients == "host"
    assert found.config.seed == 4
    assert (found.config.optimizer.moments, found.config.optimizer.lr) == ("8bit", 2e-4)


# --- where it comes from ---------------------------------------------------------------------

PLAIN = nested({**LEAST, "bf16.enabled": True, f"{ZERO}.stage": 2})
COMMENTED = """// a DeepSpeed configuration
{
  "train_batch_size": 8,   # samples
  "optimizer": {"type": "AdamW", "params": {},},
  /* precision:
     bf16 */
  "bf16": {"enabled": true}, "zero_optimization": {"stage": 2},
  "wandb": {"project": "a // b, # c /* d */ ,}"},
}
"""


def test_all_source_forms_give_equal_config(tmp_path: Path) -> None:
    import yaml

    text = json.dumps(PLAIN)
    (tmp_path / "ds.json").write_text(text)
    (tmp_path / "ds").write_text(text)
    (tmp_path / "ds.yaml").write_text(yaml.safe_dump(PLAIN))
    (tmp_path / "ds.hjson").write_text(COMMENTED)
    encoded = [
        encode(text.encode()).decode() for encode in (base64.b64encode, base64.urlsafe_b64encode)
    ]
    expected = translate_deepspeed(PLAIN).config
    forms = [
        tmp_path / "ds.json", str(tmp_path / "ds"), tmp_path / "ds.yaml", tmp_path / "ds.hjson",
        text, *encoded, encoded[1].rstrip("="), COMMENTED[COMMENTED.index("{") :],
    ]  # fmt: skip
    for form in forms:
        assert translate_deepspeed(form).config == expected, form
    commented = translate_deepspeed(tmp_path / "ds.hjson")
    assert row(commented, "wandb.project")["given"] == "a // b, # c /* d */ ,}"


def test_long_base64_is_not_taken_for_path() -> None:
    large = {**PLAIN, "wandb": {"project": "x" * 9000}}
    encoded = base64.urlsafe_b64encode(json.dumps(large).encode()).decode()
    assert translate_deepspeed(encoded).config.precision == "bf16"


def test_base64_standard_and_urlsafe_decoded() -> None:
    text = json.dumps({**PLAIN, "wandb": {"project": "~?>~?>ÿ"}}, ensure_ascii=False)
    plain, url = base64.b64encode(text.encode()), base64.urlsafe_b64encode(text.encode())
    assert plain != url
    for encoded in (plain, url):
        found = translate_deepspeed(encoded.decode())
        assert row(found, "wandb.project")["given"] == "~?>~?>ÿ"


def test_duplicate_keys_raise() -> None:
    with pytest.raises(ConfigError, match=r"^1 mistake in"):
        translate_deepspeed('{"train_batch_size": 8, "bf16": {"enabled": 1, "enabled": true}, '
                            '"optimizer": {"type": "SGD"},}  // a comma too many')  # fmt: skip
    text = '{"train_batch_size": 8, "train_batch_size": 9, "bf16": {"enabled": 1, "enabled": true}}'
    with pytest.raises(ConfigError) as caught:
        translate_deepspeed(text)
    for name in ("train_batch_size", "enabled"):
        assert f"{name}: given twice in one section" in str(caught.value)


QUOTELESS = """
// no braces around it, few quotes, no commas
train_batch_size: 8
optimizer: {
  type: AdamW
  params: {
    lr: 1e-3
    betas: [0.9, 0.99]
  }
}
bf16: { enabled: true }
zero_optimization: {
  stage: 2  # a number, whatever follows
  sub_group_size: 1e9
}
wandb: {
  project:
    '''
    two
    lines
    '''
}
"""


def test_hjson_without_quotes_and_commas_parsed(tmp_path: Path) -> None:
    same = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "sub_group_size": 1e9},
        "wandb": {"project": "two\nlines"},
    }
    (tmp_path / "ds.hjson").write_text(QUOTELESS)
    (tmp_path / "ds.json").write_text(QUOTELESS)
    braced = f"{{{QUOTELESS}}}"
    for form in (
        tmp_path / "ds.hjson", tmp_path / "ds.json", braced,
        base64.b64encode(braced.encode()).decode(),
    ):  # fmt: skip
        found = translate_deepspeed(form)
        assert found.config == translate_deepspeed(same).config
        assert found.table() == translate_deepspeed(same).table()
    (tmp_path / "ds.hjson").write_text(QUOTELESS.replace("stage: 2", "stage: 2\n stage: 3"))
    with pytest.raises(ConfigError, match="stage: given twice in one section"):
        translate_deepspeed(tmp_path / "ds.hjson")


def test_missing_hjson_package_raises_only_if_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)  # as if it were not installed
    for name in ("ds.hjson", "ds.json"):
        (tmp_path / name).write_text(QUOTELESS)
        with pytest.raises(ConfigError, match="try: pip install hjson; or write JSON"):
            translate_deepspeed(tmp_path / name)
    (tmp_path / "ds.hjson").write_text(COMMENTED)
    assert translate_deepspeed(tmp_path / "ds.hjson").config.precision == "bf16"
    (tmp_path / "ours.json").write_text("seed: 3")
    assert find_source(tmp_path / "ours.json") is None


@each(
    [
        ({}, False),
        ({"nvme_path": "/x", "placement": {"weights": "disk"}}, False),
        ({"optimizer": {"lr": 1e-3}, "gradient_clipping": 0.0}, False),
        ({"nvme_path": "/x", "log_level": "info"}, False),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1}}}, True),
        ({"zero_optimization": {}, "nvme_path": "/x"}, True),
        ({"train_batch_size": 8}, True),
        ({"steps_per_print": 8, "gradient_clipping": 1.0}, True),
    ],
)
def test_is_deepspeed_detects_source_format(raw: dict[str, Any], theirs: bool) -> None:
    assert is_deepspeed(raw) == theirs
    assert (find_source(raw) is not None) == theirs


def test_is_deepspeed_by_type_of_compile() -> None:
    assert find_source({"compile": {"deepcompile": False}, "gradient_clipping": 1.0}) is not None
    assert find_source({"compile": True, "gradient_clipping": 1.0}) is None


def test_find_source_returns_none_for_other_formats(tmp_path: Path) -> None:
    (tmp_path / "ours.json").write_text('{"seed": 3}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "broken.hjson").write_text("{ stage: 3")
    (tmp_path / "bytes.json").write_bytes(b"\xff")
    for source in (
        {}, load_config({}), tmp_path / "ours.json", tmp_path / "broken.json", tmp_path, 3,
        tmp_path / "none.json", "7b", "Zm9vYmFy", tmp_path / "bytes.json", "run.yaml",
    ):  # fmt: skip
        assert find_source(source) is None
    with pytest.raises(ConfigError, match=r"neither JSON .* nor Hjson"):
        find_source(tmp_path / "broken.hjson")
    with pytest.raises(ConfigError, match="not a DeepSpeed configuration"):
        translate_deepspeed({"seed": 3})


def test_table_rows_are_json_serializable() -> None:
    rows = translated({"pipeline": {"stages": None, 3: (torch.float32, float("nan"))}}).table()
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert {"stages": None, "3": ["torch.float32", "nan"]} in [entry["given"] for entry in rows]


def test_gradient_allreduce_sum_refused_on_several_ranks() -> None:
    assert translated({"gradient_allreduce_op": "sum"}).rows
    assert translated({"gradient_allreduce_op": "mean"}, ranks=2).rows
    assert "the mean over 2 ranks" in refusal({"gradient_allreduce_op": "sum"}, ranks=2)


def test_dotted_top_level_key_is_ignored() -> None:
    found = translate_deepspeed(
        {**nested(LEAST), "zero_optimization.stage3_prefetch_bucket_size": 0.9}
    )
    (table_row,) = [one for one in found.table() if one["given"] == 0.9]
    assert "outside its section" in table_row["note"]
    with pytest.raises(ConfigError, match="unknown key"):
        translate_deepspeed({**nested(LEAST), "zero_optimization.no_such": 1})


def test_api_key_masked_in_table() -> None:
    rows = translated({"comet.api_key": "topsecret"}).table()
    assert "topsecret" not in json.dumps(rows)


# --- initialize ------------------------------------------------------------------------------


def ds_config(path: Path, **zero: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2, "warmup_type": "linear"},
        },
        "zero_optimization": zero,
        "infinity": {"cpu": {"num_threads": 1}},
    }


def on_nvme(path: Path) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(path), "pin_memory": True}
    return {"stage": 1, "offload_param": nvme, "offload_optimizer": nvme, "sub_group_size": 4096}


def by_hand(steps: int) -> dict[str, torch.Tensor]:
    """Train in plain torch with explicit accumulation, clipping and schedule."""
    model = small_model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, weight_decay=0.1, foreach=False, fused=False
    )
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(max(step - 1, 0) / 4, 1.0)
        for micro in range(2):
            (model(batch(2 * step + micro)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("form", ["none", "nvme", "cpu"])
def test_translated_run_matches_plain_torch(tmp_path: Path, form: str) -> None:
    zero = {
        "none": {"stage": 0},
        "nvme": on_nvme(tmp_path),
        "cpu": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }[form]
    import threading

    threads = set(threading.enumerate())
    engine, optimizer, _, scheduler = infinity.initialize(
        model=small_model(), config=ds_config(tmp_path, **zero)
    )
    with engine:
        train(engine, 6)
        found = masters(engine)
        assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 1e-2
        assert engine.translation.batch_size == 2
    assert_nothing_left(tmp_path, threads)
    for name, value in by_hand(6).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_translated_run_equals_native_config_run(tmp_path: Path) -> None:
    native = {
        "precision": "fp32", "nvme_path": str(tmp_path),
        "placement": {**ON_DISK, "gradients": "auto"},
        "gradient_clipping": 0.5, "gradient_accumulation_steps": 2, "cpu": {"num_threads": 1},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
        "scheduler": {"type": "WarmupLR", "params": {
            "warmup_num_steps": 4, "warmup_max_lr": 1e-2, "warmup_type": "linear"}},
    }  # fmt: skip
    found = []
    for config in (native, ds_config(tmp_path, **on_nvme(tmp_path))):
        engine, *_ = infinity.initialize(small_model(), config)
        with engine:
            train(engine, 3)
            found.append(masters(engine))
    assert same(*found)


def test_initialize_config_sources_and_loader(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    config = {**ds_config(tmp_path), "dataloader_drop_last": True}
    path.write_text(json.dumps(config))
    parser = infinity.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed
    data = TensorDataset(torch.zeros(5, 3, dtype=torch.long))
    for source in ({"config": config}, {"config_params": str(path)}, {"args": args}):
        step_log = tmp_path / "journal.jsonl"
        step_log.unlink(missing_ok=True)
        engine, _, loader, _ = infinity.initialize(
            model=small_model(), training_data=data, **source
        )
        engine.close()
        assert [len(tokens) for (tokens,) in loader] == [2, 2]
        assert engine.plan.micro_batches == 2
    settings = read_settings(config, batch_size=3)
    assert settings.batch_size == 3
    with pytest.raises(ConfigError, match="several configurations: config, config_params"):
        infinity.initialize(small_model(), {}, config_params=config)
    with pytest.raises(ConfigError, match="no configuration"):
        infinity.initialize(small_model(), args=parser.parse_args([]))
    assert read_settings({}).translation is None


def test_step_log_start_event_lists_keys(tmp_path: Path) -> None:
    config = {**ds_config(tmp_path), "steps_per_print": float("inf")}
    config["infinity"]["step_log"] = str(tmp_path / "log.jsonl")
    engine, *_ = infinity.initialize(small_model(), config)
    engine.close()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    start = json.loads(lines[0])
    assert start["event"] == "start"
    verdicts = {entry["key"]: entry["verdict"] for entry in start["deepspeed"]}
    assert verdicts["optimizer.type"] == "done"
    assert verdicts["steps_per_print"] == "done"


def test_passed_optimizer_replaces_section(tmp_path: Path) -> None:
    config = {**ds_config(tmp_path), "zero_allow_untested_optimizer": True}
    engine, optimizer, _, scheduler = infinity.initialize(
        small_model(), config,
        optimizer=lambda groups: torch.optim.RMSprop(groups, lr=1e-3),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
    )  # fmt: skip
    with engine:
        assert "alpha" in optimizer.param_groups[0]
        assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)


def test_refused_config_leaves_model_unchanged() -> None:
    model = small_model()
    with pytest.raises(ConfigError, match="apex is not used"):
        infinity.initialize(model, {"train_batch_size": 1, "amp": {"enabled": True}})
    assert model(batch(0)).isfinite()


def test_init_distributed_without_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert infinity.init_distributed("nccl", auto_mpi_discovery=False) is None
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE is 2, but WORLD_SIZE is not set"):
        infinity.init_distributed()
    monkeypatch.setenv("WORLD_SIZE", "1")
    infinity.init_distributed()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 4, but RANK"):
        infinity.init_distributed(dist_backend="nccl")


def test_path_objects_and_numpy_numbers_accepted(tmp_path: Path) -> None:
    found = translated(
        {
            "zero_optimization.offload_param.device": "nvme",
            "zero_optimization.offload_param.nvme_path": tmp_path,
            "train_batch_size": np.int64(8),
            "gradient_accumulation_steps": np.int32(2),
            "gradient_clipping": np.float32(0.5),
        }
    )
    assert found.config.nvme_path == (tmp_path,)
    assert (found.batch_size, found.config.gradient_accumulation_steps) == (4, 2)
    assert found.config.gradient_clipping == 0.5
    json.dumps(found.table())


def test_infinity_section_errors_are_prefixed() -> None:
    ours = {"budgets": {}, "placement": {"weight": "disk"}, "prefetch_units": -1}
    text = refusal({"infinity": ours, "gradient_clipping": -1})
    for name in (
        "infinity.budgets: unknown",
        "infinity.placement.weight: ",
        "infinity.prefetch_units: ",
    ):
        assert f"- {name}" in text
    assert "- gradient_clipping: " in text


def test_table_described_only_at_info_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []

    def describe(self: Translation) -> str:
        made.append("table")
        return "the table"

    monkeypatch.setattr(Translation, "describe", describe)
    for level, expected in ((logging.WARNING, []), (logging.INFO, ["table"])):
        with caplog.at_level(level, "infinity"):
            engine, *_ = infinity.initialize(small_model(), nested(LEAST))
            engine.close()
        assert made == expected
    assert "the table" in caplog.text


def test_deepspeed_names_match_key_table() -> None:
    assert frozenset(names_in("")) - Config.model_fields.keys() == DEEPSPEED_KEYS
