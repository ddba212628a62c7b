"""Alias of `infinity.deepspeed`; see infinity/integrations/deepspeed/door.py."""

from __future__ import annotations

import sys

import infinity.integrations.deepspeed

sys.modules["deepspeed"] = infinity.integrations.deepspeed  # submodules: see infinity.integrations
