"""Tests that deferred models, engines and optimizers do not import torch's compiler."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

import infinity
from infinity.optim.offloaded import optimizer_method

# The import takes seconds and 80 MiB, only to disable a dispatch mode that is not enabled.
INIT = """
import infinity
with infinity.Init():
    import torch
    torch.nn.Linear(1024, 1024)
"""
RANDOM_ON_META = """
import torch
from infinity.huggingface import meta
with torch.device("meta"), meta._SkipInit():
    torch.nn.init.normal_(torch.nn.Linear(8, 8).weight)
"""
ENGINE = """
import torch, infinity
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
config = {"precision": "fp32", "optimizer": {"type": "AdamW", "lr": 0.1}}
engine, *_ = infinity.initialize(
    model=model, config=config, lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1)
)
engine.backward(engine(torch.randn(2, 4)).sum())
engine.step()
optimizer = engine.optimizer
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
engine.close()
"""
SINGLE_PROCESS = """
import copy, pickle, torch, infinity
parameter = torch.nn.Parameter(torch.zeros(300))
optimizer = infinity.CPUAdam([parameter], lr=0.1)
parameter.grad = torch.ones(300)
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
"""
ASK = "import sys; print('torch._dynamo' in sys.modules)\n"


def test_torch_dynamo_not_imported() -> None:
    """One process runs all programs and checks the modules after each."""
    program = "".join(source + ASK for source in (INIT, ENGINE, SINGLE_PROCESS, RANDOM_ON_META))
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["False"] * 4, done.stderr


@pytest.mark.parametrize("name", ["add_param_group", "state_dict", "load_state_dict", "zero_grad"])
@pytest.mark.parametrize("compiler", [True, False])
def test_optimizer_methods_are_torch_methods(name: str, compiler: bool, monkeypatch) -> None:
    if compiler:
        monkeypatch.setitem(sys.modules, "torch._dynamo", sys)
    else:
        monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    torch_method = getattr(torch.optim.Optimizer, name)
    method = optimizer_method(name)
    assert method is (torch_method if compiler else inspect.unwrap(torch_method))
    assert method.__name__ == name
    assert method.__module__ == "torch.optim.optimizer"
    assert next(iter(inspect.signature(method).parameters)) == "self"


def test_zero_grad_matches_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = infinity.CPUAdam([parameter])
    parameter.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(parameter.grad, torch.zeros(3))
    optimizer.zero_grad()
    assert parameter.grad is None
