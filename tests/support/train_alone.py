"""Trains the small model in a process of its own.

`python -m support.train_alone PATH STEPS [JSON]` prints "ready" and the drives when the state is
written, then one line of JSON per step, then the digest of the masters. JSON holds more settings.
With STEPS = 0 it trains until it is killed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import count
from pathlib import Path

import torch
from support import rough
from support.small import masters, settings, small_model, train
from torch import Tensor


def digest(state: dict[str, Tensor]) -> str:
    """A text that differs when any bit of the state does."""
    whole = hashlib.sha256()
    for name, value in sorted(state.items()):
        whole.update(name.encode())
        whole.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def main() -> None:
    path, steps = Path(sys.argv[1]), int(sys.argv[2])
    more = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    torch.set_num_threads(1)
    engine, *_ = rough.initialize(small_model(), settings(path, **more), poison=None)
    with engine:
        print("ready", json.dumps(engine.drives()), flush=True)
        for index in range(steps) if steps else count():
            (loss,) = train(engine, 1, first=index)
            print(json.dumps({"step": index, "loss": loss}), flush=True)
        print(digest(masters(engine)), flush=True)


if __name__ == "__main__":
    main()
