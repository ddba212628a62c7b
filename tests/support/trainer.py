"""Training of one model with the engine and with plain torch, for comparison.

`train` uses the engine, with every freed slot poisoned and leaks checked at the end: scratch files,
threads, rules of the fake accelerator. `train_torch` uses plain torch with its AdamW and
`clip_grad_norm_`. `train_reference` uses torch's forward and backward and the reference of the
engine's update (`reference_update`): the engine must equal it bit for bit.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from support import fault_injection
from support.fake_accelerator import FakeAccelerator
from support.leaks import tasks
from support.models import CASES, Batch
from support.reference import SQUARE_BLOCK, SQUARE_LANES, reference_update, write_moment
from support.rounding import join_master, split_master
from support.slices import taken
from support.waiting import wait_until
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infinity.config.schema import Config, load_config
from infinity.engine import Engine
from infinity.model.partition import complete_groups
from infinity.optim.moments import Moment
from infinity.optim.rules import RULES, RuleParams
from infinity.optim.update import rounding_key
from infinity.plan import planner, streamed_updates
from infinity.plan.budget import Limits, with_memory
from infinity.plan.plan import Plan, UnitPlacement
from infinity.profiling.step_report import StepReport
from infinity.storage.device import Device
from infinity.types import MomentFormat

TIERS = ("device", "host", "disk")
PLACEMENTS = [(w, m, g) for w in TIERS for m in TIERS for g in TIERS]
# A third of them, which covers every pair of tiers of any two kinds of state.
PAIRED = [p for p in PLACEMENTS if sum(map(TIERS.index, p)) % 3 == 0]
SIMPLEST = ("device", "device", "device")


def tiers_of(placement: tuple[str, str, str]) -> dict[str, str]:
    """Return the config's `placement` for tiers of (weights, moments, gradients)."""
    return dict(zip(("weights", "optimizer_state", "gradients"), placement, strict=True))


def make_config(placement: tuple[str, str, str] = SIMPLEST, **changes: Any) -> dict[str, Any]:
    """Return a config for tiny models; `changes` override entries, also nested ones."""
    config: dict[str, Any] = {
        "precision": "fp32",
        "placement": tiers_of(placement),
        "chunk_size": 2048,
        "gradient_clipping": 0.5,
        "optimizer": {"lr": 1e-2, "weight_decay": 0.01},
        "cpu": {"num_threads": 1},
    }
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(config.get(key), Mapping)
        config[key] = {**config[key], **value} if nested else value
    return config


@dataclass
class Result:
    """Results of a run, with the engine's counters of moved bytes if it used the engine."""

    losses: list[float]
    masters: dict[str, Tensor]
    norms: list[float]
    report: StepReport | None = None
    forecast: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    plan: Plan | None = None
    of_ranks: list[Result] = field(default_factory=list, repr=False)  # of a run on several ranks

    def unforecast_moves(self) -> list[str]:
        """Return messages on ranks whose last step moved other bytes than the plan forecasts."""
        return [
            f"rank {number} moved {one.report and one.report.moved}, forecast {one.forecast}"
            for number, one in enumerate(self.of_ranks or [self])
            if one.report is None or one.report.moved != one.forecast
        ]

    def differences(self, other: Result) -> list[str]:
        """Return messages on all differences between two runs; empty if they are bit-equal."""
        messages = []
        for what, first_values, second_values in (
            ("loss", self.losses, other.losses),
            ("norm", self.norms, other.norms),
        ):
            if len(first_values) != len(second_values):
                messages.append(f"{len(first_values)} {what} values against {len(second_values)}")
            pairs = enumerate(zip(first_values, second_values, strict=False))
            diff = next(((i, a, b) for i, (a, b) in pairs if a != b and (a == a or b == b)), None)
            if diff is not None:
                messages.append(f"{what} {diff[0]}: {diff[1]!r} against {diff[2]!r}")
        if self.masters.keys() != other.masters.keys():
            messages.append(f"names: {sorted(self.masters.keys() ^ other.masters.keys())}")
            return messages
        for name, value in self.masters.items():
            if not same_bits(value, other.masters[name]):
                messages.append(f"master of {name}")
        return messages


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal dtype, shape and bits (NaN equals NaN)."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    raw = [t.contiguous().view(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*raw)


