"""Replaced forwards of blocks: recomputed in backward, run in slices of the batch, or compiled.

[Note: wrappers of a block]
From outside in: the module's hooks (infinity's fetch the weights), slices, the checkpoint, the
compiled forward. The last three replace the block's `forward`, so users' hooks run once per call,
and every call of the block through its module takes this path. A recomputation does not run the
module's hooks: it calls infinity's itself, and so finds its weights. It sees the buffers with their
values of the original call, and its writes to them are dropped (`RecomputeBuffers`). Slices and the
checkpoint are skipped in calls without gradients, and where the block is recomputed anyway: inside
a backward, under a checkpoint of the model around the block, or inside another block.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import ConfigError, InfinityWarning, TrainingError
from infinity.model.buffers import RecomputeBuffers
from infinity.model.partitioner import UnitModules
from infinity.model.torch_private import inside_backward
from infinity.offload.call_tensors import call_checked, flatten_tensors
from infinity.offload.compiled_forward import CompiledForward, check_options
from infinity.offload.hooks import Hooks
from infinity.offload.slicer import Slicer
from infinity.plan.plan import Plan

# Names of key/value caches in Hugging Face's blocks. A block that runs twice, or in slices, would
# write to its cache several times.
_CACHES = ("past_key_value", "past_key_values", "layer_past", "cache_params")


class BlockForwards:
    """Replaced forwards of all blocks, if the plan or `compile_units` asks for any.

    `recomputed` counts runs of blocks in backward since the start, each slice separately.
    """

    def __init__(
        self,
        hooks: Hooks,
        cuts: Sequence[UnitModules],
        parameters: Sequence[nn.Parameter],
        plan: Plan,
    ) -> None:
        self.recomputed = 0
        self._warned: set[str] = set()  # keys of issued warnings
        self.inside = 0  # forwards in progress that are recomputed by the engine
        self._hooks = hooks
        self._cuts = cuts
        self._parameters = parameters
        self._plan = plan
        self._blocks: list[_Block] = []
        if plan.saved.recompute or plan.saved.slices > 1:
            self._replace()

    def _replace(self) -> None:
        num_blocks, recompute = 0, self._plan.saved.recompute
        for unit, cut in enumerate(self._cuts):
            recomputes = recompute == "all" or num_blocks < recompute
            num_blocks += cut.is_block
            parameter_ids = {id(self._parameters[index]) for index in cut.parameters}
            for module in blocks_of(cut):
                compilable = parameter_ids.issuperset(id(p) for p in module.parameters())
                self._blocks.append(
                    _Block(self, self._hooks, self._plan, module, unit, cut, compilable, recomputes)
                )

    def compile_units(self, **options: Any) -> None:
        """Compile every block's forward, at its first call in training mode.

        `options` are those of `torch.compile`; a block is one graph unless `fullgraph` is False.
        Raises `ConfigError` if no block can be compiled, or for CUDA graphs.
        """
        compile_options = check_options(options)
        if not self._blocks:
            self._replace()
        compilable_blocks = [block for block in self._blocks if block.compilable]
        if not compilable_blocks:
            raise ConfigError(
                "there is no block that can be compiled",
                because="they hold experts, which are units of their own, or weights of others"
                if self._blocks
                else "the model has no blocks that repeat",
                remedy="leave compile out, or cut it yourself: initialize(units=[...])",
            )
        self._hooks.saved.disable_compile()
        for block in compilable_blocks:
            block.compile(compile_options)

    @property
    def num_compiled(self) -> int:
        """Number of blocks that are, or will be, compiled."""
        return sum(block.compiled is not None for block in self._blocks)

    def count_recomputed(self) -> None:
        """Count a recomputed slice."""
        self.recomputed += 1

    def warn_once(self, of: str, text: str) -> None:
        """Issue a warning once per key `of`."""
        if of not in self._warned:
            self._warned.add(of)
            warnings.warn(text, InfinityWarning, stacklevel=3)

    def remove(self) -> None:
        """Restore the original forward of every block."""
        while self._blocks:
            self._blocks[-1].remove()
            self._blocks.pop()


class _Block:
    """Replaced forward of one block."""

    def __init__(
        self,
        owner: BlockForwards,
        hooks: Hooks,
        plan: Plan,
        module: nn.Module,
        unit: int,
        cut: UnitModules,
        compilable: bool,
        recomputes: bool,
    ) -> None:
        self.compilable = compilable  # all parameters inside belong to this unit
        self.compiled: CompiledForward | None = None
        self._owner = owner
        self._saved = hooks.saved
        self._sums = hooks.sums
        self._recomputes = recomputes
        self._name = cut.name
        self._read = hooks.read
        self._module = module
        self._before, self._after = hooks.around(unit)
        self._module_forward: Callable[..., Any] = module.forward
        self._argument_names = _argument_names(module.forward)
        self._slicer = None
        if plan.saved.slices > 1:
            self._slicer = Slicer(module, self._module_forward, unit, cut, plan, owner, hooks)
        self._replaced = module.__dict__.get("forward")

        @functools.wraps(self._module_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(args, kwargs)

        module.__dict__["forward"] = forward

    def compile(self, options: Mapping[str, Any]) -> None:
        """Compile the forward at the next call in training mode."""
        self.compiled = CompiledForward(
            self._module, self._name, self._module_forward, self._read, options
        )

    def remove(self) -> None:
        self._module.__dict__.pop("forward", None)
        if self._replaced is not None:
            self._module.__dict__["forward"] = self._replaced

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_recomputed = inside_backward() or self._saved.under_checkpoint
        if not torch.is_grad_enabled() or is_recomputed or self._sums.call is not None:
            if is_recomputed and self._slicer is not None and not self._owner.inside:
                self._owner.warn_once(
                    "left whole",
                    f"block {self._name!r} does not run in slices: the model checkpoints it, and "
                    "would keep all slices' tensors while it computes it again; turn that off, and "
                    "set activations.checkpoint: units, which does it slice by slice",
                )
            return self._plain(*args, **kwargs)
        if self._recomputes or self._slicer is not None:
            args, kwargs = self._without_caches(args, kwargs)
        if self._slicer is not None:
            return self._slicer(self._run, args, kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._recomputes:
            modules = [*self._module.modules()]  # now: modules may have been added
            run = functools.partial(self._recomputable, RecomputeBuffers(modules))
            return checkpointed(run, self._name, args, kwargs)
        return self._plain(*args, **kwargs)

    def _recomputable(self, rerun: RecomputeBuffers, *args: Any, **kwargs: Any) -> Any:
        recomputing, pushed = inside_backward(), False
        if recomputing:
            self._owner.recomputed += 1
            self._before(self._module, args, kwargs)
        else:  # the module's hooks have run
            pushed = self._saved.push()
        self._owner.inside += 1
        try:
            with rerun.again() if recomputing else rerun.first():
                return self._plain(*args, **kwargs)
        finally:
            self._owner.inside -= 1
            if recomputing:
                self._after(self._module, args, None)
            elif pushed:
                self._saved.pop()

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled is not None and self._module.training:
            return self.compiled(*args, **kwargs)
        return self._module_forward(*args, **kwargs)

    def _without_caches(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments without empty caches; raise `TrainingError` for a cache with content."""
        positional = dict(zip(self._argument_names, args, strict=False))
        cleaned = dict(kwargs)
        for key in _CACHES:
            arguments = positional if key in positional else cleaned
            cache = arguments.get(key)
            if cache is None:
                continue
            get_length = getattr(cache, "get_seq_length", None)
            if not callable(get_length) or get_length() > 0:
                raise TrainingError(
                    f"block {self._name!r} was given {key} that is not empty, to train with",
                    because="a block that is recomputed, or runs in slices, cannot have a cache",
                    remedy="train without a cache (use_cache=False), or without "
                    "activations.checkpoint and activations.slices",
                )
            arguments[key] = None
            self._owner.warn_once(
                "cache",
                "blocks that are recomputed or sliced are not given a cache of keys and values "
                "while they train; pass use_cache=False to silence this",
            )
        if cleaned.get("use_cache") is True:
            cleaned["use_cache"] = False
        return (*positional.values(), *args[len(positional) :]), cleaned


def blocks_of(cut: UnitModules) -> list[nn.Module]:
    """Return the modules of a block's unit, without single torch layers; none for other units."""
    if not cut.is_block:
        return []
    return [
        module
        for module in cut.modules
        if any(True for _ in module.children())
        or not type(module).__module__.startswith("torch.nn.modules.")
    ]


def _argument_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters; an empty list if it has no signature."""
    try:
        return [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        return []


def checkpointed(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function under `torch.utils.checkpoint`, with all tensors in its arguments as inputs.

    torch's checkpoint saves positional tensors only; this one also saves those in kwargs, tuples,
    lists and dicts.
    """
    tensors: list[Tensor] = []
    structure = flatten_tensors((args, dict(kwargs)), tensors)

    def run(*inputs: Tensor) -> Any:
        return call_checked(function, name, structure, inputs)

    return checkpoint(run, *tensors, use_reentrant=False)
