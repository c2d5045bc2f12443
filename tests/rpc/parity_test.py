"""Checks docs/reference/rpc_parity.md, which lists each of PyTorch's RPC tests once.

    parity_test.py REPOSITORY TORCH        TORCH: the folder of the installed torch package, which is not imported

Fails where a test of PyTorch's stands in the page not at all or twice, where the page names a test that does not exist, here
or there, and where a count is wrong. If TORCH is not the version that the page is about, what the two versions differ in is
printed and is no failure. The same holds for a LibTorch without Python.
"""
import ast
import collections
import pathlib
import re
import sys

PAGE = "docs/reference/rpc_parity.md"
TESTS_OF_TORCH = "testing/_internal/distributed/rpc"
SHOWN = "Shown here"


def version_of(torch):
    """Returns "2.13.0" of the installed "2.13.0+cpu", or "" where it is not known."""
    file = torch / "version.py"
    found = re.search(r"^__version__ = '([0-9.]+)", file.read_text(), re.MULTILINE) if file.exists() else None
    return found[1] if found else ""


def tests_of_torch(torch):
    """Returns names such as rpc_test.RpcTest.test_add: the methods of each class, without those that it inherits."""
    folder = torch / TESTS_OF_TORCH
    names = []
    for file in sorted(folder.rglob("*.py")):
        module = file.relative_to(folder).with_suffix("").as_posix()
        for cls in ast.parse(file.read_text()).body:
            if isinstance(cls, ast.ClassDef):
                names += [f"{module}.{cls.name}.{method.name}" for method in cls.body
                          if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and method.name.startswith("test_")]
    return names


def tests_here(repository):
    """Returns names such as RRefTest.ValuesAreFetched."""
    names = set()
    for file in (repository / "tests").rglob("*_test.cpp"):
        found = re.findall(r"^TEST(?:_[FP])?\((\w+),\s*(\w+)\)", file.read_text(), re.MULTILINE)
        names.update(f"{suite}.{test}" for suite, test in found)
    return names


class Page:
    """What the page says."""

    def __init__(self, text):
        found = re.search(r"PyTorch ([0-9]+\.[0-9]+\.[0-9]+)", text)
        self.version = found[1] if found else ""
        # The rows of its first table.
        self.counts = {kind: int(count) for kind, count in re.findall(r"^\| ([^|]+) \| ([0-9]+) \|$", text, re.MULTILINE)}
        # CamelCase with a dot: of GoogleTest. Those of PyTorch stand in bullets below their class.
        self.here = set(re.findall(r"`([A-Z]\w*\.[A-Z]\w*)`", text))
        self.torch = []
        self.listed = collections.Counter()
        self.without_a_test = []
        for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
            kind, _, body = section.partition("\n")
            self.listed[kind] = 0
            for behaviour in re.split(r"^### ", body, flags=re.MULTILINE)[1:]:
                if kind == SHOWN and "\nHere: `" not in behaviour:
                    self.without_a_test.append(behaviour.partition("\n")[0])
                for cls, names in re.findall(r"^- `([\w/]+\.\w+)`:((?:\s+`\w+`,?)+)", behaviour, re.MULTILINE):
                    tests = re.findall(r"`(\w+)`", names)
                    self.torch += [f"{cls}.{test}" for test in tests]
                    self.listed[kind] += len(tests)


def errors_of_page(page, here):
    """What is wrong whatever version of PyTorch is installed."""
    errors = [f"{name} stands {count} times, not once" for name, count in collections.Counter(page.torch).items() if count > 1]
    errors += [f"{name} is no test in tests/" for name in sorted(page.here - here)]
    errors += [f"'{behaviour}' is said to be shown, and names no test of Cohort" for behaviour in page.without_a_test]
    expected = {**page.listed, "all": sum(page.listed.values())}
    for kind in sorted(expected.keys() | page.counts.keys()):
        if expected.get(kind) != page.counts.get(kind):
            errors.append(f"the table at the top says {page.counts.get(kind)} for '{kind}', the page lists {expected.get(kind)}")
    return errors


def main(repository, torch):
    repository, torch = pathlib.Path(repository), pathlib.Path(torch)
    page = Page((repository / PAGE).read_text())
    errors = errors_of_page(page, tests_here(repository))
    if not page.version:
        errors.append("the page does not say of which PyTorch it is, as in 'PyTorch 2.13.0'")
    there, version = tests_of_torch(torch), version_of(torch)
    differences = [f"{name} is missing" for name in there if name not in set(page.torch)]
    differences += [f"{name} is no test of PyTorch {version}" for name in sorted(set(page.torch) - set(there))]
    if version == page.version:
        if not there:
            errors.append(f"{torch} is PyTorch {version}, and has no tests in {TESTS_OF_TORCH}")
        errors += differences
    elif not there:
        print(f"note: {torch} has no tests of PyTorch; the page alone was checked")
    else:
        print(f"note: the page is about PyTorch {page.version}, and {torch} is {version}: {len(differences)} differences")
        print("".join(f"note: {difference}\n" for difference in differences), end="")
    if errors:
        print("".join(f"{PAGE}: {error}\n" for error in errors), end="")
        return 1
    print(f"{PAGE}: {len(page.torch)} tests of PyTorch {page.version}, {len(page.here)} of Cohort")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
