"""Methods of the DeepSpeed engine that return settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from infinity.integrations.deepspeed.keys import KEYS, read_value

# Methods that say what a configuration says of a key: (what the method begins with, what the key
# begins with, how both go on); `method=key` where they go on otherwise.
_METHODS = (
    ("", "", "dataloader_drop_last dump_state gradient_predivide_factor log_level "
     "managed_gradient_accumulation memory_breakdown scheduler_name=scheduler.type steps_per_print "
     "wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
    ("optimizer_", "optimizer.", "legacy_fusion"),
    ("", "checkpoint.", "load_universal_checkpoint=load_universal use_node_local_storage"),
    ("flops_profiler_", "flops_profiler.", "enabled profile_step"),
    ("fp16_", "fp16.", "auto_cast master_weights_and_gradients=fp16_master_weights_and_grads"),
    ("bf16_", "bf16.bf16_",
     "master_weights_and_gradients=master_weights_and_grads optimizer_states"),
    ("zero_", "zero_optimization.",
     "allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients "
     "elastic_checkpoint ignore_unused_parameters legacy_stage1 load_from_fp32_weights "
     "log_trace_cache_warnings multi_rank_bucket_allreduce=use_multi_rank_bucket_allreduce "
     "overlap_comm parameter_alignment partial_offload=offload_optimizer.ratio reduce_bucket_size "
     "reduce_scatter round_robin_gradients sub_group_size"),
    ("zero_", "zero_optimization.zero_",
     "hpz_partition_size quantized_gradients quantized_nontrainable_weights quantized_weights"),
    ("zero_", "zero_optimization.stage3_",
     "allgather_sequential max_live_parameters max_reuse_distance model_persistence_threshold "
     "module_granularity_threshold param_persistence_threshold prefetch_bucket_size"),
    ("", "zero_optimization.offload_optimizer.", "cpuadam_cores_perc super_offload"),
    ("", "zero_optimization.", "is_sanity_checks_enabled=enable_sanity_checks"),
)  # fmt: skip


STAGE = "zero_optimization.stage"
_NOT_SAID = object()


def _key_reader(key: str) -> Callable[[ConfigMethods], Any]:
    """Return a method that reads a key of the configuration, or DeepSpeed's default."""

    def method(self: ConfigMethods) -> Any:
        return self._said(key)

    method.__doc__ = f"Return {key} of the configuration, else DeepSpeed's default."
    return method


class ConfigMethods:
    """One method for each key in the table; None or DeepSpeed's default where it is not given."""

    # What became of each key, where the configuration was DeepSpeed's: `Translation`, else None.
    translation: Any = None

    def _said(self, key: str) -> Any:
        """Return a key of the configuration, or DeepSpeed's default."""
        rows = () if self.translation is None else self.translation.rows
        text = KEYS[key].default
        given = next((r.given for r in rows if r.key == key and r.given != "auto"), _NOT_SAID)
        if given is _NOT_SAID:
            if text.startswith("stage 3: "):  # else off
                text = text.removeprefix("stage 3: ") if self._said(STAGE) == 3 else "false"
            try:
                given = json.loads(text)
            except ValueError:
                return None if text in ("-", "none", "derived") else text
        try:
            return read_value(KEYS[key].kind, given)
        except ValueError:
            return given


for _before, _section, _names in _METHODS:
    for _method, _, _key in (word.partition("=") for word in _names.split()):
        setattr(ConfigMethods, _before + _method, _key_reader(_section + (_key or _method)))
