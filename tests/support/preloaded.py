"""What the server of `support.forked` imports before it forks: what most children need.

Objects of these imports are never garbage. They are frozen, so that no child looks through them.
"""

# ruff: noqa: F401
from __future__ import annotations

import gc

import support.durable
import support.free_ram

import infinity._initialize
import infinity.integrations.deepspeed.arguments
import infinity.training.checkpoints

gc.collect()
gc.freeze()
