"""The worker of recovery.py under torchrun: DDP over Gloo. It keeps the number of steps in a file, and no checkpoint."""

import datetime
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

BATCH = 16


def main():
    path, hidden, timeout = sys.argv[1], int(sys.argv[2]), datetime.timedelta(seconds=int(sys.argv[3]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timeout)
    rank, world = dist.get_rank(), dist.get_world_size()
    events = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(name, *numbers):
        line = " ".join(map(str, (name, time.monotonic_ns(), os.getpid(), *numbers)))
        os.write(events, f"{line}\n".encode())

    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden),
                              torch.nn.ReLU(), torch.nn.Linear(hidden, 10))  # fmt: skip
    net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    x, target = torch.randn(BATCH, 64), torch.arange(BATCH) % 10
    done = pathlib.Path(path + ".steps")
    steps = int(done.read_text() or 0) if done.exists() else 0
    add("enter", int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1, rank, world, steps, 0)
    while True:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), target).backward()
        optimizer.step()
        steps += 1
        if rank == 0:
            done.write_text(str(steps))
            add("commit", steps)


if __name__ == "__main__":
    main()
