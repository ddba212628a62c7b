"""DeepSpeed's public names, over our engine: `import infinity.deepspeed as deepspeed`.

Every module and name of DeepSpeed's is found by attribute and by import, as `from
infinity.deepspeed.ops.adam import DeepSpeedCPUAdam`; `names.py` says which of them are ours. What
stands behind a name is imported when it is first used. With `infinity.as_deepspeed()`, or under
`infinity run`, they are found as `deepspeed` too.
"""

from __future__ import annotations

from infinity.integrations.deepspeed.names import getter

__getattr__ = getter("")
