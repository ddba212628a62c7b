"""`deepspeed`, where it is `infinity.deepspeed`: see infinity/integrations/deepspeed/door.py."""

from __future__ import annotations

import sys

import infinity.integrations.deepspeed

sys.modules["deepspeed"] = infinity.integrations.deepspeed  # its modules: infinity.integrations
