"""One stored record: the K and V of one group of one layer, sealed by a footer that says which.

    | payload | zeros | layer u32 | group u32 | nonce u64 | valid u32 | flags u32 | xxh3_64 u64 |

Little-endian; `stride` bytes in all, a multiple of the disk's alignment. The checksum covers every byte
before it, the footer's own fields included, so that a record that was moved, swapped, left over from
another sequence, torn or never written does not verify. The nonce is drawn per file.
"""

import numpy as np
import xxhash

_FOOTER = np.dtype(
    [
        ("layer", "<u4"),
        ("group", "<u4"),
        ("nonce", "<u8"),
        ("valid", "<u4"),  # tokens of the group that were filled in
        ("flags", "<u4"),  # 0 so far
        ("checksum", "<u8"),
    ]
)
FOOTER_BYTES = _FOOTER.itemsize
_CHECKSUM_BYTES = 8


def record_stride(payload_bytes: int, alignment: int) -> int:
    """Bytes from one record to the next: payload and footer, rounded up to `alignment`."""
    return -(-(payload_bytes + FOOTER_BYTES) // alignment) * alignment


def stamp(
    records: np.ndarray,
    payload_bytes: int,
    *,
    layer: int,
    groups: np.ndarray,
    nonces: np.ndarray | int,
    valid: np.ndarray | int,
) -> None:
    """Zero the padding and write the footers of `records` `[n, stride]` uint8, in place.

    `groups` `[n]` says which they are, `valid` how many tokens each holds.
    """
    footers = _footers(records)
    records[:, payload_bytes:-FOOTER_BYTES] = 0
    footers["layer"] = layer
    footers["group"] = groups
    footers["nonce"] = nonces
    footers["valid"] = valid
    footers["flags"] = 0
    footers["checksum"] = _checksums(records)


def damaged(records: np.ndarray, *, layer: int, groups: np.ndarray, nonces: np.ndarray | int) -> np.ndarray:
    """Indices of the `records` `[n, stride]` that are not intact records of just these `groups` `[n]`."""
    footers = _footers(records)
    intact = footers["checksum"] == _checksums(records)
    intact &= footers["layer"] == layer
    intact &= footers["group"] == groups
    intact &= footers["nonce"] == nonces
    intact &= footers["flags"] == 0
    return np.flatnonzero(~intact)


def valid_tokens(records: np.ndarray) -> np.ndarray:
    """How many tokens each of the `records` `[n, stride]` holds, as uint32 `[n]` (a copy)."""
    return _footers(records)["valid"].copy()


def _footers(records: np.ndarray) -> np.ndarray:
    return records[:, -FOOTER_BYTES:].view(_FOOTER)[:, 0]


def _checksums(records: np.ndarray) -> np.ndarray:
    # One C call per record over one contiguous row: 0.6 µs at 6.6 KB, 4 µs at 98 KB (10 and 25 GB/s from
    # L3, against a disk of 1.5).
    digests = map(xxhash.xxh3_64_intdigest, records[:, :-_CHECKSUM_BYTES])
    return np.fromiter(digests, np.uint64, len(records))
