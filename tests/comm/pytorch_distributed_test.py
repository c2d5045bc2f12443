"""PyTorch's own tests of torch.distributed, run over the backend "shm".

    pytorch_distributed_test.py sample|all INCLUDE LIB LIBTORCH-VERSION
    pytorch_distributed_test.py list INCLUDE LIB LIBTORCH-VERSION    prints those that pass over gloo, and over shm

The class is torch.testing._internal.distributed.distributed_test, which is in the wheel. pytorch_distributed_tests.txt lists
its tests on the CPU that pass over gloo; those before the empty line are the sample that every build runs.
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

HERE = pathlib.Path(__file__).resolve()
LIST = HERE.with_name("pytorch_distributed_tests.txt")

# The process that runs the tests imports this file again, and finds here what it is to be.
if os.environ.get("BACKEND"):
    sys.path.insert(0, str(HERE.parents[2] / "examples" / "shm_in_python"))
    if os.environ["BACKEND"] == "shm":
        import cohort_shm

        cohort_shm.register(os.environ["COHORT_INCLUDE"], os.environ["COHORT_LIB"])
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import DistTestCases
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    # What PyTorch knows of gloo, tests of shm may ask for too.
    for backends in DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add("shm")

    class TestOverBackend(TestDistBackend, DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            # PyTorch spawns its ranks, each of which imports torch and its tests for 2 s. Forked, a rank has them already:
            # this process has imported them, and has started no thread.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)


def run(names, backend, folders, verbosity=1):
    """Runs tests in a process of their own; those that passed, and whether all of them did."""
    include, lib = folders
    with tempfile.TemporaryDirectory() as scratch:
        environment = dict(
            os.environ,
            BACKEND=backend,
            WORLD_SIZE="2",
            TEMP_DIR=scratch,
            COHORT_INCLUDE=include,
            COHORT_LIB=lib,
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
        )
        command = [sys.executable, str(HERE), "run", str(verbosity), *names]
        process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    passed = [line[len("PASSED ") :] for line in process.stdout.splitlines() if line.startswith("PASSED ")]
    return passed, process


class Named(unittest.TextTestResult):
    def addSuccess(self, test):
        super().addSuccess(test)
        print(f"\nPASSED {test._testMethodName}", flush=True)


def run_here(verbosity, names):
    if not names:
        names = [name for name in dir(TestOverBackend) if name.startswith("test_")]
    suite = unittest.TestSuite(TestOverBackend(name) for name in names)
    result = unittest.TextTestRunner(sys.stdout, verbosity=verbosity, resultclass=Named).run(suite)
    return 0 if result.wasSuccessful() else 1


def main():
    what, *arguments = sys.argv[1:]
    if what == "run":
        return run_here(int(arguments[0]), arguments[1:])
    *folders, version = arguments
    import torch

    if torch.__version__.split("+")[0] != version:
        print(f"Cohort was built with LibTorch {version}, and this Python has torch {torch.__version__}")
        return 1
    if what == "list":
        over_gloo, _ = run([], "gloo", folders)
        over_shm, process = run(over_gloo, "shm", folders)
        print(process.stdout)
        print("\n".join(over_shm))
        print("over gloo alone:", sorted(set(over_gloo) - set(over_shm)))
        return 0
    sample, rest = LIST.read_text().split("\n\n")
    names = sample.split() if what == "sample" else (sample + "\n" + rest).split()
    begun = time.monotonic()
    passed, process = run(names, "shm", folders)
    missing = [name for name in names if name not in passed]
    if missing:
        print(process.stdout)
        print("did not pass:", " ".join(missing))
    print(f"{len(passed)} of {len(names)} of PyTorch's tests pass over shm, in {time.monotonic() - begun:.0f} s")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
