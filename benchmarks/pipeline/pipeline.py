"""The Python peers of examples/pipeline_resnet50 and parallel_data_parallel: ResNet-50, squared error, two cores.

pipeline.py [images=120] [size=128] [micro-batch=20] [repeats=2]

One process with one thread and with two; micro-batches through two halves in the order of the tutorial on pipelined ResNet-50
(on CPU nothing of it overlaps); Python threads that run replicas; torch.distributed.pipelining over Gloo, two processes of
one thread. Seconds per batch, the mean. Needs torchvision.
"""

import contextlib
import ctypes
import os
import pathlib
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


def tune(threads):
    """glibc keeps its memory, as core::tune_allocator() asks it to."""
    torch.set_num_threads(threads)
    libc = ctypes.CDLL("libc.so.6")
    if libc.mallopt(-3, 2**30) != 1:  # M_MMAP_THRESHOLD; some versions take at most 32 MiB
        libc.mallopt(-3, 32 * 2**20)
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def batch(images, size):
    torch.manual_seed(2)
    labels = torch.nn.functional.one_hot(torch.randint(CLASSES, (images,)), CLASSES).float()
    return torch.randn(images, 3, size, size), labels


def seconds(step, repeats):
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - begin) / repeats


def report(what, value):
    print(f"{what:52} {value:8.3f} s", flush=True)


def whole(images, size, micro, repeats, threads, split):
    tune(threads)
    net = resnet50()
    first, second = halves(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    inputs, labels = batch(images, size)

    def step():
        optimizer.zero_grad()
        if split:  # the tutorial's order: a micro-batch enters the second half, the next one the first
            parts = iter(inputs.split(micro))
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

    return seconds(step, repeats)


def replicas(images, size, repeats):
    tune(1)
    nets = [resnet50(), resnet50()]
    optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.001)
    inputs, labels = batch(images, size)
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
            for mine, other in zip(nets[0].parameters(), nets[1].parameters()):
                mine.grad += other.grad
        optimizer.step()

    return seconds(step, repeats)


def stage_process(rank, schedule, images, size, micro, repeats, store, result):
    from torch.distributed import pipelining

    tune(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    part = halves(resnet50())[rank]
    inputs, labels = batch(images, size)
    stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"))
    kind = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}[schedule]
    plan = kind(stage, images // micro, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.001)

    def step():
        optimizer.zero_grad()
        if rank == 0:
            plan.step(inputs)
        else:
            plan.step(target=labels)
        optimizer.step()

    step()  # shapes are exchanged in the first
    dist.barrier()
    value = seconds(step, repeats)
    if rank == 1:
        pathlib.Path(result).write_text(str(value))
    dist.destroy_process_group()


def pipelined(schedule, images, size, micro, repeats):
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "seconds"
        mp.spawn(
            stage_process, (schedule, images, size, micro, repeats, f"{folder}/store", str(result)), nprocs=2, join=True
        )
        return float(result.read_text())


def main():
    given = [int(each) for each in sys.argv[1:]]
    images, size, micro, repeats = given + [120, 128, 20, 2][len(given) :]
    print(f"ResNet-50, {images} images of {size} x {size}, micro-batches of {micro}; Python, torch {torch.__version__}")
    report("one thread, the whole batch", whole(images, size, micro, repeats, 1, False))
    report("two threads in operators, the whole batch", whole(images, size, micro, repeats, 2, False))
    report("the tutorial's pipeline, two threads in operators", whole(images, size, micro, repeats, 2, True))
    report("two Python threads with a replica each", replicas(images, size, repeats))
    for schedule in ("GPipe", "1F1B"):
        report(f"torch.distributed.pipelining, {schedule}", pipelined(schedule, images, size, micro, repeats))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
