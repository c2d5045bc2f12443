"""PyTorch's torch.distributed over the backend "shm" gives what it gives over Gloo.

    shm_python_test.py build INCLUDE LIB LIBTORCH-VERSION    compiles the module of examples/shm_in_python
    shm_python_test.py RANKS INCLUDE LIB LIBTORCH-VERSION    runs RANKS processes, each of which compares

Each rank runs every case over Gloo, then over shm. With two ranks all bits are the same; with more, sums of floating
point numbers go in another order and differ by what their type rounds. The rest is only moved, or exact.
"""
import datetime
import faulthandler
import multiprocessing
import os
import pathlib
import re
import socket
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "shm_in_python"))
import cohort_shm

DEADLINE_S = 150  # of all ranks together
TIMEOUT = datetime.timedelta(seconds=60)  # of one call
TYPES = [torch.float32, torch.bfloat16, torch.int64]
SIZES = [0, 1, 7, 100_003]  # the last takes several rounds
OPERATIONS = {"SUM": dist.ReduceOp.SUM, "AVG": dist.ReduceOp.AVG, "MAX": dist.ReduceOp.MAX}


def numbers(rank, numel, dtype, seed=0):
    """What `rank` puts in; every rank can compute it."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, (numel,), generator=generator)
    return torch.randn(numel, generator=generator).to(dtype)


def reductions(rank, size):
    for dtype in TYPES:
        for name, op in OPERATIONS.items():
            if name == "AVG" and dtype == torch.int64:
                continue  # Gloo has none: check_only_here()
            for numel in SIZES:
                case = f"{dtype} {name} {numel}"
                tensor = numbers(rank, numel, dtype)
                dist.all_reduce(tensor, op)
                yield f"all_reduce {case}", tensor
                tensor = numbers(rank, numel, dtype)
                dist.reduce(tensor, size - 1, op)
                if rank == size - 1:  # the others' is undefined
                    yield f"reduce {case}", tensor
                whole, part = numbers(rank, numel * size, dtype), torch.empty(numel, dtype=dtype)
                dist.reduce_scatter(part, list(whole.tensor_split(size)), op)
                yield f"reduce_scatter {case}", part
                part = torch.empty(numel, dtype=dtype)
                dist.reduce_scatter_tensor(part, whole, op)
                yield f"reduce_scatter_tensor {case}", part


def moves(rank, size):
    for dtype in TYPES:
        for numel in SIZES:
            case = f"{dtype} {numel}"
            own = numbers(rank, numel, dtype)

            gathered = [torch.empty(numel, dtype=dtype) for _ in range(size)]
            dist.all_gather(gathered, own)
            yield f"all_gather {case}", torch.cat(gathered)
            whole = torch.empty(numel * size, dtype=dtype)
            dist.all_gather_into_tensor(whole, own)
            yield f"all_gather_into_tensor {case}", whole
            gathered = [torch.empty(numel, dtype=dtype) for _ in range(size)]
            dist.gather(own, gathered if rank == 0 else None, dst=0)
            if rank == 0:
                yield f"gather {case}", torch.cat(gathered)
            part = torch.empty(numel, dtype=dtype)
            dist.scatter(part, [own + i for i in range(size)] if rank == 1 else None, src=1)
            yield f"scatter {case}", part
            tensor = own.clone()
            dist.broadcast(tensor, size - 1)
            yield f"broadcast {case}", tensor

            whole, parts = torch.empty(numel * size, dtype=dtype), numbers(rank, numel * size, dtype)
            dist.all_to_all_single(whole, parts)
            yield f"all_to_all_single {case}", whole
            # Rank r sends r + i rows to rank i, so gets as many.
            rows = [(rank + i) * numel for i in range(size)]
            unequal = torch.empty(sum(rows), dtype=dtype)
            dist.all_to_all_single(unequal, numbers(rank, sum(rows), dtype), rows, rows)
            yield f"all_to_all_single of unequal parts {case}", unequal
            received = [torch.empty(numel, dtype=dtype) for _ in range(size)]
            dist.all_to_all(received, list(parts.tensor_split(size)))
            yield f"all_to_all {case}", torch.cat(received)

            after, before = (rank + 1) % size, (rank - 1) % size
            tensor = torch.empty(numel, dtype=dtype)
            if rank == 0:
                dist.send(own, after, tag=numel)
            dist.recv(tensor, before, tag=numel)
            if rank != 0:
                dist.send(own, after, tag=numel)
            yield f"send and recv {case}", tensor
            tensor = torch.empty(numel, dtype=dtype)
            for work in (dist.irecv(tensor, before), dist.isend(own, after)):
                work.wait()
            yield f"isend and irecv {case}", tensor
    if rank == 0:
        anyone = torch.empty(1)
        sources = [torch.tensor([float(dist.recv(anyone))]) + 0 * anyone for _ in range(size - 1)]
        yield "recv from anyone", torch.cat(sources).sort().values
    else:
        dist.send(torch.ones(1), 0)


def other_calls(rank, size):
    tensor = numbers(rank, 1000, torch.float32)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    work.wait()
    assert work.is_completed()
    yield "all_reduce with a future", doubled
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "r" * rank})
    yield "all_gather_object", torch.tensor([entry["rank"] * 100 + len(entry["text"]) for entry in objects])
    group = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        tensor = numbers(rank, 100, torch.float32)
        dist.all_reduce(tensor, group=group)
        yield "all_reduce in a group of some ranks", tensor
    dist.barrier()


class TwoWays(nn.Module):
    """Of `left` and `right` one is used, another in each step and on each rank, if `takes_turns`."""

    def __init__(self, takes_turns):
        super().__init__()
        self.takes_turns = takes_turns
        self.first = nn.Linear(64, 96)
        self.left, self.right = nn.Linear(96, 96), nn.Linear(96, 96)
        self.last = nn.Linear(96, 10)

    def forward(self, x, turn):
        x = torch.relu(self.first(x))
        ways = [self.left, self.right]
        x = ways[turn % 2](x) if self.takes_turns else self.right(torch.relu(self.left(x)))
        return self.last(torch.relu(x))


def ddp(rank, _):
    for case in ("plain", "static_graph", "find_unused_parameters", "gradient_as_bucket_view"):
        torch.manual_seed(1 + rank)  # DDP makes them rank 0's
        model = DistributedDataParallel(
            TwoWays(takes_turns=case == "find_unused_parameters"),
            bucket_cap_mb=0.03,
            **({} if case == "plain" else {case: True}),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            x = numbers(rank, 16 * 64, torch.float32, seed=step + 1).view(16, 64)
            loss = nn.functional.cross_entropy(model(x, rank + step), torch.arange(16) % 10)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield f"DDP {case} loss of step {step}", loss.detach()
        for name, parameter in model.module.named_parameters():
            yield f"DDP {case} {name}", parameter.detach()
            yield f"DDP {case} gradient of {name}", parameter.grad
        made_of = model._get_ddp_logging_data()
        buckets = made_of.get("rebuilt_bucket_sizes") or made_of["bucket_sizes"]
        assert len(buckets.split(",")) >= 3, f"{case}: buckets are {buckets}"


def run(backend, rank, size, port):
    """Returns what the cases gave, by name."""
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=TIMEOUT
    )
    assert dist.get_backend() == backend
    results = {}
    for cases in (reductions, moves, other_calls, ddp):
        for name, tensor in cases(rank, size):
            assert name not in results, name
            results[name] = tensor.clone()
    return results


def compare(over_gloo, over_shm, size):
    assert over_gloo.keys() == over_shm.keys()
    for name, expected in over_gloo.items():
        got = over_shm[name]
        assert got.dtype == expected.dtype and got.shape == expected.shape, name
        rounds = expected.is_floating_point() and re.search("SUM|AVG|DDP|all_reduce with", name)
        if size == 2 or not rounds:
            assert torch.equal(got, expected), f"{name}: got {got}, expected {expected}"
        elif expected.numel() > 0:
            # Each sum is wrong by a unit of the largest, twice; after five steps of training by more.
            units = 2 * size * (20 if "DDP" in name else 1)
            most = units * torch.finfo(expected.dtype).eps * expected.abs().max().item()
            error = (got.double() - expected.double()).abs().max().item()
            assert error <= most, f"{name}: differs by {error}, may by {most}"


def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("there was no error")


def check_only_here(rank, size):
    """What Gloo has not: averages of integers, and errors that say which rank is to blame."""
    averages = numbers(rank, 1000, torch.int64)
    dist.all_reduce(averages, dist.ReduceOp.AVG)
    sums = sum(numbers(other, 1000, torch.int64) for other in range(size))
    assert torch.equal(averages, torch.div(sums, size, rounding_mode="trunc")), "average of integers"

    different = dist.new_group()
    text = error_of(lambda: dist.all_reduce(torch.ones(4 if rank == 1 else 3), group=different))
    assert re.search(r"rank 1\b", text) and "all_reduce" in text, text
    print("different shapes:", text)

    late = dist.new_group(timeout=datetime.timedelta(seconds=2))
    if rank != 1:
        begun = time.monotonic()
        text = error_of(lambda: dist.all_reduce(torch.ones(3), group=late))
        assert re.search(r"rank 1\b", text), text
        assert 0.5 < time.monotonic() - begun < 20, time.monotonic() - begun
        print("a rank that is late:", text)
    dist.barrier()


def rank_main(rank, size, ports, folders):
    faulthandler.dump_traceback_later(DEADLINE_S - 10, exit=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cohort_shm.register(*folders)
    with open("/proc/self/maps") as maps:
        mapped = {line[line.index("/") :].strip() for line in maps if "/" in line}
    libraries = {path for path in mapped if "/libtorch_cpu" in path or "/libc10.so" in path}
    here = {os.path.realpath(os.path.join(torch.__path__[0], "lib", name)) for name in ("libtorch_cpu.so", "libc10.so")}
    assert libraries == here, f"the module brought its own LibTorch: {libraries}, expected {here}"

    results = {}
    for backend in ("gloo", "shm"):
        begun = time.monotonic()
        results[backend] = run(backend, rank, size, ports[backend])
        print(f"{len(results[backend])} results over {backend} in {time.monotonic() - begun:.1f} s")
        if backend == "shm":
            check_only_here(rank, size)
        dist.destroy_process_group()
    compare(results["gloo"], results["shm"], size)
    print("the same")


def rank_process(rank, size, ports, folders, output):
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True)
    rank_main(rank, size, ports, folders)


def run_ranks(size, folders):
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.1", 0))
        ports = {"gloo": first.getsockname()[1], "shm": second.getsockname()[1]}
    # Forked, a rank has torch already, which takes 2 s to import. It starts no thread before a rank does.
    context = multiprocessing.get_context("fork")
    ranks, outputs = [], []
    deadline = time.monotonic() + DEADLINE_S
    try:
        for rank in range(size):
            outputs.append(tempfile.TemporaryFile("w+"))
            arguments = (rank, size, ports, folders, outputs[-1].fileno())
            ranks.append(context.Process(target=rank_process, args=arguments))
            ranks[-1].start()
        while None in [process.exitcode for process in ranks] and not any(process.exitcode for process in ranks):
            if time.monotonic() > deadline:
                print(f"the ranks were not through after {DEADLINE_S} s")
                break
            time.sleep(0.05)
        if any(process.exitcode for process in ranks):
            time.sleep(1)  # the others' own words
    finally:
        for process in ranks:
            process.kill()  # does nothing to one that has ended
            process.join()
        statuses = [process.exitcode for process in ranks]
        for rank, output in enumerate(outputs):
            output.seek(0)
            print(f"--- rank {rank}, status {statuses[rank]}\n{output.read()}", end="")
    return 0 if statuses == [0] * size else 1


def main():
    what, *arguments = sys.argv[1:]
    *folders, version = arguments
    if torch.__version__.split("+")[0] != version:
        print(
            f"Cohort was built with LibTorch {version}, and this Python has torch {torch.__version__}: one process can "
            "have only one of them. Try: COHORT_PYTHON=a Python with that version."
        )
        return 1
    if what == "build":
        cohort_shm.load(*folders)
        return 0
    return run_ranks(int(what), folders)


if __name__ == "__main__":
    sys.exit(main())
