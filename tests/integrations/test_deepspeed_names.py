"""Tests of names below `deepspeed`: modules import, unsupported names raise with a remedy."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

import pytest
from torch import nn

from infinity.errors import ConfigError
from infinity.integrations import deepspeed
from infinity.integrations.deepspeed.names import IMPLEMENTED, UNIMPLEMENTED, look_up

MODULES = (
    "accelerator.real_accelerator", "autotuning", "checkpoint.ds_to_universal", "comm.comm",
    "compression.compress", "inference.v2.engine_factory", "launcher.runner", "moe.layer",
    "module_inject.replace_module", "monitor.monitor", "nebula.constants", "ops.adam.cpu_adam",
    "ops.op_builder.async_io", "ops.sparse_attention", "pipe", "profiling.flops_profiler.profiler",
    "runtime.activation_checkpointing.checkpointing", "runtime.constants", "runtime.pipe.topology",
    "runtime.zero.stage3", "sequence.layer", "utils.groups", "utils.timer",
)  # fmt: skip


@pytest.mark.parametrize("path", MODULES)
def test_module_resolves_by_attribute_and_import(path: str) -> None:
    found: Any = deepspeed
    for part in path.split("."):
        found = getattr(found, part)
    assert found is importlib.import_module(f"infinity.deepspeed.{path}")
    assert found is importlib.import_module(f"infinity.integrations.deepspeed.{path}")


def test_served_names_resolve() -> None:
    count = 0
    for listed_in, implementation, names in IMPLEMENTED:
        for name, _, other in (word.partition("=") for word in names.split()):
            module = "runtime.engine" if listed_in == "*" else listed_in
            expected = getattr(importlib.import_module(implementation), other or name)
            assert look_up(module, name) is expected, name
            count += 1
    assert count > 100


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("init_inference", "engine.generate"),
        ("pipe.PipelineModule", "nn.Sequential"),
        ("runtime.pipe.module.LayerSpec", "nn.Sequential"),
        ("ops.op_builder.CPUAdamBuilder", "infinity doctor"),
        ("runtime.utils.clip_grad_norm_", "gradient_clipping"),
        ("zero.TiledLinear", "migrating-from-deepspeed.md"),
        ("utils.instrument_w_nvtx", "torch.cuda.nvtx.range"),
        ("utils.logging.warning_once", "logger.warning"),
        ("profiling.flops_profiler.FlopsProfiler", "FlopCounterMode"),
        ("profiling.flops_profiler.profiler.get_model_profile", "FlopCounterMode"),
        ("ops.adam.DeepSpeedCPUAdm", "did you mean 'DeepSpeedCPUAdam'"),
        ("runtime.no_such.no_such_name", "or no name of DeepSpeed"),
    ],
)
def test_unsupported_name_raises_on_call(path: str, remedy: str) -> None:
    module, _, name = f"infinity.deepspeed.{path}".rpartition(".")
    found: Any = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(module), name)
    assert found != nn.Linear
    with pytest.raises(ConfigError, match=f"{name} is not supported(.|\n)*try: ") as caught:
        found(1, a=2)
    assert remedy in str(caught.value)


def test_unsupported_class_isinstance_false_subclass_raises() -> None:
    module = importlib.import_module("infinity.deepspeed.runtime.pipe.module")
    kind: Any = module.PipelineModule
    assert not isinstance(3, kind)
    assert not issubclass(nn.Linear, kind)
    assert not hasattr(kind, "from_layers")
    with pytest.raises(ConfigError, match=r"module\.PipelineModule is not supported"):
        type("Model", (kind,), {})
    with pytest.raises(ConfigError, match=r"module\.PipelineModule is not supported"):
        kind.from_layers()


def test_private_names_raise_import_error() -> None:
    with pytest.raises(ImportError, match="_private"):
        from infinity.deepspeed.runtime.pipe.module import _private  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="_private"):
        importlib.import_module("infinity.deepspeed.utils._private")


def test_module_and_function_of_one_name_both_work() -> None:
    importlib.import_module("infinity.deepspeed.utils.z3_leaf_module")
    assert deepspeed.utils.z3_leaf_module(nn.Linear(1, 1)) is False
    assert deepspeed.utils.get_z3_leaf_modules(nn.Linear(1, 1)) == []


def test_hasattr_false_for_names_unknown_to_deepspeed() -> None:
    """Scripts probe for names and modules with `hasattr` and `find_spec`."""
    assert not hasattr(deepspeed, "is_initialized")
    assert not hasattr(deepspeed.utils, "is_initialized")
    assert hasattr(deepspeed, "init_inference")
    with pytest.raises(ImportError, match="is_initialized"):
        from infinity.deepspeed.utils import is_initialized  # noqa: F401
    assert importlib.util.find_spec("infinity.deepspeed.ops.deepspeed4science") is None
    for module, names in UNIMPLEMENTED.items():
        for name in names.split():
            assert look_up(module, name) is not None, name


def test_unsupported_call_is_not_attribute_error() -> None:
    """`nn.Module` reports an `AttributeError` raised in a property as a missing attribute."""

    class Model(nn.Module):
        @property
        def engine(self) -> Any:
            return deepspeed.init_inference(self)

    with pytest.raises(ConfigError, match="init_inference is not supported"):
        _ = Model().engine


def test_unsupported_lower_case_class_isinstance_false() -> None:
    kind: Any = importlib.import_module("infinity.deepspeed.monitor.csv_monitor").csvMonitor
    assert not isinstance(3, kind)
    with pytest.raises(ConfigError, match="csvMonitor is not supported"):
        types.new_class("Mine", (kind,))


def test_attribute_lookup_imports_no_modules() -> None:
    """`pickle` searches all imported modules for an object without `__module__`."""
    importlib.import_module("infinity.deepspeed.runtime.constants")
    before = set(sys.modules)
    for name, module in list(sys.modules.items()):
        if ".deepspeed" in name:
            getattr(module, "frobnicate", None)
    assert set(sys.modules) == before
