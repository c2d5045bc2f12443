"""Runs an example of Cohort's RPC and its PyTorch peer in turn, and compares their speed and their losses.

    python3 benchmarks/rpc/pairs.py PROGRAM [--rounds 5] [--arguments 2000] [--peer-arguments ...] [--transports all tcp]

PROGRAM is rpc_rnn or rpc_resnet50, as it was built. The peer is the Python program with the end of that name. Each run
has fresh processes, with one thread for operators in each. --peer-arguments are the peer's where they differ, such as
its own best number of splits. The last loss must be below the first. With the same arguments the first losses that the
programs print must agree within 1e-4.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import timing

LOSS = re.compile(r"loss ([0-9.]+)(?: to ([0-9.]+))?")
NUM_COMPARED = 20  # of the first losses: later ones differ by what rounding grew to


def run(what, command, losses):
    """Returns the seconds of a step that a program prints. Its first losses go to `losses`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    text = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True, timeout=600).stdout
    found = [float(each) for pair in LOSS.findall(text) for each in pair if each]
    if not found or found[-1] >= found[0]:
        sys.exit(f"{what} does not train:\n{text}")
    losses[what] = found[:NUM_COMPARED]
    rate = re.search(r"([0-9.]+) steps a second", text)
    seconds = 1 / float(rate[1]) if rate else float(re.search(r"([0-9.]+) s a step", text)[1])
    print(f"{what:16} {1e3 * seconds:10.3f} ms a step, loss {found[0]} to {found[-1]}", flush=True)
    return seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arguments", nargs="*", default=["2000"])
    parser.add_argument("--peer-arguments", nargs="*")
    parser.add_argument("--transports", nargs="*", default=["all", "tcp"])
    given = parser.parse_args()
    name = pathlib.Path(given.program).name.removeprefix("rpc_")
    peer = [sys.executable, str(HERE / f"{name}.py"), *(given.peer_arguments or given.arguments)]
    commands = {f"PyTorch, {transports}": [*peer, transports] for transports in given.transports}
    commands["Cohort"] = [given.program, *given.arguments]
    for what, command in commands.items():
        print(f"{what}: {' '.join(command)}")
    losses = {}
    variants = {what: lambda what=what: run(what, commands[what], losses) for what in commands}
    seconds = timing.compare(variants, given.rounds)
    if not given.peer_arguments:
        difference = max(abs(a - b) for of_run in losses.values() for a, b in zip(of_run, losses["Cohort"]))
        print(f"largest difference of the first {len(losses['Cohort'])} losses: {difference:.6f}")
        if difference > 1.01e-4:  # a bit more than what they are printed with
            sys.exit("the losses differ")
    images = float(given.arguments[0]) if name == "resnet50" else 1.0
    for baseline in list(commands)[:-1]:
        timing.report({what: seconds[what] for what in (baseline, "Cohort")}, baseline, "per s", images)


if __name__ == "__main__":
    main()
