"""The job of configs/fashion-vgg.yaml as a PyTorch user runs it: torch, DataLoader, Pillow.

    python benchmarks/train/fashion_peer.py --data data/fashion --epochs 2 --workers 2

Prints a JSON line per epoch and one at the end with the peak of memory (PSS over all processes).
benchmarks/train/compare.py runs it beside `cohort train`.
"""

import argparse
import glob
import json
import os
import sys
import threading
import time

TUNED = "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/fashion")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=0, help="use so many training images; 0: all")
    parser.add_argument("--memory", action="store_true", help="data in memory: compute alone")
    parser.add_argument("--loader-only", action="store_true")
    parser.add_argument("--first-step", action="store_true", help="seconds from process start to the first step's end")
    parser.add_argument("--tuned-malloc", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--no-eval", action="store_true")
    return parser.parse_args()


def seconds_since_process_start():
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rsplit(")", 1)[1].split()[19])
    with open("/proc/uptime") as file:
        uptime = float(file.read().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def children_of(pid):
    pids = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            with open(path) as file:
                pids += [int(p) for p in file.read().split()]
        except OSError:
            pass
    return pids


def tree_pss(pid):
    total, todo = 0, [pid]
    while todo:
        current = todo.pop()
        todo += children_of(current)
        try:
            with open(f"/proc/{current}/smaps_rollup") as file:
                total += next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
        except (OSError, StopIteration):
            pass
    return total


class PeakMemory(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.peak = 0
        self.running = True

    def run(self):
        while self.running:
            self.peak = max(self.peak, tree_pss(os.getpid()))
            time.sleep(0.2)


def main():
    arguments = parse_arguments()
    if arguments.tuned_malloc and os.environ.get("GLIBC_TUNABLES") != TUNED:
        os.environ["GLIBC_TUNABLES"] = TUNED
        os.execv(sys.executable, [sys.executable] + sys.argv)

    import numpy
    import torch
    from PIL import Image
    from torch import nn

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    mean, std = 0.2860, 0.3530

    class Folder(torch.utils.data.Dataset):
        def __init__(self, root, train, limit=0):
            self.train = train
            self.samples = []
            for label, name in enumerate(sorted(entry.name for entry in os.scandir(root) if entry.is_dir())):
                folder = os.path.join(root, name)
                self.samples += [(os.path.join(folder, file), label) for file in sorted(os.listdir(folder))]
            if limit:
                self.samples = self.samples[:: max(1, len(self.samples) // limit)][:limit]

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, index):
            path, label = self.samples[index]
            image = torch.from_numpy(numpy.array(Image.open(path).convert("L"))).float().div_(255)
            image = image.sub_(mean).div_(std).unsqueeze(0)
            if self.train and torch.rand(()) < 0.5:
                image = image.flip(2)
            return image, label

    def vgg():
        layers, channels = [], 1
        for width in [16, "M", 32, "M", 64, 64, "M", 128, 128, "M", 128, 128]:
            if width == "M":
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))

    train_set = Folder(os.path.join(arguments.data, "train"), True, arguments.limit)
    val_set = Folder(os.path.join(arguments.data, "val"), False)
    options = {"batch_size": arguments.batch_size, "num_workers": arguments.workers}
    if arguments.workers:
        options["persistent_workers"] = True
    train_loader = torch.utils.data.DataLoader(train_set, shuffle=True, **options)
    val_loader = torch.utils.data.DataLoader(val_set, **options)

    memory = PeakMemory()
    memory.start()

    if arguments.loader_only:
        for epoch in range(arguments.epochs):
            begin = time.perf_counter()
            count = sum(len(target) for _, target in train_loader)
            print(json.dumps({"epoch": epoch + 1, "loader_images_per_second": count / (time.perf_counter() - begin)}))
        return

    if arguments.memory:
        first = [batch for batch, _ in zip(train_loader, range(20))]
        train_loader = first * (len(train_loader) // len(first))

    model = vgg().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    total = arguments.epochs * len(train_loader)
    warm = max(1, int(0.3 * total))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1) / warm if step < warm else max(0.0, (total - step) / (total - warm))
    )
    criterion = nn.CrossEntropyLoss()

    for epoch in range(arguments.epochs):
        model.train()
        begin = time.perf_counter()
        count, waited, loss_sum = 0, 0.0, 0.0
        mark = begin
        for images, labels in train_loader:
            waited += time.perf_counter() - mark
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=arguments.bf16):
                logits = model(images.contiguous(memory_format=torch.channels_last))
            loss = criterion(logits.float(), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_sum += loss.item() * len(labels)
            count += len(labels)
            mark = time.perf_counter()
            if arguments.first_step:
                print(json.dumps({"first_step_seconds": seconds_since_process_start()}))
                sys.stdout.flush()
                os._exit(0)
        seconds = time.perf_counter() - begin
        row = {
            "epoch": epoch + 1,
            "images_per_second": count / seconds,
            "data_wait": waited / seconds,
            "train_loss": loss_sum / count,
        }
        if not arguments.no_eval:
            model.eval()
            with torch.no_grad():
                correct = sum(
                    (model(images.contiguous(memory_format=torch.channels_last)).argmax(1) == labels).sum().item()
                    for images, labels in val_loader
                )
            row["val_accuracy"] = correct / len(val_set)
        print(json.dumps(row), flush=True)
    memory.running = False
    memory.join()
    print(json.dumps({"peak_pss_bytes": memory.peak}), flush=True)


if __name__ == "__main__":
    main()
