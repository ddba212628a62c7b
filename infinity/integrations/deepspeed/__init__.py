"""DeepSpeed's API over infinity's engine: `import infinity.deepspeed as deepspeed`.

Every module and name of DeepSpeed is available by attribute and by import, as in `from
infinity.deepspeed.ops.adam import DeepSpeedCPUAdam`; `names.py` lists those that are implemented.
Implementations are imported on first use. With `infinity.as_deepspeed()`, or under `infinity run`,
`import deepspeed` imports this package.
"""

from __future__ import annotations

from infinity.integrations.deepspeed.names import getter

__getattr__ = getter("")
