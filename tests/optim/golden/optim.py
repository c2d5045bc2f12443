"""Writes schedules.txt and steps.txt beside itself, with PyTorch: PYTHON tests/optim/golden/optim.py

schedules.txt: `name lr values...` and, where it is cycled, `name momentum values...`: all 1,000 steps of each chain in
torch.optim.lr_scheduler, where VALUE*COUNT is one value COUNT times. The names are those of
tests/optim/schedule_test.cpp.
steps.txt: `case index values...`: parameters after five steps of fused=True optimizers, and clipped gradients.
Inputs are small fractions made by the same formula in optimizer_test.cpp.
"""
import itertools
import math
import pathlib
import warnings

import torch
from torch.optim import lr_scheduler as s

HERE = pathlib.Path(__file__).parent
STEPS = 1000
warnings.simplefilter("ignore")

cycle = dict(total_steps=1000, max_lr=0.5)
SCHEDULES = {
    "constant": lambda o: s.ConstantLR(o, 1.0, 0),
    "constant_factor": lambda o: s.ConstantLR(o, 0.25, 40),
    "step": lambda o: s.StepLR(o, 30, 0.7),
    "multistep": lambda o: s.MultiStepLR(o, [100, 300, 300, 800], 0.3),
    "cosine": lambda o: s.CosineAnnealingLR(o, 1000, 0.001),
    "cosine_periodic": lambda o: s.CosineAnnealingLR(o, 150, 0.0),
    "linear": lambda o: s.LinearLR(o, 0.01, 1.0, 500),
    "linear_down": lambda o: s.LinearLR(o, 1.0, 0.0, 700),
    "exponential": lambda o: s.ExponentialLR(o, 0.995),
    "polynomial": lambda o: s.PolynomialLR(o, 900, 2.0),
    "polynomial_half": lambda o: s.PolynomialLR(o, 1000, 0.5),
    "warmup_cosine": lambda o: s.SequentialLR(
        o, [s.LinearLR(o, 0.01, 1.0, 50), s.CosineAnnealingLR(o, 950, 1e-5)], [50]),
    "three_parts": lambda o: s.SequentialLR(
        o, [s.LinearLR(o, 0.1, 1.0, 20), s.StepLR(o, 100, 0.5), s.ExponentialLR(o, 0.99)], [20, 400]),
    "one_cycle": lambda o: s.OneCycleLR(o, **cycle),
    "one_cycle_linear": lambda o: s.OneCycleLR(
        o, anneal_strategy="linear", pct_start=0.137, div_factor=10.0, final_div_factor=100.0, base_momentum=0.8,
        max_momentum=0.9, **cycle),
    "one_cycle_three": lambda o: s.OneCycleLR(o, three_phase=True, pct_start=0.4, **cycle),
    "one_cycle_three_linear": lambda o: s.OneCycleLR(
        o, three_phase=True, anneal_strategy="linear", pct_start=0.25, cycle_momentum=False, **cycle),
    "one_cycle_falling": lambda o: s.OneCycleLR(o, pct_start=0.0, **cycle),
}


def line(name, key, values):
    counted = ((repr(value), len(list(same))) for value, same in itertools.groupby(values))
    return " ".join([name, key] + [value if count == 1 else f"{value}*{count}" for value, count in counted])


def schedules():
    lines = []
    for name, make in SCHEDULES.items():
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        schedule = make(optimizer)
        rates, momenta = [], []
        for _ in range(STEPS):
            group = optimizer.param_groups[0]
            rates.append(group["lr"])
            momenta.append(group["momentum"])
            optimizer.step()
            schedule.step()
        lines.append(line(name, "lr", rates))
        if "one_cycle" in name and name != "one_cycle_three_linear":
            lines.append(line(name, "momentum", momenta))
    (HERE / "schedules.txt").write_text("\n".join(lines) + "\n")


SHAPES = [(5, 3, 2, 2), (37,), (130,)]


def value(p, salt):
    n = math.prod(SHAPES[p])
    return torch.tensor([((i * 29 + p * 7 + salt * 11) % 23 - 11) / 8 for i in range(n)]).reshape(SHAPES[p])


def fresh():
    return [torch.nn.Parameter(value(p, 0)) for p in range(len(SHAPES))]


def write(lines, case, tensors):
    for index, tensor in enumerate(tensors):
        lines.append(f"{case} {index} " + " ".join(repr(v) for v in tensor.detach().flatten().double().tolist()))


def steps():
    lines = [f"capability {torch.backends.cpu.get_cpu_capability()}"]
    o = torch.optim
    cases = {
        "sgd": lambda p: o.SGD(p, 0.1, fused=True),
        "sgd_momentum": lambda p: o.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, fused=True),
        "sgd_nesterov": lambda p: o.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True),
        "sgd_all": lambda p: o.SGD(p, 0.1, momentum=0.8, dampening=0.3, maximize=True, fused=True),
        "adam": lambda p: o.Adam(p, 0.01, fused=True),
        "adam_all": lambda p: o.Adam(p, 0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, amsgrad=True,
                                     maximize=True, fused=True),
        "adamw": lambda p: o.AdamW(p, 0.01, fused=True),
        "adamw_all": lambda p: o.AdamW(p, 0.01, betas=(0.8, 0.95), weight_decay=0.1, amsgrad=True, fused=True),
    }
    for case, make in cases.items():
        params = fresh()
        optimizer = make(params)
        for step in range(1, 6):
            for p, param in enumerate(params):
                param.grad = None if p == 1 and step in (2, 3) else value(p, step)
            optimizer.step()
        write(lines, case, params)
    for case, norm_type in {"clip_2": 2.0, "clip_inf": math.inf, "clip_1": 1.0}.items():
        params = fresh()
        for p, param in enumerate(params):
            param.grad = value(p, 1)
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5, norm_type)
        write(lines, case, [p.grad for p in params] + [norm.reshape(1)])
    (HERE / "steps.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    schedules()
    steps()
