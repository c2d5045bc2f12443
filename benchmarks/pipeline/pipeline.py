"""The PyTorch peers of examples/pipeline_resnet50: ResNet-50, squared error, two cores.

pipeline.py [--images 120] [--size 128] [--micro-batch 20] [--repeats 2] [--turns 1] [--allocator tuned|default]
            [--beside BUILD/.../pipeline_resnet50]

One process with one thread and with two; micro-batches through two halves in the order of the tutorial on pipelined ResNet-50
(on CPU nothing of it overlaps); two threads that run a replica each; torch.distributed.pipelining over Gloo, two processes of
one thread. Seconds per batch, the mean, without the first batch. Needs torchvision. glibc's allocator is told to keep its
memory, as Cohort does, unless --allocator default: then PyTorch runs as it comes.

With --beside, Cohort's example runs in every turn too, and the table says how much faster each of its two pipelines is than
each row: the median over turns of ratios within a turn.
"""

import argparse
import contextlib
import ctypes
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLASSES = 1000


def resnet50():
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from torchvision_models import import_torchvision

    torch.manual_seed(1)
    return import_torchvision().models.resnet50()


def halves(net):
    """The published cut: conv1 to layer2, layer3 to fc."""
    first = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2)
    second = nn.Sequential(net.layer3, net.layer4, net.avgpool, nn.Flatten(), net.fc)
    return first, second


def prepare(given, threads):
    """Sets the threads, and has glibc keep its memory, as memory::tune_allocator() asks it to."""
    torch.set_num_threads(threads)
    if given.allocator == "default":
        return
    libc = ctypes.CDLL("libc.so.6")
    if libc.mallopt(-3, 2**30) != 1:  # M_MMAP_THRESHOLD; some versions take at most 32 MiB
        libc.mallopt(-3, 32 * 2**20)
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def batch(given):
    torch.manual_seed(2)
    labels = torch.nn.functional.one_hot(torch.randint(CLASSES, (given.images,)), CLASSES).float()
    return torch.randn(given.images, 3, given.size, given.size), labels


def seconds(step, repeats):
    step()  # memory comes, and shapes are exchanged
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - begin) / repeats


def report(what, value):
    print(f"{what:52} {value:8.3f} s", flush=True)


def whole(given, threads, split):
    prepare(given, threads)
    net = resnet50()
    first, second = halves(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    inputs, labels = batch(given)

    def step():
        optimizer.zero_grad()
        if split:  # the tutorial's order: a micro-batch enters the second half, the next one the first
            parts = iter(inputs.split(given.micro_batch))
            between = first(next(parts))
            outputs = []
            for part in parts:
                outputs.append(second(between))
                between = first(part)
            outputs.append(second(between))
            out = torch.cat(outputs)
        else:
            out = net(inputs)
        nn.functional.mse_loss(out, labels).backward()
        optimizer.step()

    return seconds(step, given.repeats)


def replicas(given):
    prepare(given, 1)
    nets = [resnet50(), resnet50()]
    optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.001)
    inputs, labels = batch(given)
    parts = list(zip(inputs.chunk(2), labels.chunk(2)))

    def work(net, part):
        torch.set_num_threads(1)
        (nn.functional.mse_loss(net(part[0]), part[1]) / 2).backward()

    def step():
        for net in nets:
            net.zero_grad()
        nets[1].load_state_dict(nets[0].state_dict())
        threads = [threading.Thread(target=work, args=pair) for pair in zip(nets, parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with torch.no_grad():
            for first, second in zip(nets[0].parameters(), nets[1].parameters()):
                first.grad += second.grad
        optimizer.step()

    return seconds(step, given.repeats)


def stage_process(rank, schedule, given, store, result):
    from torch.distributed import pipelining

    prepare(given, 1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    part = halves(resnet50())[rank]
    inputs, labels = batch(given)
    stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"))
    kind = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}[schedule]
    plan = kind(stage, given.images // given.micro_batch, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.001)

    def step():
        optimizer.zero_grad()
        if rank == 0:
            plan.step(inputs)
        else:
            plan.step(target=labels)
        optimizer.step()

    dist.barrier()
    value = seconds(step, given.repeats)
    if rank == 1:
        pathlib.Path(result).write_text(str(value))
    dist.destroy_process_group()


def pipelined(schedule, given):
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "seconds"
        mp.spawn(stage_process, (schedule, given, f"{folder}/store", str(result)), nprocs=2, join=True)
        return float(result.read_text())


def ours(given):
    """Seconds per batch of the example's pipelines, by the cut."""
    sizes = ["--images", str(given.images), "--size", str(given.size), "--split", str(given.micro_batch)]
    run = subprocess.run(
        [given.beside, *sizes, "--batches", "1", "--repeats", str(given.repeats)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found = re.findall(r"pipeline, (published|balanced) cut, split \d+ +([0-9.]+) s", run.stdout)
    return {f"Cohort's pipeline, {cut} cut": float(value) for cut, value in found}


def turn(given):
    """Seconds of PyTorch's rows and of Cohort's, which run in the middle of those that it is compared with."""
    rows = {
        "the tutorial's pipeline, two threads in operators": lambda: whole(given, 2, True),
        "PyTorch, two threads with a replica each": lambda: replicas(given),
        "torch.distributed.pipelining, GPipe": lambda: pipelined("GPipe", given),
        "torch.distributed.pipelining, 1F1B": lambda: pipelined("1F1B", given),
    }
    if not given.beside:
        rows["one thread, the whole batch"] = lambda: whole(given, 1, False)
        rows["two threads in operators, the whole batch"] = lambda: whole(given, 2, False)
    of_pytorch, of_cohort = {}, {}
    for i, (what, measure) in enumerate(rows.items()):
        if given.beside and i == len(rows) // 2:
            of_cohort = ours(given)
        of_pytorch[what] = measure()
    for what, value in {**of_pytorch, **of_cohort}.items():
        report(what, value)
    return of_pytorch, of_cohort


def main():
    parser = argparse.ArgumentParser()
    for name, value in {"images": 120, "size": 128, "micro-batch": 20, "repeats": 2, "turns": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--allocator", choices=("tuned", "default"), default="tuned")
    parser.add_argument("--beside", help="Cohort's example, as it was built")
    given = parser.parse_args()
    sizes = f"{given.images} images of {given.size} x {given.size}, micro-batches of {given.micro_batch}"
    print(f"ResNet-50, {sizes}; PyTorch {torch.__version__}, {given.allocator} allocator")
    turns = [turn(given) for _ in range(given.turns)]
    for what in turns[0][0] if given.beside else ():
        for pipeline in turns[0][1]:
            ratios = [of_pytorch[what] / of_cohort[pipeline] for of_pytorch, of_cohort in turns]
            every = " ".join(f"{each:.2f}" for each in ratios)
            print(f"{pipeline} is {statistics.median(ratios):.2f} times as fast as {what} ({every})")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
