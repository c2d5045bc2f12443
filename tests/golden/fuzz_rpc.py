"""Writes the seed corpus of the fuzzer of messages between workers.

    python tests/golden/fuzz_rpc.py tests/fuzz/corpus/rpc

A seed is what rpc_fuzzer.cpp says: payloads, and a header as cohort/rpc/internal/wire.cpp writes it.
"""
import pathlib
import struct
import sys

UINT8, INT64, HALF, FLOAT, BOOL = 0, 4, 5, 6, 11  # at::ScalarType
GRAD, SPARSE, COALESCED = 1, 2, 4
CALL, MAKE, RESULT, ERROR, CANCEL, REFERENCE, CONTEXT_ENDS, LEAVING = range(1, 9)
OPTIONS, STATE, TREE = 32, 33, 34
MEMBERS = b"\0"  # before those of a struct or tuple
NONE, SOME = b"\0", b"\1"


def count(value):
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def text(value):
    return count(len(value)) + value


def numbers(form, *values):
    return struct.pack(f"<{len(values)}{form}", *values)


def tensor(dtype, flags, sizes, sparse=()):
    return bytes([dtype, flags]) + count(len(sizes)) + b"".join(map(count, sizes)) + b"".join(map(count, sparse))


def wire(body, tensors=(), payloads=(), references=()):
    head = bytes([len(payloads)]) + bytes(map(len, payloads)) + b"".join(payloads)
    return head + count(len(references)) + b"".join(references) + count(len(tensors)) + b"".join(tensors) + body


def message(kind, body=b"", **tables):
    return wire(bytes([kind]) + numbers("Q", 17) + body, **tables)


def call(arguments, state, place=NONE, make=b""):
    return text(b"embed") + numbers("q", 10**9) + make + place + state + arguments


no_state = MEMBERS + b"\1" + count(0) + NONE
full_state = MEMBERS + b"\0" + count(1) + MEMBERS + bytes([0, 15]) + SOME + numbers("Q", 42)  # bfloat16 on the CPU
place = SOME + MEMBERS + MEMBERS + numbers("i", 1) + numbers("Q", 5) + count(2) + numbers("I", 0, 3)
array = MEMBERS + (MEMBERS + numbers("f", 1.5) + b"\7") * 2
no_arguments = MEMBERS + count(0) + count(0) + b"\0" + MEMBERS + array + NONE + count(0)
arguments = (MEMBERS + count(2) + count(2) + numbers("h", 1, -1) + count(0) + count(1) + text(b"lr") + SOME
             + numbers("d", 0.1) + b"\2" + text(b"name") + array + SOME + SOME + count(2) + SOME + NONE)
two_floats = dict(tensors=[tensor(FLOAT, GRAD, [2, 2]), tensor(FLOAT, 0, [2])],
                  payloads=[numbers("f", 1, 2, 3, 4), numbers("f", 5, 6)])


def coo(flags, sizes, indices, values, sparse, dtype=FLOAT):
    return dict(tensors=[tensor(dtype, SPARSE | flags, sizes, sparse)],
                payloads=[numbers("q", *indices), numbers("f", *values)])


reference = numbers("i", 0) + numbers("Q", 1) + numbers("i", 0) + numbers("i", 2) + numbers("Q", 1)


def about_fork(sender, kind, object_number, maker, fork):
    return (bytes([sender, kind]) + numbers("i", 0) + numbers("Q", object_number) + numbers("i", maker)
            + numbers("Q", fork))