def make_device(kind: str, seed: int = 0) -> Device | str:
    """Return `kind`, or for `fake` a fake accelerator with copies up to 1 ms late."""
    return FakeAccelerator(seed, max_delay_s=0.001) if kind == "fake" else kind


class Run:
    """Context manager with an engine for a model, which checks for leaks at the end."""

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, Any],
        *,
        device: Device | str | None = None,
        groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.device = device
        self._directory = tempfile.TemporaryDirectory(prefix="parity-")
        self._threads, self._tasks = set(threading.enumerate()), tasks()
        plain, io = fault_injection.taken({"nvme_path": self._directory.name, **config})
        self.config: Config = load_config(plain)
        if groups is not None:
            options["model_parameters"] = groups(model)
        try:
            self.engine: Engine = fault_injection.initialize(
                model, self.config, io=io, device=device, **options
            )[0]
        except BaseException:
            self._directory.cleanup()
            raise

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, *details: object) -> None:
        try:
            self.engine.close()
            if kind is None:
                self.check_nothing_left()
        finally:
            self._directory.cleanup()

    def masters(self) -> dict[str, Tensor]:
        """Return fp32 masters of trained parameters and all other state as stored."""
        return masters_of(self.engine)

    def check_nothing_left(self) -> None:
        """Assert after `close` that there are no scratch files, threads or violations."""
        files = os.listdir(Path(self._directory.name))
        assert not files, f"left in nvme_path: {files}"
        threads = set(threading.enumerate()) - self._threads
        assert not threads, f"threads left: {threads}"
        assert wait_until(lambda: tasks() <= self._tasks), "native threads left"
        if isinstance(self.device, FakeAccelerator):
            assert not self.device.violations, self.device.violations[:3]


def masters_of(engine: Engine) -> dict[str, Tensor]:
    """Return fp32 masters of trained parameters and all other state, by names of the module."""
    state = Engine.state_dict(engine, master=True)
    return {name: value.clone() for name, value in state.items()}


@contextmanager
def at_once(chunks: int) -> Iterator[None]:
    """Make a pass with `chunk_size: auto` stream `chunks` chunks of 2048 elements at once."""
    with (
        mock.patch.object(planner, "CHUNK_ELEMENTS", 2048),
        mock.patch.object(planner, "STREAMED_ELEMENTS", chunks * 2048),
    ):
        yield


@contextmanager
def cpu_update_share(share: float) -> Iterator[None]:
    """Make the CPU update a `share` of the streamed chunks, whatever the plan would choose."""
    original = streamed_updates._with_streamed

    def with_cpu_share(plan: Plan, streamed: frozenset[UnitPlacement], limits: Limits) -> Plan:
        return with_memory(replace(original(plan, streamed, limits), cpu_share=share), limits)

    with mock.patch.object(streamed_updates, "_with_streamed", with_cpu_share):
        yield


def train_on(
    engine: Engine,
    batches: Sequence[Batch],
    *,
    load: Path | None = None,
    save: Path | None = None,
) -> Result:
    """Train an engine, one micro-batch per batch; optionally load and save a checkpoint."""
    losses: list[float] = []
    norms: list[float] = []
    if load is not None:
        assert engine.load_checkpoint(load)[0] is not None
    for batch in batches:
        loss = batch.call(engine)
        engine.backward(loss)
        before = engine.last_report
        engine.step()
        losses.append(loss.item())
        if engine.last_report is not before and engine.grad_norm is not None:
            norms.append(engine.grad_norm)
    if save is not None:
        engine.save_checkpoint(save, wait=True)
    report, forecast, counters = engine.last_report, engine.forecast(), engine.counters()
    return Result(losses, masters_of(engine), norms, report, forecast, counters, engine.plan)


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    config: Mapping[str, Any],
    *,
    device: Device | str | None = None,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    **options: Any,
) -> Result:
    """Train with the engine: one micro-batch per batch, `len(batches) / M` steps."""
    with Run(model, config, device=device, groups=groups, **options) as run:
        return train_on(run.engine, batches)


