"""Orders of PyTorch's samplers, for tests/data/sampler_test.cpp.

    python tests/golden/data_samplers.py > tests/golden/data_samplers.txt     # torch 2.13.0

A line: name size seed epoch world rank drop_last shuffle count checksum | the first 64 indices.
"""
import torch
from torch.utils.data import DistributedSampler, RandomSampler


def line(name, size, seed, epoch, world, rank, drop_last, shuffle, order):
    order = [int(i) for i in order]
    checksum = 0
    for index in order:
        checksum = (checksum * 1000003 + index) % (2**61 - 1)
    head = " ".join(map(str, order[:64]))
    print(name, size, seed, epoch, world, rank, int(drop_last), int(shuffle), len(order), checksum, "|", head)


for size, seed, epoch in [(1, 0, 0), (10, 0, 0), (10, 0, 1), (64, 7, 3), (1000, 2**40, 5), (60000, 1, 29)]:
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    line("random", size, seed, epoch, 1, 0, False, True, RandomSampler(range(size), generator=generator))

for size, world in [(10, 1), (12, 3), (13, 3), (14, 3), (2, 5), (1000, 7), (60000, 8)]:
    for shuffle in (True, False):
        for drop_last in (False, True):
            if drop_last and size < world:
                continue  # PyTorch's sampler yields nothing useful there
            for rank in sorted({0, world // 2, world - 1}):
                for epoch in (0, 3):
                    sampler = DistributedSampler(range(size), world, rank, shuffle=shuffle, seed=11, drop_last=drop_last)
                    sampler.set_epoch(epoch)
                    line("distributed", size, 11, epoch, world, rank, drop_last, shuffle, sampler)
