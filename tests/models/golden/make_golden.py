"""Writes initial.txt and logits.txt: what torchvision's models hold and compute for a given seed.

Run with the pinned torch and torchvision: python3 tests/models/golden/make_golden.py
One checksum covers the 32-bit words w[i] of a tensor: sum of w[i] * (2 * i + 1) modulo 2^64, in hexadecimal.
"""

import importlib.util
import math
import pathlib

import numpy
import torch


def loads_operators():
    library = pathlib.Path(importlib.util.find_spec("torchvision").origin).with_name("_C.so")
    try:
        torch.ops.load_library(str(library))
        return True
    except OSError:
        return False


# A torchvision wheel for CUDA beside a torch for the CPU cannot load its operators. Models need none of them, but the
# import names some.
OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
if not loads_operators():
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor a, Tensor b, float c) -> Tensor")

import torchvision  # noqa: E402
from torch import nn

SEED = 7
# Small, and not for ResNet-50: with two images, steps are so ill-conditioned that PyTorch differs from itself
# when the input moves by 1e-6 (resnet50: by a tenth of the loss).
LEARNING_RATE = 1e-4
NAMES = ["vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn"]
NAMES += ["resnet18", "resnet34", "resnet50"]


def checksum(tensor):
    words = tensor.detach().contiguous().numpy().reshape(-1).view(numpy.uint32)
    total = 0
    for start in range(0, words.size, 1 << 22):
        part = words[start : start + (1 << 22)].astype(numpy.uint64)
        weights = numpy.arange(start, start + part.size, dtype=numpy.uint64) * numpy.uint64(2) + numpy.uint64(1)
        total = (total + int((part * weights).sum(dtype=numpy.uint64))) % 2**64
    return f"{total:x}"


class QuickVGG(nn.Module):
    """VGG11 with batch norm at a quarter of the width, four pools, linear head, grey images."""

    def __init__(self, num_classes):
        super().__init__()
        channels = 1
        layers = []
        for item in [16, "M", 32, "M", 64, 64, "M", 128, 128, "M", 128, 128]:
            if item == "M":
                layers.append(nn.MaxPool2d(2, 2))
            else:
                layers += [nn.Conv2d(channels, item, 3, padding=1), nn.BatchNorm2d(item), nn.ReLU(inplace=True)]
                channels = item
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Linear(128, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, images):
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))


def make(name, num_classes):
    torch.manual_seed(SEED)
    if name == "quick":
        return QuickVGG(num_classes)
    return torchvision.models.get_model(name, weights=None, num_classes=num_classes)


def images(channels, size):
    count = 2 * channels * size * size
    values = (torch.arange(count, dtype=torch.int64) * 7919 % 1000).to(torch.float32) / 500 - 1
    return values.reshape(2, channels, size, size)


def train_three_steps(model, inputs):
    """Plain SGD on cross entropy with the targets 0 and 1; returns the losses and then the logits."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(inputs), torch.tensor([0, 1]))
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LEARNING_RATE * parameter.grad
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return losses, model(inputs)


def number(value):
    assert math.isfinite(value)
    return f"{value:.9g}"


def main():
    folder = pathlib.Path(__file__).parent
    torch.set_num_threads(1)
    versions = f"# torch {torch.__version__}, torchvision {torchvision.__version__}, seed {SEED}\n"
    with open(folder / "initial.txt", "w") as initial, open(folder / "logits.txt", "w") as logits:
        initial.write(versions + "# model tensor shape checksum; a later line of 10 classes holds checksums only\n")
        logits.write(versions + "# model values for [2, channels, size, size] of the images in the script\n")
        for name in NAMES + ["quick"]:
            sums = {}
            for classes in (1000, 10):
                model = make(name, classes)
                state = model.state_dict()
                sums[classes] = [checksum(tensor) for tensor in state.values()]
                if classes == 1000:
                    for (key, tensor), value in zip(state.items(), sums[1000]):
                        shape = "x".join(str(size) for size in tensor.shape) or "scalar"
                        initial.write(f"{name} {key} {shape} {value}\n")
            # An unchanged tensor (a constant, or the convolutions of a ResNet) is written as "=".
            values = ["=" if ten == thousand else ten for ten, thousand in zip(sums[10], sums[1000])]
            initial.write(f"{name} 10-classes {' '.join(values)}\n")
            inputs = images(1, 28) if name == "quick" else images(3, 64)
            model.eval()
            with torch.no_grad():
                logits.write(f"{name} eval {' '.join(number(v) for v in model(inputs).reshape(-1).tolist())}\n")
            if name in ("vgg11_bn", "resnet18", "quick"):
                losses, after = train_three_steps(model, inputs)
                logits.write(f"{name} losses {' '.join(number(v) for v in losses)}\n")
                logits.write(f"{name} trained {' '.join(number(v) for v in after.reshape(-1).tolist())}\n")


if __name__ == "__main__":
    main()
