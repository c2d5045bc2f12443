"""The PyTorch peer of examples/rpc_resnet50: the same shards, data, optimizer and clock, by torch.distributed.rpc.

    python3 benchmarks/rpc/resnet50.py [IMAGES [SIZE [STEPS [SPLITS [all|tcp]]]]]

Each shard of ResNet-50 lies on a worker, a process with one thread for operators. A third one trains them. SPLITS of 0
is 1, 2, 4 and 8 one after another. The last argument says which transports TensorPipe may use. The first step of each
number of splits is not timed. Needs torchvision.
"""

import pathlib
import sys
import threading
import time

import pytorch_workers as workers
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

CLASSES = 1000


class Shard(nn.Module):
    """The layers of ResNet-50 before layer3, or those from there on."""

    def __init__(self, is_first):
        super().__init__()
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "support"))
        from torchvision_models import import_torchvision

        torch.manual_seed(1)
        net = import_torchvision().models.resnet50(num_classes=CLASSES)
        if is_first:
            self.layers = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2)
        else:
            self.layers = nn.Sequential(net.layer3, net.layer4, net.avgpool, nn.Flatten(), net.fc)
        self.lock = threading.Lock()  # micro-batches come at the same time

    def forward(self, reference):
        x = reference.to_here()
        with self.lock:
            return self.layers(x)


def make_batch(images, size, step):
    torch.manual_seed(100 + step)
    inputs = torch.randn(images, 3, size, size)
    return inputs, nn.functional.one_hot(torch.randint(CLASSES, (images,)), CLASSES).float()


def run_step(first, second, optimizer, batch, splits):
    images, labels = batch
    with dist_autograd.context() as context:
        futures = []
        for part in images.chunk(splits):
            hidden = workers.call_remote(first, Shard.forward, rpc.RRef(part))  # goes straight to the second shard
            futures.append(workers.call_async(second, Shard.forward, hidden))
        outputs = torch.cat([future.wait() for future in futures])
        loss = nn.functional.mse_loss(outputs, labels)
        dist_autograd.backward(context, [loss])
        optimizer.step(context)
    return loss.item()


def train(images, size, steps, only):
    first, second = rpc.remote("shard1", Shard, (True,)), rpc.remote("shard2", Shard, (False,))
    parameters = workers.call(first, workers.parameters_of) + workers.call(second, workers.parameters_of)
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    for splits in [only] if only else [1, 2, 4, 8]:
        seconds, losses = [], []
        for step in range(steps):
            batch = make_batch(images, size, step)
            begin = time.perf_counter()
            losses.append(run_step(first, second, optimizer, batch, splits))
            seconds.append(time.perf_counter() - begin)
        timed = seconds[1:] or seconds
        print(f"splits {splits}  {sum(timed) / len(timed):.3f} s a step, loss {losses[0]:.6f} to {losses[-1]:.6f}", flush=True)


if __name__ == "__main__":
    numbers = [120, 128, 3, 0]
    for i, text in enumerate(sys.argv[1:5]):
        numbers[i] = int(text)
    workers.run(["trainer", "shard1", "shard2"], sys.argv[5] if len(sys.argv) > 5 else "all", train, *numbers)
