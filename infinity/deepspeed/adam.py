"""`CPUAdam` and `FusedAdam` under DeepSpeed's names, with its order of arguments and defaults."""

from __future__ import annotations

from typing import Any

from infinity.optim import standalone


class DeepSpeedCPUAdam(standalone.CPUAdam):
    """`infinity.CPUAdam`; weight decay starts from 0.

    In `initialize(optimizer=...)` it means the built-in rule with these settings;
    `fp32_optimizer_states=False` (moments in bf16) is for there only.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adamw_mode=adamw_mode,
            bias_correction=bias_correction,
            moments="fp32" if fp32_optimizer_states else "bf16",
        )


class FusedAdam(standalone.FusedAdam):
    """`infinity.FusedAdam`; as `DeepSpeedCPUAdam`. `set_grad_none` changes nothing."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adamw_mode=adam_w_mode,
            bias_correction=bias_correction,
        )