def train_case(
    name: str,
    device: Device | str | None,
    placement: tuple[str, str, str],
    steps: int,
    **changes: Any,
) -> Result:
    """Train a model of `support.models.CASES` for `steps` optimizer steps."""
    case = CASES[name]
    batches = case.batches(steps * changes.get("gradient_accumulation_steps", 1))
    config = make_config(placement, **changes)
    return train(case.build(), batches, config, device=device, groups=case.groups)


# --- plain torch ---------------------------------------------------------------------------------


def _settings(config: Mapping[str, Any]) -> Config:
    """Load the config without entries that do not apply to plain torch."""
    plain = fault_injection.taken(config)[0]
    return load_config({k: v for k, v in plain.items() if k not in ("placement", "nvme_path")})


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def torch_groups(
    model: nn.Module, groups: Callable[[nn.Module], list[dict[str, Any]]] | None
) -> list[dict[str, Any]]:
    """Return `groups(model)`, or one group of all parameters that require a gradient."""
    if groups is not None:
        return groups(model)
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def train_torch(
    model: nn.Module,
    batches: Sequence[Batch],
    config: Mapping[str, Any],
    *,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    before_batch: Callable[[int, nn.Module], None] | None = None,
    make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
) -> Result:
    """Train in fp32 with torch's optimizer (`foreach=False, fused=False`) and clipping."""
    settings = _settings(config)
    cast_frozen(model, torch.float32)
    if make_optimizer is None:
        kind = getattr(torch.optim, settings.optimizer.type)
        options = settings.optimizer.parameters()
        optimizer = kind(torch_groups(model, groups), **options, foreach=False, fused=False)
    else:
        optimizer = make_optimizer(torch_groups(model, groups))
    scheduler = make_scheduler(optimizer) if make_scheduler is not None else None
    losses: list[float] = []
    norms: list[float] = []
    micro_batches = settings.gradient_accumulation_steps
    for index, batch in enumerate(batches):
        if before_batch is not None:
            before_batch(index, model)
        loss = batch.call(model)
        (loss / micro_batches).backward()
        losses.append(loss.item())
        if (index + 1) % micro_batches:
            continue
        bound = settings.gradient_clipping or math.inf
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), bound, foreach=False)))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return Result(losses, _values(model), norms)


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast frozen floating-point parameters to the compute dtype, as the engine does."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def stacks_of(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that are stacks of experts."""
    return {
        module.get_parameter(name)
        for module in model.modules()
        for name in getattr(module, "infinity_stacks", ())
    }


def square_sums(
    gradient: Tensor, parameter: nn.Parameter, stacks: Collection[nn.Parameter]
) -> list[float]:
    """Return the terms of the squared norm: one per gradient, or per expert of a stack."""
    experts = gradient.view(parameter.shape).unbind() if parameter in stacks else [gradient]
    return [square_sum(one) for one in experts]


