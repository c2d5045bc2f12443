"""Reads what Cohort saved, as a user of PyTorch would.

read_with_pytorch.py bytes FILE       every tensor of FILE equals what the C++ test wrote into it
read_with_pytorch.py logits FILE MODEL IO
    loads FILE by torchvision's names into MODEL (vgg16_bn, resnet50 ...), and compares its logits in evaluation
    mode for IO's `input` with IO's `logits`: every one to 1e-5, however large it is.
"""
import pathlib
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from torchvision_models import import_torchvision


def check_bytes(file):
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"by": "cohort \u00e9"}, opened.metadata()
    tensors = load_file(file)
    want = torch.arange(24, dtype=torch.float32).reshape(1, 2, 3, 4)
    assert torch.equal(tensors["plain"], want)
    assert torch.equal(tensors["channels_last"], want) and tensors["channels_last"].is_contiguous()
    assert torch.equal(tensors["transposed"], torch.arange(6).reshape(2, 3).t())
    assert torch.equal(tensors["half"], torch.full((3,), 1.5, dtype=torch.float16))
    assert torch.equal(tensors["brain"], torch.full((3,), 1.5, dtype=torch.bfloat16))
    assert torch.equal(tensors["flags"], torch.tensor([True, False, True]))
    assert torch.equal(tensors["shared_a"], tensors["shared_b"])
    assert tensors["empty"].shape == (0, 5) and tensors["scalar"].item() == 7


def check_logits(file, model, io):
    torchvision = import_torchvision()
    stored = load_file(io)
    state = load_file(file)
    network = getattr(torchvision.models, model)(num_classes=stored["logits"].shape[1])
    print(network.load_state_dict(state, strict=True))
    network.eval()
    with torch.no_grad():
        difference = (network(stored["input"]) - stored["logits"]).abs().max().item()
    largest = stored["logits"].abs().max().item()
    print(f"{model}: largest difference {difference:.3g} of logits up to {largest:.3g}")
    assert difference <= 1e-5, difference


if __name__ == "__main__":
    {"bytes": check_bytes, "logits": check_logits}[sys.argv[1]](*sys.argv[2:])
