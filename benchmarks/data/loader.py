"""Cohort's loader beside PyTorch's DataLoader with Pillow, over the same image folder, in one run.

    python benchmarks/data/loader.py build/benchmarks/data/data_loader_benchmark FOLDER [--workers 0 1 2] [--rounds 3]

Rounds alternate between the two, so that both see the same machine. Gray images, flips, ToTensor, Normalize; with
--crop SIZE, RGB and RandomResizedCrop(SIZE) first. Prints best and median images/s of each and the ratio of the bests.
"""
import argparse
import os
import statistics
import subprocess
import time

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class Folder(Dataset):
    """What a PyTorch user who cares about speed writes: Pillow, numpy and torch, no torchvision."""

    def __init__(self, root, crop):
        self.samples = []
        self.crop = crop
        for label, name in enumerate(sorted(e.name for e in os.scandir(root) if e.is_dir())):
            for file in sorted(os.listdir(os.path.join(root, name))):
                self.samples.append((os.path.join(root, name, file), label))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        with open(path, "rb") as file:
            image = Image.open(file).convert("RGB" if self.crop else "L")
        if self.crop:
            image = self.random_resized_crop(image)
        if torch.rand(1) < 0.5:
            image = image.transpose(Image.FLIP_LEFT_RIGHT)
        pixels = np.asarray(image, dtype=np.float32)
        pixels = pixels.transpose(2, 0, 1) if self.crop else pixels[None]
        return torch.from_numpy((pixels / 255.0 - 0.5) / 0.5), label

    def random_resized_crop(self, image):
        width, height = image.size
        for _ in range(10):
            area = width * height * np.random.uniform(0.08, 1.0)
            ratio = np.exp(np.random.uniform(np.log(3 / 4), np.log(4 / 3)))
            w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                left, top = np.random.randint(0, width - w + 1), np.random.randint(0, height - h + 1)
                break
        else:
            left, top, w, h = 0, 0, width, height
        return image.resize((self.crop, self.crop), Image.BILINEAR, box=(left, top, left + w, top + h))


def python_rate(dataset, workers, batch):
    loader = DataLoader(dataset, batch, shuffle=True, num_workers=workers)
    start, images = time.perf_counter(), 0
    for x, _ in loader:
        images += len(x)
    return images / (time.perf_counter() - start)


def cohort_rate(arguments, workers):
    command = [arguments.binary, arguments.folder, "--workers", str(workers), "--rounds", "1"]
    command += ["--batch", str(arguments.batch), "--cache", str(arguments.cache)]
    command += ["--crop", str(arguments.crop), "--rgb"] if arguments.crop else []
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(next(line for line in output.splitlines() if line.startswith("workers")).split()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--crop", type=int, default=0)
    parser.add_argument("--cache", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"torch {torch.__version__}, cores {len(os.sched_getaffinity(0))}, commit {commit}, batch {arguments.batch}")
    dataset = Folder(arguments.folder, arguments.crop)
    for workers in arguments.workers:
        ours, theirs = [], []
        for _ in range(arguments.rounds):
            ours.append(cohort_rate(arguments, workers))
            theirs.append(python_rate(dataset, workers, arguments.batch))
        print(f"workers {workers}: cohort best {max(ours):,.0f} median {statistics.median(ours):,.0f}, "
              f"pytorch best {max(theirs):,.0f} median {statistics.median(theirs):,.0f} images/s, "
              f"ratio {max(ours) / max(theirs):.2f}", flush=True)


if __name__ == "__main__":
    main()
