"""The PyTorch peer of train_step.cpp: same model, batch, threads and cases.

python3 benchmarks/models/train_step.py [threads=1] [seconds per case=5] [tune=0]
tune=1 asks glibc to keep memory, as a PyTorch program whose allocator was tuned by hand.
"""

import ctypes
import sys
import time

import torch
from torch import nn

BATCH = 128


def make_quick():
    channels = 1
    layers = []
    for item in [16, "M", 32, "M", 64, 64, "M", 128, 128, "M", 128, 128]:
        if item == "M":
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(channels, item, 3, padding=1), nn.BatchNorm2d(item), nn.ReLU(inplace=True)]
            channels = item
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def run(name, channels_last, bfloat16, seconds):
    torch.manual_seed(1)
    model = make_quick()
    images = torch.rand(BATCH, 1, 28, 28)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    targets = torch.randint(10, (BATCH,))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    criterion = nn.CrossEntropyLoss()
    rates, cpu = [], []
    end = time.perf_counter() + seconds
    step = 0
    while time.perf_counter() < end:
        start, cpu_start = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = criterion(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        elapsed = time.perf_counter() - start
        if step >= 3:
            rates.append(BATCH / elapsed)
            cpu.append(1e3 * (time.process_time() - cpu_start))
        step += 1
    if not rates:
        return
    rates.sort()
    cpu.sort()
    at = lambda share: rates[int(share * (len(rates) - 1))]
    print(
        f"pytorch {name:22} images/s: min {rates[0]:6.0f}  median {at(0.5):6.0f}  p99 {at(0.99):6.0f}"
        f"  best {rates[-1]:6.0f}  cpu ms/step: min {cpu[0]:6.2f}  median {cpu[len(cpu) // 2]:6.2f}  ({len(rates)} steps)",
        flush=True,
    )


def main():
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 5
    if len(sys.argv) > 3 and sys.argv[3] == "1":
        libc = ctypes.CDLL("libc.so.6")
        if libc.mallopt(-3, 2**30) != 1:  # M_MMAP_THRESHOLD; some versions take at most 32 MiB
            libc.mallopt(-3, 32 * 2**20)
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    torch.set_num_threads(threads)
    print(f"vgg11_bn width 0.25, pools 4, head linear, 1 x 28 x 28, batch {BATCH}, threads {threads}", flush=True)
    for case in [
        ("f32 contiguous", False, False),
        ("f32 channels-last", True, False),
        ("bf16 contiguous", False, True),
        ("bf16 channels-last", True, True),
    ]:
        run(*case, seconds)


if __name__ == "__main__":
    main()