def square_sum(tensor: Tensor) -> float:
    """Return `reference_square_sum` without the loop over rows, the slowest part of tiny runs."""
    values = tensor.reshape(-1).double().numpy()
    num_blocks = -(-values.size // SQUARE_BLOCK)
    padded = np.zeros(num_blocks * SQUARE_BLOCK)
    padded[: values.size] = values
    rows = padded.reshape(num_blocks, SQUARE_BLOCK // SQUARE_LANES, SQUARE_LANES)
    lanes = np.add.accumulate(rows * rows, axis=1)[:, -1, :]  # sequentially, in order
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    sums = lanes.reshape(-1)
    while sums.size > 1:
        even = sums.size - sums.size % 2
        sums = np.concatenate([sums[0:even:2] + sums[1:even:2], sums[even:]])
    return float(sums[0]) if sums.size else 0.0


@dataclass
class _Master:
    """State of one trained parameter in `train_reference`."""

    parameter: nn.Parameter
    name: str
    rule_params: RuleParams
    weight: Tensor
    residual: Tensor | None
    moments: list[Moment]
    gradient: Tensor | None = None
    step: int = 0

    def update(self, factor: float, seed: int) -> None:
        """Apply the reference update."""
        assert self.gradient is not None
        self.step += 1
        reference_update(
            self.weight,
            self.residual,
            self.moments,
            self.gradient,
            self.rule_params,
            self.step,
            factor,
            rounding_key(seed, self.name, self.step),
        )

    def set_master(self, master: Tensor) -> None:
        """Replace the master by another one (flat, fp32)."""
        if self.residual is None:
            self.weight.copy_(master)
        else:
            for old, new in zip((self.weight, self.residual), split_master(master), strict=True):
                old.copy_(new)

    def value(self) -> Tensor:
        flat = self.weight if self.residual is None else join_master(self.weight, self.residual)
        return flat.clone().view(self.parameter.shape)


class TorchOptimizerMasters:
    """A torch optimizer in place of a rule, on fp32 masters by id of the parameter."""

    def __init__(
        self,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        groups: list[dict[str, Any]],
    ) -> None:
        parameters = [p for group in groups for p in group["params"]]
        self.masters = {id(p): nn.Parameter(p.detach().float().clone()) for p in parameters}
        self.optimizer = make(
            [{**g, "params": [self.masters[id(p)] for p in g["params"]]} for g in groups]
        )

    def step(self, gradients: Mapping[int, Tensor], factor: float) -> None:
        for key, master in self.masters.items():
            grad = gradients.get(key)
            master.grad = None if grad is None else (grad.float() * factor).view(master.shape)
        self.optimizer.step()


def train_reference(
    model: nn.Module,
    batches: Sequence[Batch],
    config: Mapping[str, Any],
    *,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
) -> Result:
    """Train with torch's forward and backward and the reference update, without the engine.

    Gradients of a single micro-batch stay in the compute dtype; those of several, and of slices,
    are summed in fp32, one at a time. The norm is summed in fp64 per parameter, for stacks of
    experts per expert, in the model's order.
    """
    settings = _settings(config)
    split = settings.precision == "bf16"
    micro_batches = settings.gradient_accumulation_steps
    summed = micro_batches > 1 or settings.activations.slices > 1
    accumulated = torch.bfloat16 if split and not summed else torch.float32
    cast_frozen(model, torch.bfloat16 if split else torch.float32)
    stepped = (
        None
        if make_optimizer is None
        else TorchOptimizerMasters(make_optimizer, torch_groups(model, groups))
    )
    masters, stacks = _masters(model, settings, groups, split=split), stacks_of(model)
    for master in masters.values():
        master.parameter.data = master.weight.view(master.parameter.shape)
        _collect(master, accumulated)
    losses: list[float] = []
    norms: list[float] = []
    for index, batch in enumerate(batches):
        loss = batch.call(model)
        (loss / micro_batches if micro_batches > 1 else loss).backward()
        losses.append(loss.item())
        if (index + 1) % micro_batches:
            continue
        active = [m for m in masters.values() if m.gradient is not None]
        total = 0.0
        for master in active:
            assert master.gradient is not None
            for squares in square_sums(master.gradient, master.parameter, stacks):
                total += squares
        norm = math.sqrt(total)
        norms.append(norm)
        clipping = settings.gradient_clipping
        factor = min(1.0, clipping / (norm + 1e-6)) if clipping else 1.0
        if stepped is not None:
            grads = {id(m.parameter): m.gradient for m in active if m.gradient is not None}
            stepped.step(grads, factor)
        for master in active:
            assert master.gradient is not None
            if stepped is None:
                master.update(factor, settings.seed or 0)
            else:
                master.set_master(stepped.masters[id(master.parameter)].detach().reshape(-1))
            master.gradient = None
    values = _values(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in masters:
            values[name] = masters[id(parameter)].value()
    return Result(losses, values, norms)


def _masters(
    model: nn.Module,
    settings: Config,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None,
    *,
    split: bool,
) -> dict[int, _Master]:
    """Return masters by id of the parameter, in the model's order."""
    params_by_index = rules_by_parameter(model, settings, groups)
    masters: dict[int, _Master] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in params_by_index:
            continue
        rule_params = params_by_index[id(parameter)]
        flat = parameter.detach().float().reshape(-1).clone()
        weight, residual = split_master(flat) if split else (flat, None)
        moments = fresh_moments(rule_params, flat.numel(), settings)
        masters[id(parameter)] = _Master(parameter, name, rule_params, weight, residual, moments)
    return masters


def fresh_moments(rule_params: RuleParams, size: int, settings: Config) -> list[Moment]:
    """Return a rule's moments before the first step."""
    kind = MomentFormat(settings.optimizer.moments)
    moments = [Moment.zeros(size, kind) for _ in range(rule_params.num_moments)]
    for moment, initial in zip(moments, rule_params.initial, strict=False):
        if initial:
            write_moment(moment, np.full(size, initial, np.float32), signed=False)
    return moments


def rules_by_parameter(
    model: nn.Module,
    settings: Config,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None,
) -> dict[int, RuleParams]:
    """Return rules by id of the parameter; groups may override entries."""
    rule, given = RULES[settings.optimizer.type], [dict(g) for g in torch_groups(model, groups)]
    return {
        id(p): rule.of(group).with_shape(tuple(p.shape))
        for group in complete_groups(model, settings, given)
        for p in group["params"]
    }


def _collect(master: _Master, dtype: torch.dtype) -> None:
    """Accumulate gradients in `dtype` by a hook."""

    def accumulate(parameter: Tensor) -> None:
        flat = taken(parameter).reshape(-1).to(dtype)
        if master.gradient is None:
            master.gradient = flat.clone()
        else:
            master.gradient += flat

    master.parameter.register_post_accumulate_grad_hook(accumulate)


# --- memory of activations -----------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts live bytes of tensors made by operations.

    Slots and parameters are not made by operations and do not count. `peak` is the maximum at the
    end of an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is_tensor(t)}
        for tensor in tree_leaves(out):
            if _is_tensor(tensor) and tensor.untyped_storage()._cdata not in inputs:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Return the live bytes."""
        dead = [key for key, (ref, _) in self._storages.items() if ref.expired()]
        for key in dead:
            del self._storages[key]
        return sum(nbytes for _, nbytes in self._storages.values())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


class SavedBytes:
    """Saved-tensor hooks of a user, which count the tensors that autograd saves.

    Tensors that share a storage with one of `excluded` (weights) only count in `num_excluded`.
    """

    def __init__(self, excluded: Sequence[Tensor] = ()) -> None:
        self._excluded = {t.untyped_storage().data_ptr() for t in excluded}
        self.total = self.num_packed = self.num_unpacked = self.num_excluded = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context to train in."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() in self._excluded:
            self.num_excluded += 1
        else:
            self.num_packed += 1
            self.total += tensor.numel() * tensor.element_size()
        return tensor.detach()

    def _unpack(self, packed: Tensor) -> Tensor:
        if packed.untyped_storage().data_ptr() not in self._excluded:
            self.num_unpacked += 1
        return packed
