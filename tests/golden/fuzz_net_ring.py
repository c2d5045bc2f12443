"""Writes the seed corpus of the fuzzer of rings in shared memory.

    python tests/golden/fuzz_net_ring.py tests/fuzz/corpus/net_ring

A seed is a byte (odd: bytes of the ring change while they are read), then commands of net_ring_fuzzer.cpp.
"""
import pathlib
import struct
import sys

READ, WRITE, PEER_READS, SLEEP, DROP = bytes([1]), bytes([2]), bytes([3]), bytes([9]), bytes([11])
ANSWERS = 1 << 31


def frame(kind, message, body=b"", acknowledged=0, released=0):
    return struct.pack("<IIQQQ", len(body), kind, message, acknowledged, released) + body


def begin(message, parts, channel=3):
    table = struct.pack(f"<II{len(parts)}Q", channel, len(parts), *map(len, parts))
    return frame(1, message, table + b"".join(parts))


def put(data):
    return b"".join(bytes([0, len(data[i:i + 200])]) + data[i:i + 200] + READ for i in range(0, len(data), 200))


def counter(command, value):
    return bytes([command]) + struct.pack("<Q", value)


message = begin(1, [b"hello", b"payload" * 3])
files = {
    "message": bytes([0]) + put(message) + DROP + WRITE,
    "bytes_change": bytes([1]) + put(begin(1, [b"head", b"p" * 90, b"q" * 20])),
    "wraps": bytes([0]) + b"".join(put(begin(i, [b"x" * 120], ANSWERS)) + DROP for i in range(1, 9)),
    "acknowledges": bytes([0]) + WRITE + PEER_READS + WRITE + put(frame(3, 0, acknowledged=1)) + SLEEP,
    "more_than_the_ring": bytes([0]) + counter(4, 513) + READ,
    "goes_back": bytes([0]) + put(message) + counter(4, 3) + READ,
    "reads_what_was_not_written": bytes([0]) + WRITE + counter(5, 1 << 40) + WRITE,
    "reads_backwards": bytes([0]) + WRITE + PEER_READS + counter(5, 1) + WRITE + SLEEP,
    "own_counter": bytes([0]) + counter(6, (1 << 64) - 1) + WRITE + PEER_READS,
    "flags": bytes([0]) + bytes([7, 6, 7, 7]) + put(message) + WRITE + SLEEP,
    "overwrites": bytes([0, 8, 4, 0, 4]) + b"\xff" * 4 + put(message) + bytes([8, 0, 0, 40]) + bytes(40) + counter(4, 300) + READ,
    "silence": bytes([0]) + put(message) + bytes([10, 255]) * 9 + WRITE,
}
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name, content in files.items():
    (folder / name).write_bytes(content)
