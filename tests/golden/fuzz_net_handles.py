"""Writes the seeds with handles for the fuzzer of sessions.

    python tests/golden/fuzz_net_handles.py tests/fuzz/corpus/net

A seed is the byte 4 (a session with heaps), then pieces of 254 bytes, each after a byte that says so: see net_fuzzer.cpp.
"""
import pathlib
import struct
import sys

BY_HANDLE = 1 << 63
SIZE = 64 * 1024
HEADER_BYTES = 8192 * 8  # of a heap: its blocks come after them
MAPPED = 5


def frame(kind, message, body=b""):
    return struct.pack("<IIQQQ", len(body), kind, message, 0, 0) + body


def handle(ticket=4, offset=HEADER_BYTES, slot=1, whose=0):
    return struct.pack("<QQII", ticket, offset, slot, whose)


def begin(message, sizes, data):
    return frame(1, message, struct.pack(f"<II{len(sizes)}Q", 3, len(sizes), *sizes) + data)


def pieces(data):
    return bytes([4]) + b"".join(bytes([45]) + data[i:i + 254] for i in range(0, len(data), 254))


comes = begin(1, [2, SIZE | BY_HANDLE], b"hi" + handle())
files = {
    "handle": frame(MAPPED, 0) + comes,
    "handle_sent_back": begin(1, [0, SIZE | BY_HANDLE], handle(slot=0, whose=1)),
    "handle_twice": comes + begin(2, [0, SIZE | BY_HANDLE], handle()),
    "handle_beside_bytes": begin(1, [1, 3, SIZE | BY_HANDLE, 4], b"habc" + handle() + b"defg"),
    "handle_outside": begin(1, [0, (1 << 40) | BY_HANDLE], handle()),
    "handle_before_the_blocks": begin(1, [0, 100 | BY_HANDLE], handle(offset=8)),
    "handle_of_no_slot": begin(1, [0, 100 | BY_HANDLE], handle(slot=8192)),
    "handle_of_another_time": begin(1, [0, 100 | BY_HANDLE], handle(ticket=8)),
    "handle_of_nobody": begin(1, [0, 100 | BY_HANDLE], handle(whose=7)),
    "handle_of_the_header": begin(1, [100 | BY_HANDLE], handle()),
    "handle_cut_off": begin(1, [0, 100 | BY_HANDLE], handle()[:10]),
}
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name, content in files.items():
    (folder / name).write_bytes(pieces(content))
