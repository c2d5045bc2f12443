"""What rnn.py and resnet50.py share: PyTorch's RPC between processes of this host, and calls of remote modules."""

import os
import tempfile
import warnings

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in the workers
os.environ.setdefault("TP_SOCKET_IFNAME", "lo")

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

TRANSPORTS = {"all": None, "tcp": ["uv"]}


def work(rank, names, transports, folder, train, arguments):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # PyTorch's RPC itself uses what is deprecated
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/store", rpc_timeout=600, _transports=TRANSPORTS[transports]
    )
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if rank == 0:
        train(*arguments)
    rpc.shutdown()


def run(names, transports, train, *arguments):
    """Starts a process for each name. The first calls train(*arguments), the others serve it."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (names, transports, folder, train, arguments), len(names))


def invoke(method, module, arguments):
    return method(module.local_value(), *arguments)


# rref.rpc_async().forward(x) is shorter. But it may send the call from a callback, on a thread without the context of
# distributed autograd. Such a call is not recorded, and its worker is not trained.
def call(module, method, *arguments):
    return rpc.rpc_sync(module.owner(), invoke, (method, module, arguments))


def call_async(module, method, *arguments):
    return rpc.rpc_async(module.owner(), invoke, (method, module, arguments))


def call_remote(module, method, *arguments):
    return rpc.remote(module.owner(), invoke, (method, module, arguments))


def parameters_of(module):
    """References to the parameters of a module that lies here."""
    return [rpc.RRef(parameter) for parameter in module.parameters()]
