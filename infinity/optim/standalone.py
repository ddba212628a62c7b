"""`CPUAdam` and `FusedAdam`: the optimizer kernels as torch optimizers, without the engine.

[Note: precision]
The arithmetic is fp32 for all parameter dtypes. With `master=True`, 16-bit parameters have an fp32
master: a bf16 parameter stores a 16-bit residual, which together with the parameter is the master
bit for bit; an fp16 parameter stores an fp32 copy. With `master=False`, precision below that of the
parameter is lost in each step: updates smaller than half its last bit have no effect. Moments are
fp32. `moments=` selects another format for the engine, which stores the state itself if one of
these is passed to `initialize(optimizer=...)`; without the engine, `step()` raises.

[Note: edited parameters]
A parameter may be edited, or loaded, without its master: the parameter then takes precedence. The
first step after that checks each element. An fp32 master that does not round to the parameter is
reset to the parameter. A residual is valid for any number except 0 and infinity, and changes it by
at most half of its last bit: for these two it is reset to 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError, ResidencyError
from infinity.model.offloaded_parameter import OffloadedParameter
from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.cuda import CudaKernels
from infinity.optim.moments import MASTER_STATE_DTYPES, Moment
from infinity.optim.offloaded import OffloadedOptimizer, optimizer_method
from infinity.optim.rules import RULES, AdamW, RuleParams, decay_variant
from infinity.optim.update import BuiltInRule, step_count
from infinity.plan.machine import read_machine
from infinity.types import MomentFormat

_FP32_MAX = torch.finfo(torch.float32).max
_NO_CORRECTION = 1 << 62  # a step at which beta ** step is 0
# State entry of the master, by parameter dtype.
_MASTER_KEYS = {torch.bfloat16: "residual", torch.float16: "master"}
_State = dict[str, Any]


class _Views:
    """Flat views of a parameter and its state, cached across steps while both are unchanged.

    Making them takes several times as long as the update of a small parameter.
    """

    __slots__ = (
        "address", "count", "device", "master_state", "moments", "parameter", "state", "version",
        "weight",
    )  # fmt: skip

    def __init__(self, parameter: Tensor, state: _State, master_state: Tensor | None) -> None:
        self.parameter = parameter
        self.device = parameter.device
        self.address = parameter.data_ptr()
        self.version = parameter._version
        self.weight = parameter.detach().view(-1)
        self.master_state = master_state
        self.moments = [Moment(state[name].view(-1)) for name in AdamW.state_names]
        if not isinstance(state["step"], Tensor) or not state["step"].is_cpu:
            state["step"] = step_count(state["step"])
        self.count = state["step"].numpy()  # shares memory with the tensor
        self.state = tuple(state.values())

    def are_current(self, state: _State) -> bool:
        """Return True if parameter and state are unchanged, as far as torch tracks changes."""
        p = self.parameter
        return (
            p._version == self.version
            and p.data_ptr() == self.address
            and p.dtype is self.weight.dtype
            and p.numel() == self.weight.numel()
            and p.is_contiguous()
            and len(state) == len(self.state)
            and all(map(is_, state.values(), self.state))
        )


class _Adam(torch.optim.Optimizer):
    """Base of `CPUAdam` and `FusedAdam`; see `CPUAdam` for the arguments."""

    _device_types: tuple[str, ...] = ("cpu",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        adamw_mode: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
        moments: str | MomentFormat = "fp32",
        master: bool = True,
        num_threads: int = 0,
    ) -> None:
        try:
            moment_format = MomentFormat(moments)
        except ValueError:
            known = ", ".join(repr(f.value) for f in MomentFormat)
            raise ConfigError(f"moments is {moments!r}", remedy=f"one of {known}") from None
        # `moments` is the storage format in the engine; without it, moments are fp32.
        self.moments, self.master, self.num_threads = moment_format, master, num_threads
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "adamw_mode": adamw_mode,
            "bias_correction": bias_correction,
            "maximize": maximize,
        }
        self._init_runtime()
        super().__init__(params, defaults)

    def _init_runtime(self) -> None:
        """Initialize the attributes that are neither copied nor pickled."""
        self._kernels: dict[torch.device, CpuKernels | CudaKernels] = {}
        self._pid = os.getpid()  # process of the kernels' threads
        self._views: dict[Tensor, _Views] = {}  # by parameter, since its first step

    # --- as torch's, without the compiler (see `optimizer_method`) ---------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; raises `ConfigError` or `ResidencyError` for unsupported parameters."""
        optimizer_method("add_param_group")(self, param_group)
        try:
            _rule_params_of(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                if not isinstance(parameter, OffloadedParameter):  # checked when it steps
                    self._check(parameter)
        except BaseException:
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as in torch."""
        optimizer_method("zero_grad")(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state in torch's format; tensors are not copied."""
        state: dict[str, Any] = optimizer_method("state_dict")(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of `torch.optim.AdamW` or `Adam`.

        The parameters may be loaded before or after. Raises `ConfigError` for an invalid state
        dict, before anything is changed.
        """
        loaded: dict[Tensor, _State] = {}

        def replace_state(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            changed, states = self._split_state_dict(given)
            loaded.update(states)
            return changed

        def store_state(_: torch.optim.Optimizer) -> None:
            self.state.update(loaded)
            self._views.clear()

        # torch would convert moments and masters to the parameter's dtype, so hooks load them. The
        # pre-hook runs after the user's, which may rewrite the state dict; the post-hook runs
        # before the user's, which may read the loaded state.
        pre_hook = self.register_load_state_dict_pre_hook(replace_state)
        post_hook = self.register_load_state_dict_post_hook(store_state, prepend=True)
        try:
            optimizer_method("load_state_dict")(self, state_dict)
        finally:
            pre_hook.remove()
            post_hook.remove()

    def _split_state_dict(
        self, given: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[Tensor, _State]]:
        """Return the state dict for torch to load, and the states that the hooks load."""
        groups, given_groups = self.param_groups, given["param_groups"]
        if [len(group["params"]) for group in groups] != [len(g["params"]) for g in given_groups]:
            return given, {}  # torch raises for it
        pairs = zip(groups, given_groups, strict=True)
        completed_groups = [_completed_group(*pair, self.defaults) for pair in pairs]
        parameters = [p for group in groups for p in group["params"]]
        indices = [index for group in given_groups for index in group["params"]]
        states = dict(given["state"])
        loaded = {}
        for parameter, index in zip(parameters, indices, strict=True):
            if state := states.pop(index, None):
                loaded[parameter] = _copied_state(parameter, state, self.master)
        return {**given, "param_groups": completed_groups, "state": states}, loaded

    def __getstate__(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in ("moments", "master", "num_threads")}
        return {**super().__getstate__(), **options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_kernels" not in vars(self):  # a copy or an unpickled object, not `load_state_dict`
            self._init_runtime()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    # --- the step ----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:
        """Update all parameters that have a gradient; returns the result of `closure`.

        Gradients are multiplied by `grad_scale`, such as a clip factor or the inverse of a loss
        scale, in the same pass over memory. Raises `ConfigError` if it is not finite.
        """
        scale = _finite_scale(grad_scale)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pieces: dict[torch.device, list[Piece]] = {}
        stepped: dict[Tensor, _Views] = {}
        for group in self.param_groups:
            rule_params, corrected = _rule_params_of(group), group["bias_correction"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and parameter.numel():
                    views = stepped[parameter] = self._views_of(parameter)
                    step = int(views.count) + 1 if corrected else _NO_CORRECTION
                    piece = self._piece(views, gradient, rule_params, step, scale)
                    pieces.setdefault(views.device, []).append(piece)
        jobs = [(self._kernels_of(device), job) for device, job in pieces.items()]
        for kernels, job in jobs:
            kernels.update_all(job)
        torch.autograd.graph.increment_version(stepped)  # invalidates tensors saved by autograd
        for views in stepped.values():
            views.count[...] = int(views.count) + 1
            views.version = views.parameter._version
        return loss

    def _piece(
        self, views: _Views, gradient: Tensor, rule_params: RuleParams, step: int, scale: float
    ) -> Piece:
        if gradient.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of a parameter of shape {tuple(gradient.shape)} is sparse",
                remedy="use sparse=False in nn.Embedding",
            )
        master_state = (
            views.master_state if self.master else self._master_state_of(views.parameter, {})
        )
        gradient = gradient.resolve_neg()
        flat = gradient if gradient.is_contiguous() else gradient.contiguous()
        flat = flat if flat.dim() == 1 else flat.view(-1)
        return Piece(views.weight, master_state, views.moments, flat, rule_params, step, scale)

    def _views_of(self, parameter: Tensor) -> _Views:
        """Return views for the kernels; makes state and master at the first step."""
        state: _State = self.state[parameter]
        views = self._views.get(parameter)
        if views is not None and views.are_current(state):
            return views
        if not self.moments.is_exact:
            raise ConfigError(
                f"moments={self.moments.value!r} is for the engine",
                because="without the engine, moments are stored in fp32",
                remedy="leave it out, or pass this to initialize(optimizer=...)",
            )
        self._check(parameter)
        if not state:
            state["step"] = step_count(0)
            for name in AdamW.state_names:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        master_state = self._master_state_of(parameter, state) if self.master else None
        views = self._views[parameter] = _Views(parameter, state, master_state)
        return views

    def _master_state_of(self, parameter: Tensor, state: _State) -> Tensor | None:
        """Return the flat residual or master, or None; see [Note: edited parameters]."""
        name = _MASTER_KEYS.get(parameter.dtype)
        for other_name in _MASTER_KEYS.values():
            if other_name != name:  # the parameter had another dtype
                state.pop(other_name, None)
        if name is None:
            return None
        weight = parameter.detach()
        master_state: Tensor | None = state.get(name)
        if master_state is None:
            is_master = name == "master"
            master_state = state[name] = (
                weight.float() if is_master else torch.zeros_like(weight, dtype=torch.int16)
            )
        elif name == "master":
            # Compares bits: NaN equals NaN, and -0 differs from 0.
            matches = master_state.half().view(torch.int16) == weight.view(torch.int16)
            master_state.copy_(torch.where(matches, master_state, weight.float()))
        else:
            invalid = (weight == 0) & (master_state < 0) | weight.isinf() & (master_state > 0)
            master_state.masked_fill_(invalid, 0)
        return master_state.view(-1)

    def _check(self, parameter: Tensor) -> None:
        name = f"a parameter of shape {tuple(parameter.shape)}"
        if parameter.device.type not in self._device_types:
            raise ResidencyError(
                f"{name} is on {parameter.device}, {type(self).__name__} takes "
                f"{' and '.join(self._device_types)} parameters",
                remedy="use infinity.FusedAdam for CUDA parameters",
            )
        if parameter.dtype not in MASTER_STATE_DTYPES:
            raise ConfigError(
                f"{name} has dtype {parameter.dtype}", remedy="float32, bfloat16 or float16"
            )
        if not parameter.is_contiguous():
            raise ResidencyError(
                f"{name} has strides {parameter.stride()}",
                because="the kernels walk one contiguous range",
                remedy="make the model's parameters contiguous before the optimizer",
            )

    def _kernels_of(self, device: torch.device) -> CpuKernels | CudaKernels:
        if self._pid != os.getpid():  # a forked child has no kernel threads
            self._kernels.clear()
            self._pid = os.getpid()
        kernels = self._kernels.get(device)
        if kernels is None:
            if device.type == "cpu":
                kernels = CpuKernels(self.num_threads or read_machine().num_cpus)
            else:
                kernels = CudaKernels(device)
            self._kernels[device] = kernels
        return kernels


class CPUAdam(_Adam):
    """AdamW or Adam for parameters on the CPU, in one pass over memory; replaces torch's.

    State by parameter: `step`, `exp_avg` and `exp_avg_sq`, as in `torch.optim.AdamW`. Masters are
    `residual` (int16) for bf16 and `master` (fp32) for fp16 parameters: load them together with the
    parameters that they were saved with. A forked child starts new threads.

    Args:
        params: Contiguous fp32, bf16 or fp16 parameters of any shape, or groups. Gradients may have
            any of these dtypes.
        lr: Learning rate.
        betas: Coefficients of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay; with `adamw_mode=False` an L2 term.
        adamw_mode: False for Adam with L2.
        bias_correction: Correct the bias of the moments.
        amsgrad: Not supported; must be False.
        maximize: Maximize the objective.
        master: Store an fp32 master of 16-bit parameters.
        num_threads: Threads of an update; 0 for all processors of the process. Results depend
            neither on it nor on the instruction set.

    Raises:
        ConfigError: A parameter or a setting is not supported. Nothing was changed.
        ResidencyError: A parameter is offloaded by an engine.
    """


class FusedAdam(_Adam):
    """AdamW or Adam for CUDA and CPU parameters, with the arguments, state and bits of `CPUAdam`.

    All parameters of a device are updated by one launch per combination of dtypes, on the current
    stream, without synchronization.

    Raises:
        MachineError: At the first step, if kernels cannot be compiled for the device: NVRTC is
            missing, or the GPU is too old.
    """

    _device_types = ("cpu", "cuda")


# --- groups and states that are given ----------------------------------------------------------


def _rule_params_of(group: Mapping[str, Any]) -> RuleParams:
    """Return the current values of a group; raises `ConfigError` for invalid ones."""
    if group["amsgrad"]:
        raise ConfigError(
            "amsgrad is not supported", remedy="use torch.optim.AdamW(amsgrad=True), or leave it"
        )
    rule = RULES[decay_variant("AdamW", decoupled=bool(group["adamw_mode"]))]
    return rule.of({name: group[name] for name in rule.defaults()})


def _completed_group(
    current: Mapping[str, Any], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a group to load, completed by the current values; raises if the rules differ."""
    decoupled = given.get("adamw_mode", given.get("decoupled_weight_decay"))
    if decoupled is not None and bool(decoupled) != bool(current["adamw_mode"]):
        rules = "Adam with L2", "AdamW"
        raise ConfigError(
            f"the state is of {rules[bool(decoupled)]}, this optimizer is {rules[not decoupled]}",
            remedy=f"make it with adamw_mode={bool(decoupled)}",
        )
    merged = {**{name: current[name] for name in defaults}, **given}
    _rule_params_of(merged)
    return merged


def _copied_state(parameter: Tensor, given: Mapping[str, Any], master: bool) -> _State:
    """Return a copy of the state of one parameter; raises `ConfigError` if it does not match."""
    if "max_exp_avg_sq" in given:
        raise ConfigError("the state is of an optimizer with amsgrad, which is not supported")
    if missing := [name for name in ("step", *AdamW.state_names) if name not in given]:
        raise ConfigError(
            f"the state of a parameter of shape {tuple(parameter.shape)} lacks "
            + ", ".join(missing),
            remedy="load a state of CPUAdam, FusedAdam, torch.optim.AdamW or Adam",
        )
    names: dict[str, torch.dtype | None] = dict.fromkeys(AdamW.state_names, torch.float32)
    master_key = _MASTER_KEYS.get(parameter.dtype, "")
    if master and master_key in given:
        names[master_key] = MASTER_STATE_DTYPES[parameter.dtype]
        if given[master_key].dtype is not names[master_key]:
            raise ConfigError(
                f"{master_key} has dtype {given[master_key].dtype}, not {names[master_key]}",
                because="another optimizer that loaded the state has converted it",
                remedy=f"delete {master_key!r} from the state: the master begins at the parameter",
            )
    state: _State = {"step": step_count(given["step"])}
    for name, dtype in names.items():
        if given[name].shape != parameter.shape:
            raise ConfigError(
                f"{name} has shape {tuple(given[name].shape)}, its parameter "
                f"{tuple(parameter.shape)}",
                remedy="load the state into the parameters it was saved with, in their order",
            )
        copied = given[name].detach().to(parameter.device, dtype, copy=True)
        state[name] = copied.contiguous()
    return state


def _finite_scale(given: Any) -> float:
    """Return `given` as a float; raises `ConfigError` unless it is finite in fp32."""
    try:
        scale = float(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"grad_scale is {given!r}", remedy="a number") from error
    if not abs(scale) <= _FP32_MAX:
        raise ConfigError(
            f"grad_scale is {scale}",
            because="a norm or a loss scale is not finite; the update would not be finite either",
            remedy="skip this step",
        )
    return scale


# --- passed to the engine ----------------------------------------------------------------------


def built_in_optimizer(given: Any, groups: Sequence[dict[str, Any]]) -> OffloadedOptimizer | None:
    """Return the engine's optimizer for `CPUAdam` or `FusedAdam`, instance or class; else None.

    The engine uses the same kernels, but stores the state in its tiers. The groups of an instance
    stay the same objects: schedulers over it keep working. Raises `ConfigError` for options that
    the engine does not support.
    """
    if isinstance(given, type) and issubclass(given, _Adam):  # a stand-in instance has its defaults
        optimizer, groups = given([nn.Parameter(torch.zeros(0))]), [dict(g) for g in groups]
    elif isinstance(given, _Adam):
        optimizer, groups = given, given.param_groups
    else:
        return None
    name = type(optimizer).__name__
    if any(optimizer.state.values()):
        raise ConfigError(
            f"the {name} has state already",
            because="it has stepped, or loaded a state dict",
            remedy="pass one that is new, and load a checkpoint into the engine",
        )
    for group in groups:
        for key, value in optimizer.defaults.items():
            group.setdefault(key, value)
    modes = {bool(group["adamw_mode"]) for group in groups}
    if len(modes) > 1:
        raise ConfigError(
            f"groups of the {name} differ in adamw_mode: AdamW and Adam with L2 are two rules",
            remedy="one of them for all groups",
        )
    for key, wanted in (("bias_correction", True), ("amsgrad", False)):
        if any(bool(group[key]) is not wanted for group in groups):
            raise ConfigError(
                f"the {name} has {key}={not wanted}",
                because="no kernel of the engine supports that",
                remedy=f"{key}={wanted}, or pass torch.optim.AdamW, which torch runs, slower",
            )
    rule = BuiltInRule(decay_variant("AdamW", decoupled=modes == {True}), optimizer.moments)
    defaults = {key: optimizer.defaults[key] for key in AdamW.defaults()}
    return OffloadedOptimizer(list(groups), defaults, rule=rule)