huge = count((1 << 62) - 1)
files = {
    "call": message(CALL, call(arguments, full_state, place), **two_floats),
    "make": message(MAKE, call(no_arguments, no_state, make=numbers("Q", 1, 2) + text(b"a.cpp:7"))),
    "result": message(RESULT, arguments, **two_floats),
    "error": message(ERROR, MEMBERS + text(b"DataError") + text(b"a file is cut off")),
    "error_of_libtorch": message(ERROR, MEMBERS + text(b"c10::IndexError") + text(b"out of range")),
    "unknown_error": message(ERROR, MEMBERS + text(b"user::Error") + text(b"?")),
    "cancel": message(CANCEL),
    "references": message(REFERENCE, about_fork(1, 0, 1, 2, 1) + about_fork(0, 1, 1, 0, 2) + about_fork(1, 3, 1, 0, 4)
                          + about_fork(1, 4, 1, 0, 1) + about_fork(0, 2, 1, 0, 3), references=[reference]),
    "no_such_reference": message(REFERENCE, about_fork(1, 5, 1, 2, 1)),
    "context_ends": message(CONTEXT_ENDS, MEMBERS + numbers("i", 2) + numbers("Q", 9)),
    "leaving": message(LEAVING, NONE + (SOME + MEMBERS + (count(3) + numbers("Q", 0, 4, 1)) * 2) * 2),
    "leaving_of_another_job": message(LEAVING, SOME + MEMBERS + (count(2) + numbers("Q", 0, 4)) * 2),
    "bad_autocast": message(CALL, call(no_arguments, MEMBERS + b"\1" + count(1) + MEMBERS + bytes([99, 6]) + NONE)),
    "sparse": message(RESULT, no_arguments, **coo(COALESCED, [3, 2], [0, 2], [1, 2, 3, 4], [1, 2])),
    "not_in_order": message(RESULT, no_arguments, **coo(COALESCED, [3], [2, 0, 2], [1, 2, 3], [1, 3])),
    "sparse_of_all_dimensions": message(RESULT, no_arguments, **coo(GRAD, [3, 4], [0, 2, 1, 3], [1, 2], [2, 2])),
    "sparse_of_none": message(RESULT, no_arguments, **coo(0, [2], [], [1, 2], [0, 1])),
    "index_outside": message(RESULT, no_arguments, **coo(0, [3], [0, 3], [1, 2], [1, 2])),
    "sparse_huge": message(RESULT, no_arguments, **coo(0, [1 << 31, 1 << 31], [5, 6], [1], [2, 1])),
    "empty_and_huge": message(RESULT, no_arguments, tensors=[tensor(FLOAT, 0, [0, 1 << 40])], payloads=[b""]),
    "overflow": message(RESULT, no_arguments, tensors=[tensor(FLOAT, 0, [1 << 32, 1 << 32])], payloads=[b""]),
    "short_payload": message(RESULT, no_arguments, tensors=[tensor(INT64, 0, [2])], payloads=[bytes(15)]),
    "more_payloads": message(RESULT, no_arguments, payloads=[b"x", b"y"]),
    "bool_and_half": message(RESULT, no_arguments, tensors=[tensor(BOOL, 0, [3]), tensor(HALF, GRAD, []), tensor(UINT8, 0, [1])],
                             payloads=[b"\0\1\2", b"\0\x3c", b"u"]),
    "whole_numbers_with_grad": message(RESULT, no_arguments, tensors=[tensor(INT64, GRAD, [1])], payloads=[bytes(8)]),
    "quantized": message(RESULT, no_arguments, tensors=[tensor(12, 0, [1])], payloads=[b"q"]),
    "many_elements": message(RESULT, MEMBERS + huge),
    "many_tensors": bytes([0]) + count(0) + huge,
    "options": message(OPTIONS, MEMBERS + text(b"sgd") + (SOME + numbers("d", 0.1)) + NONE * 3 + SOME + b"\1" + NONE * 5
                       + count(1) + text(b"foreach") + text(b"no")),
    "state": message(STATE, MEMBERS + count(1) + text(b"momentum") + SOME + count(1) + text(b"step") + numbers("d", 3),
                     tensors=[tensor(FLOAT, 0, [1])], payloads=[numbers("f", 1)]),
    "tree": message(TREE, (MEMBERS + numbers("i", 1) + count(0) + SOME) * 3 + MEMBERS + numbers("i", 2) + count(0) + NONE),
    "deep_tree": message(TREE, (MEMBERS + numbers("i", 1) + count(1)) * 210),
}
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name, content in files.items():
    (folder / name).write_bytes(content)
