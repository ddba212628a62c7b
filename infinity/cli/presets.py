"""Configurations to start from, as text with comments; see `infinity init`."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A configuration by name; `text` makes it."""

    summary: str
    text: Callable[[], str]


_TINY = """\
# A byte-level model of {parameters} parameters, trained from scratch on Python's own source code.
# Any computer, less than a minute: to see all of it work.
#
#   infinity train {{file}}
#   infinity train {{file}} --resume auto # goes on where it was stopped

run_dir: runs/tiny-cpu

model:
  config: # a new model; the keys of a config.json of transformers
    model_type: llama
    hidden_size: 128
    intermediate_size: 352
    num_hidden_layers: 4
    num_attention_heads: 4
    num_key_value_heads: 4
    max_position_embeddings: 256
    tie_word_embeddings: true

tokenizer: bytes # a token is a byte; or a directory with a tokenizer.json

data:
  train: {library} # files, directories, patterns; .txt, .jsonl, .npy, .bin
  held_out: 0.02 # the last part, for evaluation
  sequence_length: 128 # tokens of a window

training:
  steps: 120
  micro_batch: 4 # windows computed at once
  evaluate_every: 60
  evaluate_windows: 16
  checkpoint_every: 60

engine: # everything that infinity.initialize takes
  precision: fp32 # bf16 on a GPU, or a processor with bf16 instructions
  gradient_clipping: 1.0
  optimizer:
    type: AdamW
    lr: 2.0e-3
    betas: [0.9, 0.95]
    weight_decay: 0.1
  scheduler:
    type: WarmupCosineLR
    # auto: training.steps, which must then stay what it is; to go on to more of them later, write
    # the number of all of them here before the run begins
    params: {{ total_num_steps: auto, warmup_num_steps: 10, cos_min_ratio: 0.1 }}
"""

_PRETRAIN = """\
# A GPT-2 of 124M parameters from scratch, on your own text.
# A GPU with 8 GiB, or a patient processor.
#
#   infinity plan {file} --device 8GiB --host 16GiB
#   infinity train {file}

run_dir: runs/pretrain-124m

model:
  config: # a new model; the keys of a config.json of transformers
    model_type: gpt2
    n_layer: 12
    n_head: 12
    n_embd: 768
    n_positions: 1024

tokenizer: gpt2 # a Hub id, or a directory with a tokenizer.json; bytes needs no files

data:
  train: texts/ # files, directories, patterns; .txt, .jsonl, .npy, .bin
  # text_field: text # of a line of JSONL
  held_out: 0.005
  sequence_length: 1024

training:
  steps: 20000
  micro_batch: 4
  tokens_per_step: 262144 # 64 micro-batches of 4 windows
  evaluate_every: 500
  checkpoint_every: 1000
  keep_last: 2
  # tensorboard: true

engine:
  precision: bf16
  optimizer:
    type: AdamW
    lr: 6.0e-4
    betas: [0.9, 0.95]
    weight_decay: 0.1
  scheduler:
    type: WarmupCosineLR
    params: { total_num_steps: auto, warmup_num_steps: 700, cos_min_ratio: 0.1 }
"""

_FINETUNE = """\
# All parameters of a model of {size} fine-tuned with a GPU of 24 GiB, {host} of RAM and {disk} of
# disk space on an NVMe drive.
#
#   infinity plan {{file}} --model {size} --device 24GiB --host {host} --disk {space}
#   infinity train {{file}} model.path=DIR engine.nvme_path=DIR data.train=FILES

run_dir: runs/finetune-{size}

model:
  path: {model} # a directory with config.json and safetensors, or a Hub id
  gradient_checkpointing: true # blocks are computed again in backward: less GPU memory
  # attention: flash_attention_2 # sdpa by default

# tokenizer: auto # the model's own

data:
  train: data/train.jsonl # files, directories, patterns; .txt, .jsonl, .npy, .bin
  text_field: text # of a line of JSONL
  held_out: 0.01 # or evaluate: data/held-out.jsonl
  sequence_length: 2048 # tokens of a window; documents are packed, an end-of-text between them

training:
  epochs: 1 # or steps
  micro_batch: {micro_batch} # windows computed at once: what the GPU's memory allows
  tokens_per_step: {tokens} # a step moves all state once, so large ones cost less each token
  evaluate_every: 50
{checkpoints}
engine:
  precision: bf16 # masters are exact all the same: weight and residual are fp32 together
  nvme_path: {nvme} # a list uses several drives at once
  # homes: {{ weights: host, moments: disk, gradients: host }} # left out, the plan decides
  # budget: {{ host: {budget} }} # a hard limit
{durable}  gradient_clipping: 1.0
  optimizer:
    type: AdamW
    lr: {lr}
    betas: [0.9, 0.95]
    weight_decay: 0.0
    # moments: bf16 # less to move, but lossy
  scheduler:
    type: WarmupCosineLR
    params: {{ total_num_steps: auto, warmup_num_steps: 20, cos_min_ratio: 0.1 }}
"""

_CHECKPOINTS = """\
  checkpoint_every: {every} # {nbytes} each
  keep_last: {keep}
"""

_DURABLE = """\
  durable: true # the state on disk is the checkpoint: a crash loses one step, nothing is copied
"""


def _tiny() -> str:
    library = sysconfig.get_paths()["stdlib"]
    return _TINY.format(parameters="0.8M", library=json.dumps(f"{library}/[a-m]*.py"))


def _finetune(**values: str) -> Callable[[], str]:
    every = values.pop("every", "")
    checkpoints = "" if not every else _CHECKPOINTS.format(
        every=every, nbytes=values.pop("nbytes"), keep=values.pop("keep")
    )  # fmt: skip
    durable = "" if every else _DURABLE
    nvme = "/mnt/nvme"

    def text() -> str:
        return _FINETUNE.format(checkpoints=checkpoints, durable=durable, nvme=nvme, **values)

    return text


PRESETS = {
    "tiny-cpu": Preset("0.8M parameters from scratch, any computer, under a minute", _tiny),
    "pretrain-124m": Preset("GPT-2 of 124M from scratch on your text", lambda: _PRETRAIN),
    "7b-24gb": Preset(
        "fine-tune 7B: GPU 24 GiB, RAM 64 GiB, disk 500 GB",
        _finetune(
            size="7b", host="64GiB", disk="500 GB", space="500GB", micro_batch="2", tokens="65536",
            model="meta-llama/Llama-2-7b-hf", budget="48GiB", lr="1.0e-5",
            every="200", nbytes="80 GB", keep="2",
        ),
    ),
    "13b-24gb": Preset(
        "fine-tune 13B: GPU 24 GiB, RAM 64 GiB, disk 1 TB",
        _finetune(
            size="13b", host="64GiB", disk="1 TB", space="1TB", micro_batch="2", tokens="65536",
            model="meta-llama/Llama-2-13b-hf", budget="48GiB", lr="1.0e-5",
            every="200", nbytes="156 GB", keep="2",
        ),
    ),
    "70b-24gb": Preset(
        "fine-tune 70B: GPU 24 GiB, RAM 64 GiB, disk 4 TB",
        _finetune(
            size="70b", host="64GiB", disk="4 TB", space="4TB", micro_batch="1", tokens="131072",
            model="meta-llama/Llama-2-70b-hf", budget="48GiB", lr="5.0e-6",
        ),
    ),
}  # fmt: skip
