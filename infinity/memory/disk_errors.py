"""Errors of the disk tier: which bytes of the model were lost, where, why, and what to do."""

from __future__ import annotations

import errno
from pathlib import Path

from infinity import _aio
from infinity.errors import DoesNotFitError, InfinityError, MachineError, TransferError

_CAUSES: dict[int, tuple[str, str]] = {
    errno.EIO: (
        "the drive or the file system reports a failure",
        "check `dmesg` and the drive's health (`smartctl -a`)",
    ),
    errno.ENOSPC: ("the file system is full", "free space on that nvme_path, or add another"),
    errno.EDQUOT: ("the disk quota is used up", "raise the quota, or add another nvme_path"),
    errno.EROFS: (
        "the file system became read-only, as file systems do after an error of the drive",
        "check `dmesg`, repair and remount it, and start again from the last saved state",
    ),
    errno.ECANCELED: (
        "the engine was closed while the request was queued",
        "do not use a closed engine",
    ),
    errno.ETIMEDOUT: (
        "the drive hangs, or the network behind the path does",
        "check `dmesg`; close the engine; raise io.stuck_after_s if the drive is only slow",
    ),
}


def transfer_error(error: _aio.AioError, owner: str = "") -> TransferError:
    """Our error for a native one; `owner` says whose bytes they are ("unit 'h.3', chunk 2")."""
    because, remedy = _CAUSES.get(error.errno or 0, (None, "check nvme_path"))
    return TransferError(
        f"{owner}: {error}" if owner else str(error),
        path=str(error.filename),
        offset=error.offset,
        length=error.length,
        errno=error.errno or 0,
        because=because,
        remedy=remedy,
    )


def path_error(error: OSError, path: Path | str) -> InfinityError:
    """Our error for a path that was tried in vain."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free space there, or name a path with more room"
        return DoesNotFitError(f"{path} is full", because=str(error), remedy=remedy)
    if isinstance(error, _aio.AioError):
        return transfer_error(error)
    return MachineError(f"{path} cannot be used", because=str(error))


def corruption(
    owner: str, path: str, offset: int, length: int, found: int, expected: int
) -> TransferError:
    """The error for a page whose checksum is wrong; offset and length are bytes in the file."""
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
