"""Keys of the batch, the precision, the optimizer and the schedule."""

from __future__ import annotations

from infinity.integrations.deepspeed.draft import Draft, Key
from infinity.integrations.deepspeed.keys import (
    accepted,
    all_accepted,
    done,
    refused,
    refused_if_true,
    refused_section,
    within,
)
from infinity.integrations.deepspeed.kinds import (
    COUNT,
    FLAG,
    NAMES,
    NUMBER,
    NUMBERS,
    PAIR,
    SIGNED,
    TEXT,
    WHOLE,
    one_of,
)
from infinity.integrations.deepspeed.optimizers import HINTS

_DTYPE = one_of("fp32", "fp16", "bf16")
_DERIVED = "derived"
_ONE_PROCESS = "nothing is reduced over processes: there is one"


def _drop_last(draft: Draft, value: bool) -> None:
    draft.drop_last = value


TOP = [
    done("train_batch_size", COUNT, _DERIVED, "checked: micro-batch x accumulation x 1 process"),
    done(
        "train_micro_batch_size_per_gpu", COUNT, _DERIVED,
        "batch size of the loader that is made of training_data",
    ),
    done("gradient_accumulation_steps", COUNT, _DERIVED, "the same; sums are fp32"),
    refused(
        "managed_gradient_accumulation", FLAG, "true", "if false", lambda value: not value,
        "the engine counts micro-batches itself",
        "leave it out, and set gradient_accumulation_steps",
    ),
    done("gradient_clipping", NUMBER, "1.0", "global norm, 0 = off", "gradient_clipping"),
    done(
        "dataloader_drop_last", FLAG, "false", "of the loader that is made of training_data",
        _drop_last,
    ),
    accepted(
        "zero_allow_untested_optimizer", FLAG, "false", "any torch optimizer may be passed"
    ),
    accepted(
        "zero_force_ds_cpu_optimizer", FLAG, "true",
        "an optimizer that is passed runs as it is, tile by tile",
    ),
    accepted("vocabulary_size", COUNT, "null", "a hint for tensor cores; not used"),
    *all_accepted(_ONE_PROCESS, {
        "prescale_gradients": (FLAG, "false"),
        "gradient_predivide_factor": (NUMBER, "1.0"),
        "gradient_allreduce_op": (one_of("mean", "sum"), "mean"),
        "communication_data_type": (_DTYPE, "null"),
        "seq_parallel_communication_data_type": (_DTYPE, "fp32"),
        "sparse_gradients": (FLAG, "false"),
        "disable_allgather": (FLAG, "false"),
        "allgather_size": (WHOLE, "5e8"),
        "use_data_before_expert_parallelism": (FLAG, "false"),
    }),
]  # fmt: skip

_CAST = refused_if_true(
    "auto_cast", "false", "inputs are not cast for you", "cast them: engine(x.to(dtype))"
)
_SCALE = "DeepSpeed's rule, step for step, of its ZeRO stages"
FP16 = within(
    "fp16",
    done("enabled", FLAG, "false", "fp16 compute, fp32 masters; the loss is scaled"),
    _CAST,
    done("loss_scale", NUMBER, "0", "0 = dynamic, else the one scale (loss_scale.value)"),
    done("initial_scale_power", WHOLE, "16", "loss_scale.initial_power"),
    done("loss_scale_window", COUNT, "1000", f"loss_scale.window; {_SCALE}"),
    done("hysteresis", COUNT, "2", f"loss_scale.hysteresis; {_SCALE}"),
    done("consecutive_hysteresis", FLAG, "false", f"loss_scale.consecutive_hysteresis; {_SCALE}"),
    done("min_loss_scale", NUMBER, "1", "loss_scale.min; an overflow there is an error, as there"),
    accepted(
        "fp16_master_weights_and_grads", FLAG, "false",
        "masters stay fp32: 4 bytes beside the fp16 weight",
    ),
)  # fmt: skip


def _checks_overflow(draft: Draft, value: bool) -> str | None:
    return None if value else "kept on: a step whose gradients are not finite is skipped"


BF16 = within(
    "bf16",
    done("enabled", FLAG, "false", "bf16 compute, fp32 masters; neither this nor fp16: fp32"),
    accepted(
        "check_grad_overflow", FLAG, "true",
        "always: a step whose gradients are not finite is skipped and counted", _checks_overflow,
    ),
    accepted(
        "bf16_master_weights_and_grads", FLAG, "false",
        "masters stay exact: 2 bytes beside the bf16 weight, never stored twice",
    ),
    done(
        "bf16_optimizer_states", FLAG, "false",
        "true: moments are stored in bf16 (optimizer.moments), with the built-in rules: lossy",
    ),
    accepted("immediate_grad_update", FLAG, "false", "gradients leave as they are made"),
    _CAST,
    *all_accepted("there is no loss scaling in bf16", {
        "loss_scale": (NUMBER, "-"),
        "initial_scale_power": (WHOLE, "-"),
        "loss_scale_window": (WHOLE, "-"),
        "hysteresis": (WHOLE, "-"),
        "consecutive_hysteresis": (FLAG, "-"),
        "min_loss_scale": (NUMBER, "-"),
    }),
)  # fmt: skip

