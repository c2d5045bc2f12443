"""Trains a small model with DistributedDataParallel over shared memory.

    Run:      torchrun --standalone --nproc-per-node 2 main.py PREFIX/include PREFIX/lib [STEPS]
    Expect:   a line per 20 steps with a falling loss; then "the parameters are the same on all 2 ranks"
"""
import argparse

import cohort_shm
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("include", help="the folder that holds cohort/comm/backends/shm/shm.h")
parser.add_argument("lib", help="the folder that holds libcohort_shm.so")
parser.add_argument("steps", type=int, nargs="?", default=200)
options = parser.parse_args()

cohort_shm.register(options.include, options.lib)
dist.init_process_group("shm")  # rank and rendezvous from torchrun

torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
examples = torch.Generator().manual_seed(dist.get_rank())  # other examples on each rank
for step in range(1, options.steps + 1):
    x = 6.28 * torch.rand(32, 1, generator=examples)
    loss = torch.nn.functional.mse_loss(model(x), torch.sin(x))
    optimizer.zero_grad()
    loss.backward()  # gradients are averaged over the ranks here
    optimizer.step()
    if step % 20 == 0:
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"step {step:4d}  loss {mean.item():.4f}", flush=True)

parameters = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
of_rank_0 = parameters.clone()
dist.broadcast(of_rank_0, 0)
assert torch.equal(parameters, of_rank_0), f"rank {dist.get_rank()} has other parameters than rank 0"
dist.barrier()
if dist.get_rank() == 0:
    print(f"the parameters are the same on all {dist.get_world_size()} ranks")
dist.destroy_process_group()
