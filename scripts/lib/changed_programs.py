"""Which programs of tests differ from those that passed under all sanitizers.

Usage: changed_programs.py ROOT SOURCES RECORD [--write]

SOURCES (build/readers-asan/test_sources.txt) has what each program is built from, as CMake knows it. The headers that
these files include, and what they include, are found here: each `#include` counts, whatever stands around it. So does
the data that a test reads: each file in its folder that is no C++, and each path in quotes that leads to something in
ROOT. What decides how all programs are built and run, COMMON, belongs to each. Lines of C++ that are comments do not
count, but in files with raw strings, in which such a line may be text.

Prints "changed PROGRAM" or "same PROGRAM" for each: the same has the fingerprint of all these files that RECORD has.
--write writes RECORD. It is committed, so that a fresh clone knows, whatever its history and its remotes are.
"""

import hashlib
import pathlib
import re
import sys

COMMON = [
    "CMakeLists.txt", "CMakePresets.json", "cmake", "tests/CMakeLists.txt", "tests/support/source_dir.cpp.in",
    "scripts/sanitize", "scripts/suppressions", "scripts/lib/build.sh", "scripts/lib/test_env.sh",
    "scripts/lib/sanitized.sh", "scripts/lib/changed_programs.py",
]
HEADER = """# Programs of tests without LibTorch that passed under all sanitizers, each with the fingerprint of the files that
# it was built from. `scripts/sanitize readers` leaves them out, and writes a new one of this file.
"""
CPP = {".cpp", ".h", ".inl"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
QUOTED = re.compile(r'"([A-Za-z0-9_./-]+)"')


class Files:
    def __init__(self, root):
        self.root = root
        self.made = (root / "build", root / ".cohort")  # no checkout has them
        self.hashes = {}
        self.mentions = {}

    def is_source(self, path):
        return path.is_relative_to(self.root) and path != self.root and not any(map(path.is_relative_to, self.made))

    def below(self, folder):
        """Files of `folder` and of its folders, without what Python keeps there."""
        return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]

    def mentioned_by(self, path):
        """Files of the project that the C++ file `path` includes, or names in quotes."""
        if path not in self.mentions:
            found = set()
            text = path.read_text(errors="replace")
            for name in INCLUDE.findall(text):
                for folder in (self.root, path.parent):
                    file = (folder / name).resolve()
                    if file.is_file() and self.is_source(file):
                        found.add(file)
            for line in text.splitlines():
                for name in QUOTED.findall(line):
                    # A word alone may be anything, but for where the line says that it is a path.
                    if name.strip("./") and ("/" in name or "source_dir()" in line):
                        file = (self.root / name).resolve()
                        if self.is_source(file):
                            found.update([file] if file.is_file() else self.below(file))
            self.mentions[path] = found
        return self.mentions[path]

    def all_of(self, paths):
        """The files `paths`, and all that those of C++ mention, and what these mention."""
        queue, seen = list(paths), set()
        while queue:
            path = queue.pop()
            if path not in seen:
                seen.add(path)
                if path.suffix in CPP:
                    queue.extend(self.mentioned_by(path))
        return seen

    def content(self, path):
        """What of a file decides what a program does."""
        content = path.read_bytes()
        if path.suffix not in CPP or b'R"' in content:
            return content
        return b"\n".join(line for line in content.split(b"\n") if not line.lstrip().startswith(b"//"))

    def fingerprint(self, paths):
        whole = hashlib.sha256()
        for path in sorted(paths):
            if path not in self.hashes:
                self.hashes[path] = hashlib.sha256(self.content(path)).hexdigest()
            whole.update(f"{path.relative_to(self.root)} {self.hashes[path]}\n".encode())
        return whole.hexdigest()[:32]


def fingerprints(root, sources):
    files = Files(root)
    common = set()
    for name in COMMON:
        path = root / name
        common.update(files.below(path) if path.is_dir() else [path] if path.is_file() else [])
    paths = {}
    for line in sources.read_text().splitlines():
        program, name = line.split("\t")
        path = pathlib.Path(name).resolve()
        if not files.is_source(path):
            continue  # made by CMake: from a declaration, or a file of COMMON
        if path.is_dir():
            paths.setdefault(program, set()).update(p for p in files.below(path) if p.suffix not in CPP)
        else:
            paths.setdefault(program, set()).add(path)
    return {program: files.fingerprint(files.all_of(some) | common) for program, some in paths.items()}


def main():
    root, sources, record = (pathlib.Path(argument).resolve() for argument in sys.argv[1:4])
    now = fingerprints(root, sources)
    if sys.argv[4:] == ["--write"]:
        record.write_text(HEADER + "".join(f"{program} {now[program]}\n" for program in sorted(now)))
        return
    lines = record.read_text().splitlines() if record.is_file() else []
    known = dict(line.split() for line in lines if len(line.split()) == 2)
    for program in sorted(now):
        print("same" if known.get(program) == now[program] else "changed", program)


main()