_AUTOCAST_ONLY = "used with torch_autocast.enabled only"
OTHER_PRECISION = [
    *within(
        "torch_autocast",
        refused_if_true(
            "enabled", "false", "the engine does not open autocast for you",
            "remove the section and write `with torch.autocast(...):` around engine(...)",
        ),
        accepted("dtype", TEXT, "bfloat16", _AUTOCAST_ONLY),
        accepted("lower_precision_safe_modules", NAMES, "Linear and Conv", _AUTOCAST_ONLY),
    ),
    refused_section("amp", "apex is not used", 'write "bf16": {"enabled": true}'),
    *within(
        "data_types",
        accepted(
            "grad_accum_dtype", _DTYPE, "null",
            "sums over micro-batches are fp32; one micro-batch keeps the dtype it was made in",
        ),
        done("param_dtype", _DTYPE, "null", "checked: the dtype of the section that is enabled"),
        refused(
            "buffer_dtype", TEXT, "null", "if given", bool, "buffers keep the dtype they have",
            "leave it out, and cast buffers before initialize()",
        ),
        accepted("keep_in_fp32_modules", NAMES, "auto", "buffers keep the dtype they have"),
    ),
]  # fmt: skip

_RULES = "with torch's meaning"
OPTIMIZER = [
    done(
        "optimizer.type", TEXT, "-",
        "Adam (means AdamW unless adam_w_mode is false), AdamW, Lion, Adagrad, SGD; others are "
        "refused with what to write",
    ),
    accepted("optimizer.legacy_fusion", FLAG, "false", "there is one path"),
    *within(
        "optimizer.params",
        done("lr", NUMBER, "1e-3 (Adagrad 1e-2)", _RULES),
        done("betas", PAIR, "[0.9, 0.999]", "Adam, AdamW, Lion; Lion starts from DeepSpeed's"),
        done("eps", NUMBER, "1e-8 (Adagrad 1e-10)", _RULES),
        done("weight_decay", NUMBER, "0 (torch_adam: 0.01)", "starts from DeepSpeed's 0"),
        done("momentum", NUMBER, "0", "SGD"),
        done("dampening", NUMBER, "0", "SGD"),
        done("nesterov", FLAG, "false", "SGD"),
        done("lr_decay", NUMBER, "0", "Adagrad"),
        done("initial_accumulator_value", NUMBER, "0", "Adagrad"),
        done("maximize", FLAG, "false", _RULES),
        done("adam_w_mode", FLAG, "true", "false makes Adam's decay L2; AdamW stays AdamW"),
        done("torch_adam", FLAG, "false", "weight_decay then starts from torch's own default"),
        done(
            "fp32_optimizer_states", FLAG, "true",
            "false: moments are stored in bf16 (optimizer.moments): lossy",
        ),
        done(
            "max_grad_norm", NUMBER, "-",
            "taken as gradient_clipping, if that is not given otherwise (DeepSpeed refuses it)",
        ),
        refused(
            "bias_correction", FLAG, "true", "if false", lambda value: not value,
            "Adam's moments are always corrected here", "leave it out",
        ),
        refused_if_true(
            "amsgrad", "false", "no kernel here keeps the largest second moment",
            "remove the section and write initialize(optimizer=lambda groups: "
            "torch.optim.AdamW(groups, lr=..., amsgrad=True))",
        ),
        *all_accepted("how a step is carried out; ours is always fused",
                      dict.fromkeys(HINTS, (FLAG, "-"))),
    ),
]  # fmt: skip

_MIN_MAX = "DeepSpeed's values, step for step"
SCHEDULER: list[Key] = [
    done(
        "scheduler.type", TEXT, "-",
        "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, with DeepSpeed's "
        "values, or a class of torch.optim.lr_scheduler",
    ),
    *within(
        "scheduler.params",
        done("warmup_min_lr", NUMBERS, "0", _MIN_MAX),
        done("warmup_max_lr", NUMBERS, "optimizer's (WarmupDecayLR 1e-3)", _MIN_MAX),
        done("warmup_num_steps", COUNT, "1000", _MIN_MAX),
        done("warmup_type", one_of("log", "linear"), "log", "others are errors"),
        done("total_num_steps", COUNT, "-", "WarmupDecayLR, WarmupCosineLR"),
        done("warmup_min_ratio", NUMBER, "0", "WarmupCosineLR"),
        done("cos_min_ratio", NUMBER, "1e-4", "WarmupCosineLR"),
        done("lr_range_test_min_lr", NUMBERS, "1e-3", _MIN_MAX),
        done("lr_range_test_step_size", COUNT, "2000", _MIN_MAX),
        done("lr_range_test_step_rate", NUMBER, "1.0", _MIN_MAX),
        done("lr_range_test_staircase", FLAG, "false", _MIN_MAX),
        done("cycle_min_lr", NUMBERS, "-", _MIN_MAX),
        done("cycle_max_lr", NUMBERS, "-", _MIN_MAX),
        done("cycle_first_step_size", COUNT, "2000", _MIN_MAX),
        done("cycle_second_step_size", WHOLE, "as the first", _MIN_MAX),
        done("cycle_first_stair_count", WHOLE, "0", _MIN_MAX),
        done("cycle_second_stair_count", WHOLE, "as the first", _MIN_MAX),
        done("decay_step_size", WHOLE, "0", _MIN_MAX),
        done("decay_lr_rate", NUMBER, "0", _MIN_MAX),
        done("cycle_momentum", FLAG, "true", "the first beta; the second becomes 0.99, as there"),
        done("cycle_min_mom", NUMBERS, "0.8", _MIN_MAX),
        done("cycle_max_mom", NUMBERS, "0.9", _MIN_MAX),
        done("decay_mom_rate", NUMBER, "0", _MIN_MAX),
        done("last_batch_iteration", SIGNED, "-1", _MIN_MAX),
    ),
]  # fmt: skip

TRAINING = [*TOP, *FP16, *BF16, *OTHER_PRECISION, *OPTIMIZER, *SCHEDULER]
