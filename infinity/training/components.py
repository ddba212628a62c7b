"""Components of an engine: assembled from a model and a config, closed in reverse order."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.durability import Durability
from infinity.checkpoint.durable_plan import model_facts
from infinity.checkpoint.durable_runs import StoredRun, read_run, remarks
from infinity.common.malloc import return_freed_memory
from infinity.config.schema import Config
from infinity.distributed.context import SINGLE_PROCESS, DistContext
from infinity.errors import EngineFailedError, InfinityError, MachineError
from infinity.model.meta_init import InitialValues
from infinity.model.parameter_map import Installation
from infinity.model.parameters import ParameterBinding, move_buffers
from infinity.model.partition import Partition
from infinity.model.torch_private import drop_flat_weight_refs
from infinity.offload.activations import ActivationStore
from infinity.offload.block_forward import BlockForwards
from infinity.offload.call_guard import CallGuard
from infinity.offload.cycles import Cycles
from infinity.offload.expert_ranges import ExpertRanges
from infinity.offload.gradients import GradientStore
from infinity.offload.hooks import Hooks
from infinity.offload.prefetch import Prefetcher
from infinity.offload.sliced_logits import ChunkedHeads
from infinity.offload.state import StateStore
from infinity.offload.transfers import Transfers
from infinity.offload.window import AccumulationWindow
from infinity.optim.cpu import CpuKernels
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.plan.inputs import logits_at_once
from infinity.plan.layout import largest_trained_of
from infinity.plan.machine import read_machine, threads_for
from infinity.plan.plan import Plan
from infinity.profiling.memory_watch import MemoryWatch
from infinity.profiling.step_tracer import StepTracer
from infinity.profiling.trace_recorder import Trace
from infinity.storage.device import CpuDevice, Device
from infinity.storage.disk import Disk
from infinity.storage.reservations import PROCESS
from infinity.training.async_save import Saver
from infinity.training.initial_write import InitialWrite, Progress
from infinity.training.optimizer_pass import OptimizerPass
from infinity.training.parameter_access import ParameterAccess
from infinity.training.parameter_values import ParameterValues
from infinity.training.stored_weights import StoredWeights
from infinity.types import Tier


class EngineComponents:
    """Storage, transfers, hooks and threads of one engine; `close` releases all of them."""

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        plan: Plan,
        config: Config,
        device: Device,
        optimizer: OffloadedOptimizer,
        initial_values: InitialValues,
        progress: Progress | None = None,
        ranks: DistContext = SINGLE_PROCESS,
    ) -> None:
        self.ranks = ranks
        self.partition = partition
        self.plan = plan
        self.device = device
        self._trace: Trace | None = None
        self.timeline: StepTracer | None = None
        self._storage_cleanups: list[Callable[[], None]] = []
        self._training_cleanups: list[Callable[[], None]] = []  # run before those of the storage
        self._written = False  # the initial state is stored, the parameters' memory freed
        PROCESS.take(self, plan.tier_bytes, device)
        self._storage_cleanups.append(self._release)
        try:
            self._assemble(model, config, optimizer, initial_values, progress)
        except BaseException:
            self.close()
            raise

    def _assemble(
        self,
        model: nn.Module,
        config: Config,
        optimizer: OffloadedOptimizer,  # not stored: it refers to the engine
        initial_values: InitialValues,  # not stored: it may hold values
        progress: Progress | None,
    ) -> None:
        plan, partition = self.plan, self.partition
        self._open_trace(config)
        self._storage_cleanups.append(self._free_memory)  # after transfers and pinning have ended
        self._storage_cleanups += [self.device.close, self.device.synchronize]  # ends all kernels
        num_threads = self._num_threads(config.cpu.num_threads)
        self.kernels = CpuKernels(num_threads, config.cpu.isa)
        self._storage_cleanups.append(self.kernels.close)
        if isinstance(self.device, CpuDevice):
            self.device.copier = self.kernels.copy
        stored = read_run(Path(plan.resumed), config.nvme_path) if plan.resumed else None
        self.disk = self._open_disk(config, stored)
        self.transfers = Transfers(self.device, self.disk)
        self.store = StateStore(plan, self.transfers, self.ranks)
        self.window = AccumulationWindow(plan)
        self.gradients = GradientStore(plan, self.transfers, self.kernels, self.window, self.ranks)
        self._training_cleanups.append(self.gradients.close)
        self.activations: ActivationStore | None = None
        if plan.saved.offload is not None:
            self.activations = ActivationStore(plan.saved, self.transfers)
            self._training_cleanups.append(self.activations.close)
        if self.disk is not None:
            self.disk.allocate()
        self.durability: Durability | None = None  # None again after the last commit
        self.resumed: Mapping[str, Any] | None = None  # document of the resumed commit
        if plan.durable:
            self.commits = self.durability = Durability(plan, self.transfers, self.store, stored)
            self._training_cleanups.append(self.durability.close)
            self.resumed = self.durability.document if stored is not None else None
        self.binding = ParameterBinding(
            plan.units,
            partition.parameters,
            partition.dtypes,
            self.device.torch_device,
            partition.names,
        )
        self.prefetcher = Prefetcher(
            plan, self.transfers, self.store, self.binding, self.gradients.exchange
        )
        self.failure, self.bound = self.prefetcher.failure, self.prefetcher.bound
        rule, seed = optimizer.rule, config.seed or 0
        self.updater = rule.updater(
            self.kernels, partition.names, largest_trained_of(partition.layouts), seed
        )
        self.saver = Saver(plan, self.store)
        self.optimizer_pass = OptimizerPass(
            plan, self.transfers, self.store, self.gradients, self.prefetcher.handover,
            self.failure, self.updater, self.durability, before_change=self.saver.wait_until_copied,
        )  # fmt: skip
        # In reverse: the saver is aborted first, since the optimizer pass may wait for it.
        self._training_cleanups += [self._unbind_all, self.optimizer_pass.close, self.saver.abort]
        self.optimizer_pass.open()
        renew_references = drop_flat_weight_refs(model)
        self._training_cleanups.append(renew_references)
        self._write_initial_state(optimizer, initial_values, stored, progress, config.nvme_path)
        self.binding.settle()
        renew_references()
        self._written = True
        self.gradients.open()
        if self.activations is not None:
            self.activations.prewrite()
        move_buffers(model, self.device.torch_device, initial_values.value)
        initial_values.free()
        return_freed_memory()  # of values that are stored now
        self._attach(model, config)
        if self.disk is not None:
            if stored is None:
                name, itemsize = plan.precision.name, plan.gradient_itemsize
                facts = model_facts(plan.units, name, plan.rule, itemsize)
                self.disk.warnings += remarks(self.disk.paths, config.resume, facts)
                if self.durability is not None:
                    self.durability.begin(facts)
            self._training_cleanups.append(self._commit_last)

    def _open_disk(self, config: Config, stored: StoredRun | None) -> Disk | None:
        if not any(self.plan.memory[Tier.DISK].values()):
            return None
        io = config.io.model_copy(update={"verify": self.plan.verify})
        disk = Disk(config.nvme_path, io, stored.striping if stored else None)
        self._storage_cleanups.append(disk.close)
        return disk

    def _num_threads(self, requested: int) -> int:
        """Return the kernel threads of this rank; `requested` is per machine, 0 is automatic."""
        machine, ranks, unified = read_machine(), self.ranks, self.plan.unified
        if requested:
            return threads_for(requested, machine.num_cpus, ranks.local_count, unified=unified)
        local_cpus = machine.num_cpus // ranks.num_sharing_processors()
        if machine.cpu_quota is not None:  # shared by the ranks of the machine
            local_cpus = min(local_cpus, machine.cpu_quota // ranks.local_count)
        return threads_for(0, local_cpus, unified=unified)

    def _write_initial_state(
        self,
        optimizer: OffloadedOptimizer,
        initial_values: InitialValues,
        stored: StoredRun | None,
        progress: Progress | None,
        paths: Sequence[Path],
    ) -> None:
        """Write the initial state: that of the resumed run, or the model's initial values."""
        index_of = {id(p): i for i, p in enumerate(self.partition.parameters)}
        params_by_index = optimizer.params_by_index(index_of)
        self.updater.check(params_by_index)
        initial = {
            index: optimizer.rule.initial(rule_params)
            for index, rule_params in params_by_index.items()
        }
        self._training_cleanups.append(self.binding.restore_meta)
        self.binding.offload_from_meta()
        if self.durability is not None and stored is not None:
            for layout in self.plan.units:
                self.binding.free(layout.index)
            self.durability.load_memory_tiers(progress)
        else:
            folder = next(iter(paths), None)
            initial_write = InitialWrite(
                self.plan, self.transfers, self.store, self.kernels, initial, initial_values, folder
            )
            initial_write.write(self.partition.parameters, self.binding, progress)
            del initial_write  # frees its buffers

    def _attach(self, model: nn.Module, config: Config) -> None:
        """Install hooks, forwards and parameter maps on a model whose state is stored."""
        partition, plan, cleanups = self.partition, self.plan, self._training_cleanups
        self.guard = CallGuard(backward_threads=not plan.unified)
        self.values = ParameterValues(
            self.store, self.prefetcher, self.binding, self.kernels, self.optimizer_pass.finish,
            self.guard, before_change=self.saver.wait_until_copied, pieces=partition.pieces,
        )  # fmt: skip
        logits_tokens = logits_at_once(config.activations)
        host = None if config.budget.host is None else config.budget.host // self.ranks.local_count
        watch = MemoryWatch(plan, model, self.device, host, logits_tokens)
        self.hooks = Hooks(
            self.prefetcher, self.gradients, self.window, self.guard, watch, self.activations,
            self.values.materialized_dtypes, self.values.flush_if_written, partition.units,
            partition.parameters, partition.trained,
        )  # fmt: skip
        self.access = ParameterAccess(
            self.values, self.hooks, self.guard, partition.parameters, self.window
        )
        cleanups.append(self.hooks.remove)
        self.cycles = Cycles(self.prefetcher, plan)
        self.hooks.register_call_hooks(model, *self.cycles.call_hooks())
        self.forwards = BlockForwards(self.hooks, partition.units, partition.parameters, plan)
        cleanups.append(self.forwards.remove)
        if logits_tokens is not None:
            heads = ChunkedHeads(model, self.hooks, partition.parameters, self.forwards.warn_once)
            cleanups.append(heads.remove)
        if self._trace is not None:
            self.timeline = StepTracer(
                self._trace, self.transfers, self.hooks.saved, *config.trace_steps
            )
        self.installation = Installation(model, self.hooks.touch)
        cleanups.append(self.installation.remove)
        cleanups.append(
            ExpertRanges(self.hooks, model, partition.rows, partition.parameters, self.ranks).remove
        )
        if config.compile:
            self.forwards.compile_units()

    def recover(self) -> None:
        """Unbind all units and cancel transfers after an exception in a call."""
        self.prefetcher.recover()
        if self.activations is not None:
            self.activations.recover()

    def _open_trace(self, config: Config) -> None:
        if config.trace is not None:
            facts = {"device": str(self.device.torch_device), "host_clock": self.device.host_clock}
            names = [unit.name for unit in self.plan.units]
            self._trace = Trace(config.trace, names, facts, follow=self.device.attach_worker_thread)
            self._storage_cleanups.append(self._trace.close)  # closed last: records every transfer

    def _commit_last(self) -> None:
        """Commit the last step at the end of a durable run, unless the engine failed."""
        durability, self.durability = self.durability, None  # once: Ctrl-C may interrupt the wait
        if durability is not None and self.optimizer_pass.can_finish:
            with contextlib.suppress(EngineFailedError):
                self.optimizer_pass.finish(closing=True)
                durability.finish()

    def _unbind_all(self) -> None:
        """Unbind every parameter: a bound view would keep slots and stored state alive."""
        if self._written:
            for layout in self.plan.units:
                self.binding.free(layout.index)

    def _free_memory(self) -> None:
        self.free(state=True)

    def free(self, *, state: bool) -> None:
        """Free all buffers, and with `state` the stored state, even if the engine is referenced.

        A buffer stays allocated while a tensor of the user is a view of it.
        """
        names = ("gradients", "prefetcher", "optimizer_pass", "commits", "activations", "saver")
        for name in ("store", *names) if state else names:
            component = getattr(self, name, None)  # None if it was not created
            if component is not None:
                component.free()
        return_freed_memory()
        self.device.return_freed_memory()

    def _release(self) -> None:
        PROCESS.release(self)

    def add_cleanup(self, cleanup: Callable[[], None], *, last: bool = False) -> None:
        """Register a function that `close` calls: before all others, or `last`."""
        if last:
            self._storage_cleanups.insert(0, cleanup)
        else:
            self._training_cleanups.append(cleanup)

    def drop(self, engine: weakref.ref[Any]) -> None:
        """Finalize the engine: `keep_weights` if it was collected, `close` at process exit.

        A save in progress is completed first. With several ranks always `close`, which is not
        collective: each rank collects at a different time.
        """
        try:
            self.saver.end()
        finally:  # also if Ctrl-C ends the wait
            self._finalize(collected=engine() is None)

    def _finalize(self, *, collected: bool) -> None:
        if collected and self.ranks.count == 1:
            with contextlib.suppress(InfinityError):  # values are lost, as after a failure
                self.keep_weights()
                self._drop_modules()  # the optimizer may live on and refers to this
                return
        self.installation.values_lost = True
        self.close()

    def keep_weights(self) -> None:
        """Release everything except weights, which stay with the module (see `StoredWeights`).

        Collective. If it raises, as after a failure of the engine, nothing is released.
        """
        if not self.optimizer_pass.can_finish:
            raise MachineError("no thread can finish the updates that are owed")
        self.values.release_all_materialized()
        self.optimizer_pass.finish(closing=True)
        for unit in range(len(self.plan.units)):
            self.store.wait_writes(unit)
        remaining = copy.copy(self)
        remaining._storage_cleanups = [
            getattr(remaining, cleanup.__name__)
            if getattr(cleanup, "__self__", None) is self
            else cleanup
            for cleanup in self._storage_cleanups
        ]
        self.values.make_read_only()
        stored = StoredWeights(
            self.installation.modules, self.binding, self.values, self.guard, remaining
        )
        self.installation.stored = stored
        move_buffers(remaining.installation.modules[0], torch.device("cpu"), lambda buffer: buffer)
        try:
            run_cleanups(self._training_cleanups)
        finally:
            self._storage_cleanups = []
            stored.answer()
            remaining._drop_modules()
            remaining.device.synchronize()
            remaining.device.unpin()
            remaining.free(state=False)
            self._release()
            PROCESS.take(remaining, remaining.store.keep_weights(), remaining.device)

    def _drop_modules(self) -> None:
        """Drop references to the module, so that its stored weights are freed with it."""
        names = "access", "cycles", "forwards", "hooks", "installation", "partition", "timeline"
        for name in names:
            delattr(self, name)

    @property
    def closed(self) -> bool:
        """Return True if everything has been released."""
        return not (self._training_cleanups or self._storage_cleanups)

    def close(self) -> None:
        """Run all cleanups; raise the first error at the end.

        Cleanups that a second Ctrl-C interrupts or skips run at the next call.
        """
        run_cleanups(self._training_cleanups, self._storage_cleanups)


def run_cleanups(*lists: list[Callable[[], None]]) -> None:
    """Call the functions of each list in reverse order; raise the first error at the end."""
    first_error: Exception | None = None
    for cleanups in lists:
        while cleanups:
            try:
                cleanups[-1]()
            except Exception as error:
                first_error = first_error or error
            cleanups.pop()
    if first_error is not None:
        raise first_error
