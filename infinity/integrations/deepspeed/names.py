"""DeepSpeed's public names: implementations, and alternatives to names without one.

Any module below `deepspeed` can be imported: one without a file in this package is created on
import. A name in it has an implementation (`IMPLEMENTED`) or is a placeholder: a class if the name
begins with a capital, else a module. Placeholders can be imported and used in `isinstance`; they
raise `ConfigError` when called or subclassed. A module that has implementations has only
DeepSpeed's names (`UNIMPLEMENTED`), so that scripts can test for a name with `hasattr`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from infinity.errors import ConfigError, did_you_mean

VERSION = "0.19.8+infinity"  # DeepSpeed's release with these names, and this library
PACKAGE = "infinity.integrations.deepspeed"

# Implementations: (DeepSpeed's module and its submodules, "*" for all, "" for the package alone;
# infinity's module; names). `a=b`: DeepSpeed's `a` is infinity's `b`. The first match counts.
IMPLEMENTED: tuple[tuple[str, str, str], ...] = (
    ("", f"{PACKAGE}.arguments", "initialize=initialize_deepspeed"),
    ("", f"{PACKAGE}.config", "translate_deepspeed"),
    ("", f"{PACKAGE}.names", "version=VERSION __version__=VERSION"),
    ("comm", "torch.distributed",
     "P2POp ProcessGroup ReduceOp batch_isend_irecv irecv isend is_available new_group recv send"),
    ("runtime.lr_schedules", "infinity.optim.lr_schedules", "VALID_LR_SCHEDULES"),
    ("launcher.runner", f"{PACKAGE}.processes", "DEEPSPEED_ENVIRONMENT_NAME"),
    ("runtime.activation_checkpointing", f"{PACKAGE}.processes",
     "checkpoint configure is_configured non_reentrant_checkpoint=checkpoint reset"),
    ("utils.groups", f"{PACKAGE}.processes",
     "_get_data_parallel_group=get_world_group _get_data_parallel_rank=get_rank "
     "_get_data_parallel_world_size=get_world_size _get_world_group=get_world_group "
     "_get_sequence_parallel_group=no_group _get_sequence_parallel_rank=get_zero "
     "_get_sequence_parallel_world_size=get_one _get_model_parallel_world_size=get_one"),
    ("utils", f"{PACKAGE}.processes",
     "get_model_parallel_group=no_group get_model_parallel_rank=get_zero "
     "get_model_parallel_world_size=get_one get_tensor_model_parallel_group=no_group "
     "get_tensor_model_parallel_rank=get_zero get_tensor_model_parallel_world_size=get_one "
     "get_data_parallel_group=get_world_group get_data_parallel_rank=get_rank "
     "get_data_parallel_world_size=get_world_size"),
    ("*", f"{PACKAGE}.engine", "DeepSpeedEngine"),
    ("*", "infinity.errors",
     "DeepSpeedConfigError=ConfigError ZeRORuntimeException=InfinityError"),
    ("*", "infinity.optim.offloaded",
     "DeepSpeedOptimizer=OffloadedOptimizer ZeROOptimizer=OffloadedOptimizer"),
    ("*", "infinity.optim.lr_schedules",
     "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR"),
    ("*", f"{PACKAGE}.offload_states", "OffloadDeviceEnum OffloadStateTypeEnum"),
    ("*", f"{PACKAGE}.torch_device", "DeepSpeedAccelerator get_accelerator"),
    ("*", f"{PACKAGE}.monitors", "MonitorMaster get_monitor_config"),
    ("*", f"{PACKAGE}.import_checkpoint", "ZeroStageEnum=_Stage"),  # is in pickled checkpoints
    ("*", f"{PACKAGE}.processes",
     "DeepSpeedCPUAdagrad DeepSpeedCPUAdam FusedAdam RepeatingLoader add_config_arguments "
     "init_distributed TORCH_DISTRIBUTED_DEFAULT_PORT"),
    ("comm", f"{PACKAGE}.processes",
     "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single "
     "barrier broadcast broadcast_object_list destroy_process_group gather get_global_rank "
     "get_local_rank get_rank get_world_group get_world_size inference_all_reduce=all_reduce "
     "is_initialized monitored_barrier reduce reduce_scatter reduce_scatter_tensor scatter "
     "allgather_fn=all_gather_into_tensor reduce_scatter_fn=reduce_scatter_tensor"),
    ("*", f"{PACKAGE}.utils",
     "OnDevice clone_tensors_for_torch_save get_z3_leaf_modules logger log_dist move_to_device "
     "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
     "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
     "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
     "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
     "see_memory_usage set_random_seed set_z3_leaf_module set_z3_leaf_modules "
     "unset_z3_leaf_modules z3_leaf_module"),
    ("*", f"{PACKAGE}.utils.zero_to_fp32",
     "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
     "load_state_dict_from_zero_checkpoint"),
    ("runtime.zero", f"{PACKAGE}.zero",
     "GatheredParameters Init ZeroParamStatus is_zero_param "
     "register_external_parameter unregister_external_parameter unwrap_model_for_generation"),
)  # fmt: skip
# DeepSpeed's names without an implementation, in the modules that have implementations, except
# those of `_ALTERNATIVES`. In other modules any name is accepted.
UNIMPLEMENTED: dict[str, str] = {
    "":
        "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable MUON_OPTIMIZER checkpointing "
        "constants dist elasticity git_branch git_hash git_version_info pydantic_v1 "
        "load_ds_config merge_tp_model_init_into_config nebula record_tp_model_init_args "
        "resolve_per_head_muon_after_sharding runtime set_optimizer_flags utils zero",
    "comm":
        "all_gather_coalesced all_reduce_coalesced backend ccl comm config configure constants "
        "enable_symm_mem_for_group get_all_ranks_from_group get_comm_operation_count "
        "get_local_rank_from_launcher get_world_rank_from_launcher "
        "get_world_size_from_launcher has_all_gather_into_tensor has_all_reduce_coalesced "
        "has_coalescing_manager has_reduce_scatter_tensor in_aml in_aws_sm in_dlts "
        "init_deepspeed_backend initialize_mesh_device log_summary mpi_discovery reset_log "
        "reduce_op set_backend timed_op torch utils",
    "launcher.runner": "",
    "runtime.lr_schedules":
        "add_tuning_arguments get_config_from_args get_lr_from_config get_torch_optimizer "
        "override_params parse_arguments update_lr",
    "runtime.zero":
        "DeepSpeedTensorOverride DeepSpeedZeRoOffload TiledLinear TiledLinearReturnBias "
        "ZeroParamType contiguous_memory_allocator leaf_module_config linear mics mics_utils "
        "parameter_offload partition_parameters partitioned_param_coordinator "
        "partitioned_param_profiler utils",
    "utils":
        "comms_logging config debug exceptions fragment_address get_caller_func "
        "get_full_hp_grad get_full_hp_param get_hp_fragment_mapping get_numactl_cmd "
        "init_on_device initialize lazy_init_hp_params_optimizer_state link_hp_params "
        "map_to_flat_opt_states mixed_precision_linkage module_utils numa recursive_getattr "
        "recursive_setattr set_full_hp_grad set_full_hp_param set_log_level_from_string "
        "set_tensor_model_parallel_rank set_tensor_model_parallel_world_size tensor_fragment "
        "torch types z3_leaf_parameter zero_to_fp32 zero_to_torch",
    "utils.groups": "",
}  # fmt: skip
# Modules whose presence makes scripts choose a kernel: importing them must fail.
_ABSENT = ("ops.deepspeed4science",)
_ALIASES = {"checkpointing": "runtime.activation_checkpointing.checkpointing", "dist": "comm"}

# Alternatives: (names or modules with their submodules; reason; remedy). The longest match counts.
_ALTERNATIVES: tuple[tuple[str, str, str], ...] = (
    ("", "it is internal to DeepSpeed, or no name of DeepSpeed",
     "docs/migrating-from-deepspeed.md lists the names that work"),
    ("PipelineModule PipelineEngine DualPipeVEngine DualPipeVModule pipe runtime.pipe",
     "there is no pipeline parallelism: each GPU runs all layers",
     "pass the complete model, such as nn.Sequential(*layers), to initialize()"),
    ("InferenceEngine DeepSpeedInferenceConfig default_inference_config init_inference inference "
     "module_inject replace_transformer_layer model_implementations",
     "no layers are replaced; a model of frozen parameters makes an engine for inference",
     "engine, *_ = deepspeed.initialize(model=model.requires_grad_(False), config=config), then "
     "engine.generate(...) or engine(...)"),
    ("tp_model_init set_autotp_mode runtime.tensor_parallel", "layers are not split over GPUs",
     "leave it out: `infinity run --gpus N script.py` shares weights between GPUs"),
    ("sequence runtime.sequence_parallel", "sequences are not split over GPUs",
     "leave it out; for long sequences `activations: {checkpoint: units, offload: host}`"),
    ("moe", "there is no expert parallelism",
     "the MoE layers of your model unchanged, such as transformers': experts are fetched when "
     "they are used"),
    ("autotuning", "the plan chooses what autotuning would try",
     "`infinity plan --config ds_config.json`"),
    ("compression", "weights are not compressed while they train",
     "leave it out, or torchao on the model before initialize()"),
    ("linear", "", "peft's LoRA on the model before initialize(): any tier for frozen weights"),
    ("compile runtime.compiler", "", "engine.compile()"),
    ("launcher", "infinity's launcher or torchrun starts processes",
     "`infinity run --gpus N script.py`, or torchrun"),
    ("nvme io ops.aio ops.gds", "infinity reads and writes files itself",
     "`infinity bench DIR` measures a drive, `nvme_path` in the configuration names it"),
    ("ops.op_builder", "no operators are built at run time",
     "leave it out; `infinity doctor` lists the features of this machine"),
    ("ops", "", "torch's own layers and optimizers: initialize(optimizer=...) takes any"),
    ("ops.lion runtime.zero.muon", "", 'the configuration: {"optimizer": {"type": "Lion", ...}}'),
    ("ops.transformer DeepSpeedTransformerLayer DeepSpeedTransformerConfig", "",
     "torch.nn.TransformerEncoderLayer, or the model's own attention"),
    ("runtime.hybrid_engine runtime.rollout DeepSpeedHybridEngine", "",
     "engine.generate(...) between steps"),
    ("runtime.zero.stage3 runtime.zero.stage_1_and_2 runtime.bf16_optimizer runtime.fp16 "
     "runtime.base_optimizer", "the engine stores optimizer state",
     "engine.optimizer; `infinity plan` estimates memory"),
    ("runtime.zero.tiling", "layers are offloaded without tiling", "torch.nn.Linear"),
    ("runtime.zero.config runtime.zero.offload_config runtime.config DeepSpeedConfig",
     "a configuration is translated",
     "infinity.translate_deepspeed(config), or engine.config and methods of the engine"),
    ("runtime.zero.offload_states", "", "engine.offload_states(), engine.reload_states()"),
    ("runtime.data_pipeline", "batches come from the script's own loader",
     "torch.utils.data.DataLoader; curricula are not supported"),
    ("runtime.dataloader DeepSpeedDataLoader", "",
     "initialize(training_data=...), engine.deepspeed_io(dataset), or any DataLoader"),
    ("runtime.activation_checkpointing", "activations are not partitioned over GPUs",
     "checkpointing.checkpoint(function, *args), or `activations: {checkpoint: units}`"),
    ("runtime.utils.clip_grad_norm_ runtime.utils.get_grad_norm runtime.utils.get_global_norm",
     "gradients have been moved to their tier", "gradient_clipping in the configuration; "
     "engine.get_global_grad_norm()"),
    ("checkpoint", "checkpoints hold full tensors by name, for any number of GPUs",
     "engine.save_checkpoint, engine.load_checkpoint, or `infinity checkpoint`"),
    ("comm", "", "torch.distributed"),
    ("accelerator set_accelerator", "torch chooses the device",
     "functions of torch.cuda, or initialize(device=...)"),
    ("monitor", "", "tensorboard or wandb in the configuration; `step_log` writes JSON lines"),
    ("profiling", "",
     "torch.utils.flop_counter.FlopCounterMode counts operations; `infinity trace` shows the waits "
     "of a run"),
    ("utils.timer", "", "engine.last_report, or `infinity trace`"),
    ("utils.groups utils.bwc", "the model is sharded over all GPUs", "torch.distributed"),
    ("utils.set_z3_leaf_modules_by_name utils.set_z3_leaf_modules_by_suffix",
     "weights are fetched when they are used, in any order", "leave it out"),
    ("utils.instrument_w_nvtx utils.nvtx", "",
     "torch.cuda.nvtx.range, or `trace` in the configuration"),
    ("utils.log_dist_once utils.logging utils.warning_once", "", "log_dist, or logger.warning"),
    ("utils.safe_update_full_grad_vectorized", "", "safe_get_full_grad and safe_set_full_grad"),
    ("env_report", "", "`infinity doctor`"),
)  # fmt: skip


@cache
def _implementations() -> dict[str, list[tuple[str, str, str]]]:
    """Return `IMPLEMENTED` by name: (DeepSpeed's module, infinity's module, attribute)."""
    by_name: dict[str, list[tuple[str, str, str]]] = {}
    for deepspeed_module, module, names in IMPLEMENTED:
        for name, _, attribute in (word.partition("=") for word in names.split()):
            by_name.setdefault(name, []).append((deepspeed_module, module, attribute or name))
    return by_name


@cache
def served(module: str, name: str) -> Any:
    """Return the implementation of a name of a DeepSpeed module, or None."""
    for deepspeed_module, implementing_module, attribute in _implementations().get(name, ()):
        if deepspeed_module in ("*", module) or (
            deepspeed_module and module.startswith(f"{deepspeed_module}.")
        ):
            return vars(import_module(implementing_module))[attribute]
    return None


@cache
def look_up(module: str, name: str) -> Any:
    """Return a name of a DeepSpeed module; raise `AttributeError` if DeepSpeed lacks it."""
    implementation = served(module, name)
    if implementation is not None:
        return implementation
    module_path, path = f"deepspeed.{module}".rstrip("."), f"{module}.{name}".strip(".")
    if not _is_known(module, name):
        raise AttributeError(f"module {module_path!r} has no attribute {name!r}")
    if name[0].isupper():
        return _PlaceholderMeta(name, (), {"__module__": module_path})
    file = Path(__file__).parent.joinpath(*path.split("."))
    has_file = file.is_dir() or file.with_suffix(".py").exists()
    if has_file or path in _ALIASES:
        return import_module(f"{PACKAGE}.{path}")
    return _placeholder_module(path)


def getter(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` for a file of this package that stands for a DeepSpeed module."""
    return lambda name: look_up(module, name)


