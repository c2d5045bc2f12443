"""The PyTorch peer of replay.cpp: same functions, models, shapes and one thread, in eager PyTorch and torch.jit.script.

OMP_NUM_THREADS=1 python3 benchmarks/script/replay.py [rounds=15]
"""

import sys
import time
import warnings

import torch
from torch import nn
from torch.nn import functional

warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch.jit's


def timeit(body, rounds):
    """Microseconds per call: least, median and 99th percentile of rounds of at least 20 ms."""
    for _ in range(10):  # torch.jit.script optimises in its first calls
        body()
    calls, elapsed = 1, 0.0
    while True:
        start = time.perf_counter()
        for _ in range(calls):
            body()
        elapsed = time.perf_counter() - start
        if elapsed >= 0.02:
            break
        calls *= 2
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            body()
        times.append((time.perf_counter() - start) / calls * 1e6)
    times.sort()
    at = lambda share: times[int(share * (len(times) - 1))]
    return at(0), at(0.5), at(0.99)


def report(what, way, body, rounds):
    least, median, high = timeit(body, rounds)
    print(f"{what:24} {way:22} {least:9.2f} {median:9.2f} {high:9.2f}", flush=True)


def lecture(x: torch.Tensor) -> torch.Tensor:
    for _ in range(10):
        x = x * x
    return x


def small_mlp(width=64):
    return nn.Sequential(
        nn.Linear(32, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1),
        nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 10),
    )


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.layer(x)).reshape(-1, 10)


def step_of(model, optimizer, x, y):
    def step():
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def steps(what, make, x, y, rounds):
    optimizers = {
        "SGD": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
        "fused SGD": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, fused=True),
        "Adam": lambda p: torch.optim.Adam(p),
        "fused Adam": lambda p: torch.optim.Adam(p, fused=True),
    }
    for name, optimizer in optimizers.items():
        for way in ("eager", "jit"):
            model = make()
            run = torch.jit.script(model) if way == "jit" else model
            try:
                report(what, f"{way}, {name}", step_of(run, optimizer(model.parameters()), x, y), rounds)
            except Exception as error:  # noqa: BLE001 - a peer that cannot run it is a result
                print(f"{what:24} {way}, {name}: {type(error).__name__}", flush=True)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    torch.set_num_threads(1)
    torch.manual_seed(1)
    print(f"us per call, torch {torch.__version__}, 1 thread, {rounds} rounds\n"
          f"{'':47} {'min':>9} {'median':>9} {'p99':>9}")
    x = torch.rand(5)
    with torch.no_grad():
        report("ten times x = x * x", "eager", lambda: lecture(x), rounds)
        scripted = torch.jit.script(lecture)
        report("ten times x = x * x", "jit", lambda: scripted(x), rounds)
    steps("MLP 64, batch 16", small_mlp, torch.randn(16, 32), torch.randint(10, (16,)), rounds)
    steps("MLP 512, batch 128", lambda: small_mlp(512), torch.randn(128, 32), torch.randint(10, (128,)), rounds)
    steps("transformer layer 64", lambda: Encoder(64), torch.randn(6, 4, 64), torch.randint(10, (24,)), rounds)


if __name__ == "__main__":
    main()
