"""Write the corpus of valid, damaged and hostile frames of wire format 1.

    uv run tests/rl_protocol/scenarios/make_wire_corpus.py

It writes to tests/rl_protocol/scenarios/wire_corpus. Run it only to add frames. The prefix of a
file name says what a reader must do: with `ok-` read the frame, with `bad-` raise WireError, with
`any-` either.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np

from rl_protocol import BatchData, ObjectColumn, dense, pack_arrays, ragged, wire

FOLDER = Path(__file__).with_name("wire_corpus")
HUGE = 2**62


def batches() -> dict[str, BatchData]:
    """Return batches that together contain every kind of column."""
    rng = np.random.default_rng(1)
    images = [[rng.integers(0, 256, (2, 3, 3), dtype=np.uint8)], []]
    return {
        "empty": BatchData({}),
        "rows-without-columns": BatchData({}, 3),
        "no-rows": BatchData({"x": dense(np.zeros((0, 2), np.float32)), "r": ragged([], "int8")}),
        "tokens": BatchData(
            {
                "responses": ragged([[5, 6, 7], [8]], "int64"),
                "response_mask": ragged([[1, 0, 1], [1]], "bool"),
                "log_probs": ragged([np.array([16256, 0, 1], np.uint16), np.array([2], np.uint16)], "bfloat16"),
                "score": dense([1.0, 0.0]),
                "note": ObjectColumn.from_values(["good", {"why": None}]),
            }
        ),
        "positions": BatchData({"p": ragged([np.arange(6).reshape(3, 2), np.zeros((3, 0), np.int64)], "int64", 1)}),
        "images": BatchData(dict(pack_arrays("images", images, ndim=3))),
        "without-bytes": BatchData({"x": dense(np.zeros((2, 0, 4), np.int8)), "r": ragged([[], []], "uint8")}),
    }


def frame(header: object, payload: bytes = b"") -> bytes:
    """Return a frame with this header, valid or not."""
    packed = msgspec.msgpack.encode(header)
    head = wire.MAGIC + len(packed).to_bytes(4, "little") + packed
    return head.ljust(wire.aligned(len(head)), b"\0") + payload


def hostile() -> dict[str, bytes]:
    """Return frames whose headers describe data that they do not contain."""
    numbers = np.arange(8).tobytes()
    one = ["a", "dense", "int8", [], [[0, 1]], 0]
    return {
        "magic-2": b"RLB2" + bytes(60),
        "nothing": b"",
        "header-of-4-gib": wire.MAGIC + b"\xff\xff\xff\xff",
        "rows-2-to-62": frame([HUGE, 0, []]),
        "rows-2-to-31-of-nothing": frame([2**31, 0, [["a", "dense", "int8", [0], [[0, 0]], 0]]]),
        "payload-2-to-62": frame([1, HUGE, []]),
        "array-of-2-to-32-columns": wire.MAGIC + (8).to_bytes(4, "little") + b"\x93\x01\x00\xdd\xff\xff\xff\xff",
        "dims-2-to-62": frame([1, 64, [["a", "dense", "int8", [HUGE], [[0, 1]], 0]]], bytes(64)),
        "dims-overflow": frame([1, 64, [["a", "dense", "int8", [2**32, 2**32], [[0, 1]], 0]]], bytes(64)),
        "seventy-dims": frame([1, 0, [["a", "dense", "int8", [0] * 70, [[0, 0]], 0]]]),
        "buffer-past-the-end": frame([1, 64, [["a", "dense", "int8", [], [[64, 1]], 0]]], bytes(64)),
        "buffer-before-the-start": frame([1, 64, [["a", "dense", "int8", [], [[-64, 1]], 0]]], bytes(64)),
        "buffer-size-negative": frame([1, 64, [["a", "dense", "int8", [], [[0, -1]], 0]]], bytes(64)),
        "buffers-overlap": frame([1, 64, [one, [*["b"], *one[1:]]]], bytes(64)),
        "a-name-twice": frame([1, 128, [one, ["a", "dense", "int8", [], [[64, 1]], 0]]], bytes(128)),
        "offsets-fall": frame([2, 128, [["a", "ragged", "int8", [], [[0, 3], [64, 24]], 0]]], bytes(64) + numbers),
        "offsets-too-few": frame([9, 128, [["a", "object", "object", [], [[0, 0], [64, 8]], 0]]], bytes(128)),
        "offsets-2-to-62-of-empty-elements": frame(
            [1, 64, [["a", "ragged", "int8", [0], [[0, 0], [64, 16]], 0]]],
            np.array([0, HUGE]).tobytes().ljust(64, b"\0"),
        ),
        "an-object-column-of-ints": frame([0, 64, [["a", "object", "int8", [], [[0, 0], [0, 8]], 0]]], bytes(64)),
        "kind-pickle": frame([1, 64, [["a", "pickle", "object", [], [[0, 1]], 0]]], bytes(64)),
        "element-type-object": frame([1, 64, [["a", "dense", "object", [], [[0, 1]], 0]]], bytes(64)),
        "ragged-dim-9": frame([0, 64, [["a", "ragged", "int8", [], [[0, 0], [0, 8]], 9]]], bytes(64)),
        "header-is-a-map": frame({"rows": 1}),
        "header-nests": wire.MAGIC + (1900).to_bytes(4, "little") + b"\x91" * 1900,
    }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    dice = random.Random(7)
    for name, batch in batches().items():
        whole = b"".join(wire.encode(batch))
        (FOLDER / f"ok-{name}.bin").write_bytes(whole)
        for cut in sorted({dice.randrange(len(whole)) for _ in range(2)}):
            (FOLDER / f"bad-{name}-cut-at-{cut}.bin").write_bytes(whole[:cut])
        for number in range(3):
            flipped = bytearray(whole)
            for _ in range(number + 1):
                flipped[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
            (FOLDER / f"any-{name}-flipped-{number}.bin").write_bytes(flipped)
    for name, raw in hostile().items():
        (FOLDER / f"bad-{name}.bin").write_bytes(raw)


if __name__ == "__main__":
    main()
