"""The PyTorch peer of step.cpp: OMP_NUM_THREADS=1 python3 benchmarks/optim/step.py [rounds=60]"""

import sys
import time

import torch

rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
torch.set_num_threads(1)


def resnet18():
    shapes, channels = [(64, 3, 7, 7), (64,), (64,)], 64
    for out in (64, 128, 256, 512):
        for _ in range(2):
            shapes += [(out, channels, 3, 3), (out,), (out,), (out, out, 3, 3), (out,), (out,)]
            if channels != out:
                shapes += [(out, channels, 1, 1), (out,), (out,)]
            channels = out
    return shapes + [(1000, 512), (1000,)]


def measure(name, shapes, make, calls):
    params = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    optimizer = make(params)
    for _ in range(3):
        optimizer.step()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            optimizer.step()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    times.sort()
    print(f"{name:28s} {times[0]:9.1f} {times[len(times) // 2]:9.1f} {times[int(0.99 * (len(times) - 1))]:9.1f}")


print(f"us per step, fused=True, 1 thread, {rounds} rounds: min median p99")
for name, shapes, calls in (("ResNet-18", resnet18(), 1), ("60 x 1000", [(1000,)] * 60, 50)):
    measure(f"{name} SGD 0.9", shapes, lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, fused=True), calls)
    measure(f"{name} Adam", shapes, lambda p: torch.optim.Adam(p, fused=True), calls)
    measure(f"{name} AdamW", shapes, lambda p: torch.optim.AdamW(p, fused=True), calls)
