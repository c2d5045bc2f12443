"""Makes Cohort's shared memory the backend "shm" of PyTorch's torch.distributed.

    import cohort_shm

    cohort_shm.register(include="PREFIX/include", lib="PREFIX/lib")     # where Cohort is installed
    torch.distributed.init_process_group("shm")

The first call compiles cohort_shm.cpp, about 20 s; later ones find it in torch's cache of extensions (TORCH_EXTENSIONS_DIR, or
a folder in ~/.cache). That takes a C++ compiler and Python's headers: apt-get install g++ python3-dev on Debian and Ubuntu.
Cohort must be built with the LibTorch of this Python's torch, or one of the same version:

    cmake --preset release -DLIBTORCH_ROOT=$(python -c "import torch; print(torch.__path__[0])")

main.py beside this file is a whole program. More: docs/guide/shm.md.
"""
import importlib.util
import os
import subprocess
import sysconfig

import torch.distributed
from torch.utils import cpp_extension

NAME = "cohort_shm_module"
SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cohort_shm.cpp")


def compile_module(include, lib):
    """Returns the path of the module, compiled if that was not done. torch's own way to compile does not work in a folder with
    a space in its path."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder = os.path.join(cache, f"{NAME}-{torch.__version__}-{sysconfig.get_config_var('SOABI')}")
    module = os.path.join(folder, NAME + ".so")
    library = os.path.join(lib, "libcohort_shm.so")
    made_from = [SOURCE, os.path.join(include, "cohort/comm/backends/shm/shm.h"), library]
    if os.path.exists(module) and all(os.path.getmtime(module) > os.path.getmtime(path) for path in made_from):
        return module
    os.makedirs(folder, exist_ok=True)
    temporary = f"{module}.{os.getpid()}"  # several ranks may do this at once
    command = os.environ.get("CXX", "c++").split() + ["-std=c++20", "-shared", "-fPIC", SOURCE, "-o", temporary, "-I", include]
    for path in [*cpp_extension.include_paths(), sysconfig.get_path("include")]:
        command += ["-isystem", path]
    for path in [lib, *cpp_extension.library_paths()]:
        command += ["-L", path, f"-Wl,-rpath,{path}"]
    subprocess.run([*command, "-lcohort_shm", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"], check=True)
    os.replace(temporary, module)
    return module


def load(include, lib):
    """Returns the compiled module: its create(store, rank, size, timeout) makes the backend of a rank."""
    spec = importlib.util.spec_from_file_location(NAME, compile_module(include, lib))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def register(include, lib):
    """torch.distributed knows the backend "shm" afterwards, for tensors on the CPU."""
    torch.distributed.Backend.register_backend("shm", load(include, lib).create, devices=["cpu"])
