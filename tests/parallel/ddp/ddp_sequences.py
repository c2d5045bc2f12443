"""PyTorch's DistributedDataParallel through the sequences of ddp_sequences_test.cpp, compared with Cohort's gradients, buffers.

ddp_sequences.py FOLDER    FOLDER has plan.safetensors and, of each world size N and rank R of ours, ranksNR.safetensors
"""
import datetime
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_ddp import leave_together

RANKS = 3
TRAIN, NO_SYNC, SKIP, EVAL, EVAL_NO_GRAD, ZERO, ZERO_IN_PLACE, TRAIN_AFTER_METRIC = range(8)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6, eps=0.1)  # a large one: what rounds is not multiplied
        self.fixed = nn.Linear(6, 6)
        self.left = nn.Linear(6, 4)
        self.right = nn.Linear(6, 4)
        self.fixed.requires_grad_(False)

    def forward(self, x, parts):
        h = torch.tanh(self.fixed(self.norm(self.trunk(x))))
        y = h.sum(1)
        if parts & 1:
            y = y + self.left(h).sum(1)
        if parts & 2:
            y = y + self.right(h).square().sum(1)
        return y


def run_sequence(plan, i, rank, group, dtype):
    """The gradients after each step, {step.name: tensor}, of the sequence in that type.

    And rank 0's buffers after each step that reduces: Cohort's ranks have them at its end, PyTorch's before the next.
    """
    net = Branches()
    net.load_state_dict({k[len(f"{i}.start.") :]: v for k, v in plan.items() if k.startswith(f"{i}.start.")})
    net.to(dtype)
    as_view, joins = plan[f"{i}.options"].tolist()
    model = DistributedDataParallel(
        net, process_group=group, find_unused_parameters=True, gradient_as_bucket_view=bool(as_view)
    )
    inputs = plan[f"{i}.inputs"].to(dtype)
    steps = plan[f"{i}.steps"].tolist()
    found = {}

    def run_step(number):
        call, *parts = steps[number]
        x = inputs[number, rank]
        if call in (TRAIN, TRAIN_AFTER_METRIC):
            model(x, parts[rank]).square().mean().backward()
        elif call == NO_SYNC:
            with model.no_sync():
                model(x, parts[rank]).square().mean().backward()
        elif call == SKIP:
            model(x, parts[rank])
        elif call == EVAL:
            model.eval()
            model(x, parts[rank])
            model.train()
        elif call == EVAL_NO_GRAD:
            with torch.no_grad():
                model(x, parts[rank])
        else:
            net.zero_grad(set_to_none=call == ZERO)
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                found[f"{i}.{number}.{name}"] = parameter.grad.clone()
        if call in (TRAIN, TRAIN_AFTER_METRIC) and not joins:
            for name, buffer in net.named_buffers():
                found[f"{i}.{number}.buffer.{name}"] = buffer.clone()
                dist.broadcast(found[f"{i}.{number}.buffer.{name}"], 0, group=group)

    own_steps = [n for n in range(len(steps)) if not joins or n % (rank + 2) != 1]
    if joins:
        with model.join():
            for number in own_steps:
                run_step(number)
    else:
        for number in own_steps:
            run_step(number)
    return found


def compare(rank, folder):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, RANKS, rank)
    plan = load_file(f"{folder}/plan.safetensors")
    types = [torch.float32, torch.bfloat16, torch.float16]
    for size in (2, 3):
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        ours = load_file(f"{folder}/ranks{size}{rank}.safetensors")
        squares = {kind: [0.0, 0.0] for kind in types}  # of what ours and PyTorch's differ from float64's
        seen = 0
        for i in range(int(plan["count"])):
            kind = types[int(plan[f"{i}.type"])]
            theirs = run_sequence(plan, i, rank, group, kind)
            exact = run_sequence(plan, i, rank, group, torch.float64) if kind != torch.float32 else theirs
            keys = {k for k in ours if k.startswith(f"{i}.")}
            assert keys == theirs.keys(), f"{size} ranks, sequence {i}, rank {rank}: {sorted(keys ^ theirs.keys())}"
            for key in [k for k in theirs if ".buffer." in k]:
                where = f"{size} ranks, rank {rank}, {key}"
                # A C++ module's to(type) converts counts too.
                torch.testing.assert_close(
                    ours[key], theirs.pop(key), check_dtype=False, msg=lambda text, where=where: f"{where}: {text}"
                )
            largest = {}  # gradient of each step
            for key, want in theirs.items():
                step = key.split(".")[1]
                largest[step] = max(largest.get(step, 0.0), want.abs().max().item())
            for key, want in theirs.items():
                seen += 1
                got = ours[key].double()
                scale = largest[key.split(".")[1]] or 1.0
                if kind == torch.float32:
                    worst = (got - want.double()).abs().max().item()
                    assert worst <= 1e-6 * scale, f"{size} ranks, rank {rank}: {key} differs by {worst} of {scale}"
                squares[kind][0] += ((got - exact[key]) / scale).square().sum().item()
                squares[kind][1] += ((want.double() - exact[key]) / scale).square().sum().item()
        # Most of it is rounding of the backward itself, so that chance makes either the larger one.
        chance = 1 + 0.5 / int(plan["count"]) ** 0.5
        for kind, (own_sum, pytorch_sum) in squares.items():
            print(f"{size} ranks, {kind}: {own_sum**0.5:.6g} from float64's gradients, PyTorch {pytorch_sum**0.5:.6g}")
            assert own_sum**0.5 <= pytorch_sum**0.5 * chance or kind == torch.float32, f"{kind}: {own_sum} > {pytorch_sum}"
        assert seen > 0
    leave_together(rank, RANKS, folder)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Forked, a rank has torch already. Importing it starts no thread.
    mp.start_processes(compare, (sys.argv[1],), RANKS, start_method="fork")
