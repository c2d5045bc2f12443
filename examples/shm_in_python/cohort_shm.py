"""Makes Cohort's shared memory the backend "shm" of Python's torch.distributed.

    import cohort_shm

    cohort_shm.register(include="PREFIX/include", lib="PREFIX/lib")     # where Cohort is installed
    torch.distributed.init_process_group("shm")

The first call compiles cohort_shm.cpp, about 20 s; later ones find it in torch's cache (a folder in ~/.cache, or
TORCH_EXTENSIONS_DIR). That takes a C++ compiler, ninja and Python's headers: apt-get install g++ ninja-build python3-dev
on Debian and Ubuntu. Cohort must be built with the LibTorch of this Python's torch, or one of the same version:

    cmake --preset release -DLIBTORCH_ROOT=$(python -c "import torch; print(torch.__path__[0])")

main.py beside this file is a whole program. More: docs/shm.md.
"""
import os

import torch.distributed
from torch.utils import cpp_extension

HERE = os.path.dirname(os.path.abspath(__file__))


def load(include, lib):
    """Returns the compiled module: its create(store, rank, size, timeout) makes the backend of a rank."""
    return cpp_extension.load(
        name="cohort_shm_module",
        sources=[os.path.join(HERE, "cohort_shm.cpp")],
        extra_include_paths=[include],
        extra_ldflags=[f"-L{lib}", "-lcohort_shm", f"-Wl,-rpath,{lib}"],
    )


def register(include, lib):
    """torch.distributed knows the backend "shm" afterwards, for tensors on the CPU."""
    torch.distributed.Backend.register_backend("shm", load(include, lib).create, devices=["cpu"])
