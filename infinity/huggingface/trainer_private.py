"""Everything that `InfinityTrainer` touches of transformers and accelerate that is not public.

A test holds each name, its parameters and where it is called to what is written here, so that
a release that changes one fails there and not in somebody's training.
"""

from __future__ import annotations

from typing import NamedTuple


class Touch(NamedTuple):
    """A private name: its parameters after `self`, who calls it there, and why it is touched."""

    parameters: tuple[str, ...]
    called_by: tuple[str, ...]
    why: str


# Methods of `transformers.Trainer` that are replaced.
REPLACED: dict[str, Touch] = {
    "_build_accelerator_args": Touch(
        ("kwargs",),
        ("create_accelerator_and_postprocess",),
        "no mixed precision, no DeepSpeed and no compilation by accelerate",
    ),
    "_move_model_to_device": Touch(
        ("model", "device"), ("__init__", "train"), "the engine places the model"
    ),
    "_wrap_model": Touch(
        ("model", "training", "dataloader"),
        ("_prepare_for_training", "evaluation_loop"),
        "the model that is called is the engine's",
    ),
    "_prepare_for_training": Touch(
        ("max_steps", "train_dataloader", "resume_from_checkpoint"),
        ("_inner_training_loop",),
        "engine, optimizer, schedule and checkpoint, without accelerator.prepare",
    ),
    "_save": Touch(
        ("output_dir", "state_dict"), ("save_model",), "weights tensor by tensor from their homes"
    ),
    "_save_optimizer_and_scheduler": Touch(
        ("output_dir",), ("_save_checkpoint",), "the engine's checkpoint in the place of both"
    ),
    "_save_rng_state": Touch(("output_dir",), ("_save_checkpoint",), "in that checkpoint too"),
    "_load_rng_state": Touch(("checkpoint",), ("_run_epoch",), "from that checkpoint"),
    "_load_from_checkpoint": Touch(
        ("resume_from_checkpoint", "model"), ("train",), "weights come with that checkpoint"
    ),
    "_load_best_model": Touch((), ("_finalize_training",), "exact weights, to their homes"),
}

# Attributes of `transformers.Trainer` that are set.
SET: dict[str, Touch] = {
    "_created_lr_scheduler": Touch(
        (), ("_prepare_for_training",), "a second train() makes the schedule anew"
    ),
}

# Attributes of `transformers.TrainingArguments` that are set.
SET_OF_ARGUMENTS: dict[str, Touch] = {
    "_n_gpu": Touch((), (), "one GPU is used, however many there are; Trainer sets it so as well"),
}
