"""PyTorch's DistributedDataParallel on two ranks over Gloo, compared with what Cohort's made of the same start.

train_ddp.py FOLDER    FOLDER has start.safetensors, samples.safetensors and, of each rank of ours, rankN.safetensors
"""
import datetime
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def make_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 10),
    )  # fmt: skip


def train(rank, folder):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, RANKS, rank)
    net = make_net()
    net.load_state_dict(load_file(f"{folder}/start.safetensors"))
    samples = load_file(f"{folder}/samples.safetensors")
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=1e-3, foreach=False, fused=False)
    losses = []
    for inputs, targets in zip(samples["inputs"], samples["targets"]):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[rank].clone()), targets[rank])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    # PyTorch gives all ranks rank 0's buffers before a forward, Cohort by the end of a backward.
    model.eval()
    with torch.no_grad():
        model(samples["inputs"][0][rank])
    want = dict(net.state_dict(), losses=torch.stack(losses))
    ours = load_file(f"{folder}/rank{rank}.safetensors")
    assert want.keys() == ours.keys(), want.keys() ^ ours.keys()
    for name, tensor in want.items():
        worst = (tensor.double() - ours[name].double()).abs().max().item()
        assert torch.equal(tensor, ours[name]), f"rank {rank}: {name} differs by up to {worst}"
    leave_together(rank, RANKS, folder)


def leave_together(rank, ranks, folder):
    """Ends this process once every rank compared, and without LibTorch's destructors.

    On a loaded machine some runs aborted in them, after all had been compared: "terminate called without an active
    exception".
    """
    pathlib.Path(folder, f"compared{rank}").touch()
    deadline = time.monotonic() + 60
    while not all(pathlib.Path(folder, f"compared{other}").exists() for other in range(ranks)):
        assert time.monotonic() < deadline, f"rank {rank}: the other ranks did not end within 60 s"
        time.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Forked, a rank has torch already. Importing it starts no thread.
    mp.start_processes(train, (sys.argv[1],), RANKS, start_method="fork")
