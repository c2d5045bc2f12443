"""torchvision for its models, also where its compiled operators do not fit this torch."""

import sys

import torch


def import_torchvision():
    try:
        import torchvision
    except RuntimeError:  # its compiled operators do not load beside this torch; models need only that names are known
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        global operators
        operators = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor a, Tensor b, float c) -> Tensor")
        import torchvision
    return torchvision