def _is_known(module: str, name: str) -> bool:
    """Return whether a DeepSpeed module has, or may have, a name without implementation."""
    path = f"{module}.{name}".strip(".")
    is_listed = (
        module not in UNIMPLEMENTED
        or name in UNIMPLEMENTED[module].split()
        or _remedies(path, len(module))
    )
    return bool(is_listed) and not name.startswith("_") and path not in _ABSENT


class NoAttributeError(ConfigError, AttributeError):
    """Error of an attribute of a class without implementation; `hasattr` returns False."""


def _remedies(path: str, longer_than: int = -1) -> list[tuple[int, str, str]]:
    """Return the matches in `_ALTERNATIVES` for a path, as (prefix length, reason, remedy)."""
    return [
        (len(prefix), because, remedy)
        for prefixes, because, remedy in _ALTERNATIVES
        for prefix in prefixes.split() or [""]
        if (not prefix or f"{path}.".startswith(f"{prefix}.")) and len(prefix) > longer_than
    ]


def unsupported_error(path: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
    """Return the error for a name without implementation, by its path below `deepspeed`."""
    _, because, remedy = max(_remedies(path))
    hint = did_you_mean(path.rpartition(".")[2], _implementations(), cutoff=0.88)
    what = f"deepspeed.{path} is not supported"
    return kind(what, because=because or None, remedy=hint + remedy)


class _PlaceholderMeta(type):
    """Metaclass of placeholder classes, which raise when called or subclassed."""

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> _PlaceholderMeta:
        for base in bases:
            if isinstance(base, _PlaceholderMeta):
                base()
        return super().__new__(mcs, name, bases, body)

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise unsupported_error(f"{cls.__module__}.{cls.__name__}".removeprefix("deepspeed."))

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        path = f"{cls.__module__}.{cls.__name__}".removeprefix("deepspeed.")
        raise unsupported_error(path, NoAttributeError)


class _PlaceholderModule(ModuleType):
    """Placeholder of a DeepSpeed module or function."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"DeepSpeed's module of that name: see {__name__}.")
        self._path = name.removeprefix(f"{PACKAGE}.")
        parent, _, last = self._path.rpartition(".")
        self._function = served(parent, last)  # utils.z3_leaf_module is both

    def __getattr__(self, name: str) -> Any:
        return look_up(self._path, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            raise unsupported_error(self._path)
        return self._function(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        return False  # in case the name is a lower-case class

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        raise unsupported_error(self._path)


_placeholder_module = cache(lambda path: _PlaceholderModule(f"{PACKAGE}.{path}"))


class _Finder(MetaPathFinder, Loader):
    """Import hook that creates modules without a file; last, so that files take precedence."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{PACKAGE}."):
            return None
        parent, _, last = name.removeprefix(f"{PACKAGE}.").rpartition(".")
        exists = _is_known(parent, last) or served(parent, last) is not None
        return ModuleSpec(name, self, is_package=True) if exists else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module that resolves its names on access."""
        module: ModuleType = _placeholder_module(spec.name.removeprefix(f"{PACKAGE}."))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Replace an alias in `sys.modules` (`checkpointing`, `dist`) by its target."""
        target = _ALIASES.get(module.__name__.removeprefix(f"{PACKAGE}."))
        if target is not None:
            sys.modules[module.__name__] = import_module(f"{PACKAGE}.{target}")


sys.meta_path.append(_Finder())
