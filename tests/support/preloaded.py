"""Modules that the server of `support.forked` imports before it forks: most children need them.

Their objects are never garbage. They are frozen, so that collections of children skip them.
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
