"""Writes the corpus of the tar fuzzer: each kind of archive that the reader takes or rejects.

    python tests/golden/fuzz_tar.py tests/fuzz/corpus/tar     # Python 3.11; zstd from the command line
"""
import bz2
import gzip
import io
import lzma
import pathlib
import subprocess
import sys
import tarfile

OUT = pathlib.Path(sys.argv[1])


def header(name, size=0, kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return info


def archive(*entries, form=tarfile.USTAR_FORMAT):
    """Entries are (info, content); a tar file with no more zeros at its end than needed."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=form) as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
        end = tar.offset
    return raw.getvalue()[:end] + bytes(1024)


def file(name, content=b"content"):
    return header(name, len(content)), content


def write(name, content):
    (OUT / name).write_bytes(content)


def with_field(block, start, text):
    """The first header with another field, and the checksum of that."""
    block = bytearray(block)
    block[start:start + len(text)] = text
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    return bytes(block)


OUT.mkdir(parents=True, exist_ok=True)
PLAIN = archive((header("set", kind=tarfile.DIRTYPE), b""), file("set/cat/1.jpg"), file("./set/dog/2.jpg"))
write("plain", PLAIN)
write("gzip", gzip.compress(PLAIN, mtime=0))
write("gzip_members", gzip.compress(PLAIN[:700], mtime=0) + gzip.compress(PLAIN[700:], mtime=0))
write("gzip_twice", gzip.compress(gzip.compress(PLAIN, mtime=0), mtime=0))
write("gzip_cut", gzip.compress(PLAIN, mtime=0)[:-20])
write("bzip2", bz2.compress(PLAIN))
write("xz", lzma.compress(PLAIN))
write("zstd", subprocess.run(["zstd", "-c"], input=PLAIN, stdout=subprocess.PIPE, check=True).stdout)
write("cut", PLAIN[:1100])
write("void", b"")
write("zeros", bytes(1024))
write("no_end", PLAIN[:-1024])
write("junk", b"this is no archive" * 40)
write("pax_names", archive(file("k\u00e4se/\u8336.jpg"), form=tarfile.PAX_FORMAT))
write("gnu_names", archive(file("k\u00e4se/\u8336.jpg"), form=tarfile.GNU_FORMAT))
write("pax_long", archive(file("long/" * 60 + "1.jpg"), form=tarfile.PAX_FORMAT))
write("gnu_long", archive(file("long/" * 60 + "1.jpg"), form=tarfile.GNU_FORMAT))
write("absolute", archive(file("/etc/evil")))
write("leads_out", archive(file("a/../../evil")))
write("dots", archive(file("./././a/./1.jpg"), file("."), file("a//b///2.jpg")))
write("no_name", with_field(archive(file("x")), 0, bytes(1)))
write("symlink", archive((header("a/link", kind=tarfile.SYMTYPE, link="/etc"), b"")))
write("hardlink", archive(file("a/1"), (header("a/2", kind=tarfile.LNKTYPE, link="a/1"), b"")))
write("fifo", archive((header("a/pipe", kind=tarfile.FIFOTYPE), b"")))
write("device", archive((header("a/dev", kind=tarfile.CHRTYPE), b"")))
write("two_of_a_name", archive(file("a/1"), file("a/1", b"other")))
write("huge_size", with_field(archive(file("a/1")), 124, b"\x80" + bytes(3) + b"\x7f" + b"\xff" * 7))
write("negative_size", with_field(archive(file("a/1")), 124, b"\xff" * 12))
write("octal_size", with_field(archive(file("a/1")), 124, b"77777777777\0"))
write("bad_checksum", PLAIN[:100] + b"x" + PLAIN[101:])
write("bomb", gzip.compress(archive(file("a/1", bytes(1 << 21))), mtime=0))
write("many", gzip.compress(archive(*[file(f"a/{i}", b"") for i in range(200)]), mtime=0))
SPARSE = header("a/sparse", 512)
SPARSE.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "a/real",
                      "GNU.sparse.size": "100000", "GNU.sparse.map": "4096,512"}
write("pax_sparse", archive((SPARSE, bytes(512)), form=tarfile.PAX_FORMAT))
HOLE = header("a/sparse", 512)
HOLE.pax_headers = dict(SPARSE.pax_headers, **{"GNU.sparse.size": str(1 << 62),
                                               "GNU.sparse.map": f"{(1 << 62) - 512},512"})
write("pax_hole", archive((HOLE, bytes(512)), form=tarfile.PAX_FORMAT))
OVERRIDE = header("a/1", 7)
OVERRIDE.pax_headers = {"size": "9223372036854775807", "path": "../evil"}
write("pax_overrides", archive((OVERRIDE, b"content"), form=tarfile.PAX_FORMAT))
