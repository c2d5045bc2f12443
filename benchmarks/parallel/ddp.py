"""The PyTorch peers of overlap.cpp and throughput.cpp: torch's DistributedDataParallel on the same models, batches and threads.

ddp.py throughput mlp|vgg16|resnet50 [ranks=2] [rounds=3] [steps=3] [images=as there]
    over Gloo, in turn with independent processes
ddp.py overlap mlp|vgg16|resnet50 [steps=10] [latency in us=100]
    on the emulated link, rank 0 of 2

Needs torchvision; overlap also a C++ compiler, Python's headers and ninja. glibc is asked to keep memory, as in a tuned
program.
"""

import contextlib
import ctypes
import datetime
import os
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = pathlib.Path(__file__).resolve().parents[2]
SETTLE = 3  # steps until DistributedDataParallel's buckets stay
#        images in throughput, in overlap, their size
SIZES = {"mlp": (64, 256, 32), "vgg16": (32, 8, 64), "resnet50": (16, 4, 128)}


def make_net(name):
    torch.manual_seed(1)
    if name == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 32 * 32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1000)
        )
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from torchvision_models import import_torchvision

    return getattr(import_torchvision().models, name)()


def tune():
    torch.set_num_threads(1)
    libc = ctypes.CDLL("libc.so.6")
    if libc.mallopt(-3, 2**30) != 1:  # M_MMAP_THRESHOLD; some versions take at most 32 MiB
        libc.mallopt(-3, 32 * 2**20)
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


class Workload:
    def __init__(self, name, batch):
        self.net = make_net(name)
        size = SIZES[name][2]
        self.batch = batch
        self.input = torch.rand(batch, 3, size, size)
        self.target = torch.randint(1000, (batch,))

    def loss(self, model):
        return nn.functional.cross_entropy(model(self.input), self.target)


def throughput_rank(rank, name, ranks, rounds, steps, batch, folder):
    tune()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", f"file://{folder}/store", datetime.timedelta(minutes=5), ranks, rank)
    work = Workload(name, batch)
    optimizer = torch.optim.SGD(work.net.parameters(), 1e-4, momentum=0.9, fused=True)
    models = {
        "independent": work.net,
        "DDP": DistributedDataParallel(work.net),
        "DDP, views": DistributedDataParallel(work.net, gradient_as_bucket_view=True),
    }

    def run(model, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            work.loss(model).backward()
            optimizer.step()

    for model in models.values():
        run(model, SETTLE)
    rates = {way: [] for way in models}
    for _ in range(rounds):
        for way, model in models.items():
            dist.barrier()
            begin = time.perf_counter()
            run(model, steps)
            rate = torch.tensor([steps * work.batch / (time.perf_counter() - begin)])
            dist.all_reduce(rate)
            rates[way].append(rate.item())
    if rank == 0:
        print(f"PyTorch: {name}, {ranks} ranks of one thread, {work.batch} images a rank, {rounds} rounds of {steps} steps")
        print(f"{'images/s':20} {'least':>10} {'median':>10} {'best':>10}  to independent (median)")
        alone = statistics.median(rates["independent"])
        for way, list_ in rates.items():
            median = statistics.median(list_)
            print(f"{way:20} {min(list_):10.2f} {median:10.2f} {max(list_):10.2f}  {median / alone:.3f}")
    dist.destroy_process_group()


def throughput(name, ranks=2, rounds=3, steps=3, batch=None):
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        mp.spawn(throughput_rank, (name, ranks, rounds, steps, batch or SIZES[name][0], folder), ranks)


def load_link():
    from torch.utils import cpp_extension

    return cpp_extension.load(
        "slow_link_module",
        [str(pathlib.Path(__file__).with_name("slow_link_module.cpp"))],
        extra_include_paths=[str(ROOT)],
        extra_cflags=["-std=c++20", "-O2"],
    )


def overlap(name, steps=10, latency_us=100):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tune()
    link = load_link()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    latency = latency_us * 1e-6
    link.put_under(dist.group.WORLD, latency, 1e9)
    work = Workload(name, SIZES[name][1])
    models = {"no communication": work.net}

    def turns(count):
        times = {way: [] for way in models}
        backwards = []
        for step in range(SETTLE + count):
            for way, model in models.items():
                begin = time.perf_counter()
                work.net.zero_grad()
                loss = work.loss(model)
                middle = time.perf_counter()
                loss.backward()
                if step >= SETTLE:
                    times[way].append(time.perf_counter() - begin)
                    if model is work.net:
                        backwards.append(time.perf_counter() - middle)
        return times, statistics.median(backwards)

    _, backward = turns(max(3, steps // 2))
    for views in (False, True):
        models["DDP, views" if views else "DDP"] = DistributedDataParallel(
            work.net, init_sync=False, broadcast_buffers=False, gradient_as_bucket_view=views
        )
    total = sum(parameter.nbytes for parameter in work.net.parameters())
    print(f"PyTorch: {name}: {total / 2**20:.1f} MiB; backward {1e3 * backward:.1f} ms, one thread")
    print(f"{'share':>8} {'comm ms':>10}  {'':28} {'min ms':>9} {'median ms':>9} {'max ms':>9} {'hidden':>8}")
    for share in (0.25, 0.5, 1.0):
        communication = share * backward + latency
        link.set_cost(latency, total / (share * backward))
        times, _ = turns(steps)
        compute = statistics.median(times["no communication"])
        for way, list_ in times.items():
            median = statistics.median(list_)
            hidden = (compute + communication - median) / communication
            figures = f"{1e3 * min(list_):9.1f} {1e3 * median:9.1f} {1e3 * max(list_):9.1f} {100 * hidden:7.1f}%"
            print(f"{100 * share:7.0f}% {1e3 * communication:10.1f}  {way:28} {figures}", flush=True)
    with contextlib.suppress(RuntimeError):  # the fake backend may not know how to end
        dist.destroy_process_group()


if __name__ == "__main__":
    {"throughput": throughput, "overlap": overlap}[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))
