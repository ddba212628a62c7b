"""Errors of the disk tier: affected bytes of the model, location, cause and remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import infinity._aio as _aio
from infinity.common.files import advice, refused, transfer_refused
from infinity.common.sizes import format_size
from infinity.errors import DoesNotFitError, InfinityError, MachineError, TransferError


def does_not_fit(required_bytes: int, free_bytes: Mapping[Path, int]) -> DoesNotFitError:
    """Return the error for a state larger than the free bytes at all paths together."""
    missing_text = format_size(required_bytes - sum(free_bytes.values()))
    free_text = ", ".join(
        f"{format_size(free)} free at {path}" for path, free in free_bytes.items()
    )
    return DoesNotFitError(
        f"disk: {format_size(required_bytes)} needed, {free_text}, {missing_text} missing",
        because="the state of this run is reserved there before training starts",
        remedy=f"free {missing_text} there, choose another nvme_path or add one, or keep more in "
        "host RAM",
    )


def checked_root(nvme_path: str | os.PathLike[str]) -> Path:
    """Return `nvme_path` as an absolute path; raises `MachineError` if it is not a directory."""
    root = Path(nvme_path).expanduser().absolute()
    try:
        is_directory = root.is_dir()
        exists = is_directory or os.path.lexists(root)
    except OSError as error:
        raise refusal(root, error) from error
    if is_directory:
        return root
    if exists:
        because = "it is a file or a broken link"
        remedy = "give nvme_path a directory on a fast drive"
        raise MachineError(f"nvme_path {root} is not a directory", because=because, remedy=remedy)
    raise MachineError(f"nvme_path {root} does not exist", remedy=f"mkdir -p {root}")


def refusal(root: Path, error: OSError) -> InfinityError:
    """Return the error for an `nvme_path` that cannot be used."""
    return refused(f"nvme_path {root} cannot be used", error, root)


def transfer_error(error: _aio.AioError, owner: str = "") -> TransferError:
    """Convert a native error; `owner` names the bytes ("unit 'h.3', chunk 2")."""
    _, remedy = advice(error)
    what = f"{owner}: {error}" if owner else str(error)
    return transfer_refused(what, error, remedy=remedy or "check nvme_path")


def corruption(
    owner: str, path: str, offset: int, length: int, found: int, expected: int
) -> TransferError:
    """Return the error for a page with a wrong checksum; `offset` and `length` in bytes."""
    return TransferError(
        f"{owner}: the {length} bytes read at offset {offset} of {path!r} are not the bytes "
        f"written: their CRC32C is {found:#010x}, not {expected:#010x}",
        path=path,
        offset=offset,
        length=length,
        errno=errno.EBADMSG,
        because="the drive, its cable, its controller or the RAM changed them, a write was lost, "
        "or another program wrote to the file",
        remedy="check `smartctl -a` and `dmesg`, test the RAM, and start again from the last saved "
        "state",
    )
