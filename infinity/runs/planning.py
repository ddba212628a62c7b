"""What a run would take, from the shapes of its model and the limits it will really have."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from infinity.bench.rate_cache import kept_rates
from infinity.blueprint import limits_for
from infinity.config import Config
from infinity.cutting import Cut, case_for, cut_model, groups_of
from infinity.huggingface.library import transformers
from infinity.memory.device import Device
from infinity.model.foreign import explained
from infinity.model.target import Target, target_of
from infinity.plan.case import Case
from infinity.plan.layout import UnitLayout
from infinity.plan.machine_file import PlanMachine
from infinity.runs.model import ModelFacts, build, read_facts
from infinity.runs.preparation import Prepared
from infinity.runs.settings import BYTES, ModelSection, RunConfig
from infinity.runs.tokenizers import ByteTokenizer


def case_of(prepared: Prepared, model: nn.Module, device: Device) -> tuple[Case, Target, Cut]:
    """The case to plan, the model as the plan sees it, and its units; `device` must stay open.

    Rates are those that are kept of this machine, else nominal ones: nothing is measured here.
    """
    config, section = prepared.engine, prepared.config.model
    groups = groups_of(model, config)
    cut = cut_model(model, config, groups, None)
    target = target_of(prepared.facts.name, model, prepared.facts.config.to_dict())
    paths = tuple(path for path in config.nvme_path if path.is_dir())
    known = kept_rates(paths, device, io=config.io, num_threads=config.cpu.num_threads)
    limits = limits_for(config, device, model)
    machine = PlanMachine.here(paths, device, known.rates)
    case = case_for(
        target,
        cut,
        groups,
        config,
        replace(machine, nominal=known.nominal, measured=known.measured),
        prepared.micro_batch * prepared.length,
        recompute=section.gradient_checkpointing or config.activations.checkpoint == "units",
        base=limits.base,
        made=limits.made,
    )
    return case, target, cut


def units_named(prepared: Prepared, model: nn.Module, names: list[str]) -> tuple[UnitLayout, ...]:
    """The layouts of the model cut into the named units."""
    config = prepared.engine
    return cut_model(model, config, groups_of(model, config), names).layouts


def model_on_meta(section: ModelSection, facts: ModelFacts) -> nn.Module:
    """The model without values: nothing is computed, nothing allocated.

    Raises `ConfigError` for numbers in its config that make no model.
    """
    with explained(f"transformers cannot build the model {facts.name}", "correct its config"):
        try:
            with torch.device("meta"):
                made = transformers().AutoModelForCausalLM.from_config(facts.config)
        except RuntimeError:  # it looks at values while it is built
            return build(section, facts, Config())
    assert isinstance(made, nn.Module)
    return made


def target_on_meta(run: RunConfig) -> Target:
    """The model of a configuration as the plan sees it."""
    tokenizer = ByteTokenizer() if run.tokenizer == BYTES else None
    size, end = (tokenizer.size, tokenizer.end) if tokenizer is not None else (None, None)
    facts = read_facts(run.model, size, end)
    return target_of(facts.name, model_on_meta(run.model, facts), facts.config.to_dict())
