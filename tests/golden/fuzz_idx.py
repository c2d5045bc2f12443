"""Writes the seed corpus of the IDX fuzzer.

    python tests/golden/fuzz_idx.py tests/fuzz/corpus/idx
"""
import gzip
import pathlib
import struct
import sys


def idx(code, shape, body):
    return bytes([0, 0, code, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + body


files = {
    "images": idx(8, [2, 2, 3], bytes(range(12))),
    "labels": idx(8, [3], b"\x00\x09\x05"),
    "int16": idx(0x0B, [2], b"\x01\x02\xff\xfe"),
    "float64": idx(0x0E, [1], struct.pack(">d", 1.5)),
    "empty_dimension": idx(8, [0, 28, 28], b""),
    "eight_dimensions": idx(8, [1] * 8, b"x"),
    "wrong_magic": b"\x89PNG\r\n\x1a\n",
    "short_body": idx(8, [4], b"abc"),
    "over_long": idx(8, [2], b"abc"),
    "absurd": idx(0x0E, [0xFFFFFFFF] * 3, b""),
    "short_header": idx(8, [4, 4], b"")[:9],
    "void": b"",
}
for name in ("images", "short_body", "over_long", "absurd"):
    files[name + "_gz"] = gzip.compress(files[name], mtime=0)
files["cut_gz"] = files["images_gz"][:-12]
files["flipped_gz"] = files["images_gz"][:-5] + bytes([files["images_gz"][-5] ^ 1]) + files["images_gz"][-4:]
files["two_members_gz"] = gzip.compress(files["images"][:10], mtime=0) + gzip.compress(files["images"][10:], mtime=0)
files["junk_behind_gz"] = files["images_gz"] + b"junk"
folder = pathlib.Path(sys.argv[1])
for name, content in files.items():
    (folder / name).write_bytes(content)
