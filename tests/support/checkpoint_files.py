"""Small checkpoints of known contents, and forged manifests with valid checksums."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity import _aio
from infinity.checkpoint.manifest import BufferRecord, Manifest, ParameterRecord, TensorSpec
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.writer import CheckpointWriter

SHAPES = {"wte": (40, 16), "h.0.w": (16, 48), "h.0.b": (48,), "scalar": (), "empty": (0, 4)}
MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}


@dataclass
class Sample:
    """Streams of random bytes and their manifest."""

    streams: dict[str, list[TensorSpec]]
    manifest: Manifest
    content: dict[tuple[str, str], Tensor] = field(default_factory=dict)


def sample(
    seed: int = 0,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    moments: tuple[str, ...] = ("fp32", "8bit"),
    global_steps: int = 7,
) -> Sample:
    """Return a bf16 model with `shapes`, a frozen parameter and two buffers, one persistent."""
    parameters = [
        ParameterRecord(
            name, (f"tied.{name}",) if name == "wte" else (), shape, "bfloat16", True, 7
        )
        for name, shape in shapes.items()
    ]
    frozen = ParameterRecord("frozen.w", (), (5, 3), "float32", False, 0)
    buffers = (
        BufferRecord("running", (), (11,), "float32", True),
        BufferRecord("mask", (), (3, 3), "bool", False),
    )
    model = [TensorSpec(name, shape, torch.bfloat16) for name, shape in shapes.items()]
    streams = {
        "model": model,
        "frozen": [TensorSpec("frozen.w", (5, 3), torch.float32)],
        "buffers": [
            TensorSpec("running", (11,), torch.float32),
            TensorSpec("mask", (3, 3), torch.bool),
        ],
        "residual": [spec._replace(dtype=torch.int16) for spec in model],
    }
    for index, name in enumerate(moments, start=1):
        streams[f"moment{index}"] = [spec._replace(dtype=MOMENT_DTYPES[name]) for spec in model]
        if name == "8bit":
            streams[f"moment{index}_scales"] = [
                TensorSpec(s.name, (-(-torch.Size(s.shape).numel() // 128),), torch.float32)
                for s in model
            ]
    manifest = Manifest(
        engine_version="0.1.0",
        global_steps=global_steps,
        precision="bf16",
        rule="AdamW",
        moments=moments,
        parameters=(*parameters, frozen),
        buffers=buffers,
        run={"samples": 3},
        client_state={"note": "größer"},
        config={"precision": "bf16"},
        plan=None,
    )
    generator = torch.Generator().manual_seed(seed)
    result = Sample(streams, manifest)
    for stream, specs in streams.items():
        for spec in specs:
            bound = 2 if spec.dtype is torch.bool else 256
            result.content[stream, spec.name] = torch.randint(
                0, bound, (spec.nbytes,), dtype=torch.uint8, generator=generator
            )
    return result


def feed(writer: CheckpointWriter, source: Sample, piece: int = 1 << 30) -> None:
    """Write all streams, in chunks of at most `piece` bytes."""
    for (stream, _), data in source.content.items():
        for start in range(0, data.numel(), piece):
            writer.write(stream, data[start : start + piece])


def save(root: Path, tag: str, source: Sample, max_shard_bytes: int = 5 << 30, **how: Any) -> Path:
    """Write a complete checkpoint."""
    writer = CheckpointWriter(root, tag, source.streams, max_shard_bytes=max_shard_bytes)
    feed(writer, source)
    return writer.finish(source.manifest, **how)


def content(root: Path, tag: str) -> dict[tuple[str, str], Tensor]:
    """Return all bytes of a checkpoint, by stream and name."""
    contents = {}
    with CheckpointReader(root, tag) as reader:
        for stream in {record.stream for record in reader.manifest.files}:
            for name in reader.names(stream):
                spec = reader.facts(stream, name)
                data = torch.empty(spec.numel * spec.dtype.itemsize, dtype=torch.uint8)
                reader.read_into(stream, name, 0, data)
                contents[stream, name] = data
    return contents


def same_content(one: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def rewrite(manifest: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the members of a manifest and write it with a valid checksum."""
    members = json.loads(manifest.read_text())
    del members["checksum"]
    change(members)
    manifest.write_bytes(sealed(json.dumps(members)[:-1]))


def sealed(body: str) -> bytes:
    """Complete `body`, a JSON object without its closing brace, with its checksum."""
    data = body.encode()
    crc = checksum(data)
    return data + f',\n"checksum": "{crc:08x}"\n}}\n'.encode()


def checksum(data: bytes) -> int:
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return _aio.crc32c(buffer.data_ptr(), buffer.numel())
