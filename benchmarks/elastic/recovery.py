"""How long an elastic run stands still when a process dies, a host is silent or a node joins, beside torchrun.

  recovery.py kill   --kills 200              a process of one host is killed; a warm one takes its place
  recovery.py kill   --kills 20 --torchrun    the same with PyTorch's launcher and Gloo
  recovery.py silent --kills 200              the agent and the rank of one of two nodes are stopped for 3 s
  recovery.py join   --kills 20 --hidden 0    a second node joins and leaves; --hidden 0 is ResNet-18, 90 MB of state
  recovery.py soak   --kills 1000 --every 3   goodput, memory, descriptors and threads over many kills

Times are from the fault (or the line before the change) to the next committed step, on CLOCK_MONOTONIC. They include that
step; the median step is printed beside them. --cohort and --worker name the programs, in a build with -O3.
"""

import argparse
import atexit
import collections
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from timing import percentile

HERE = pathlib.Path(__file__).resolve().parent
Event = collections.namedtuple("Event", "name seconds pid numbers")
ENDLESS = 10**9


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Events:
    """The lines that workers append to one file."""

    def __init__(self, path):
        self.path = path
        self.offset = 0
        self.all = []

    def read(self):
        """Returns what is new."""
        if not self.path.exists():
            return []
        with open(self.path) as file:
            file.seek(self.offset)
            text = file.read()
        text = text[: text.rfind("\n") + 1]
        self.offset += len(text)
        new = []
        for line in text.splitlines():
            name, nanoseconds, pid, *numbers = line.split()
            new.append(Event(name, int(nanoseconds) * 1e-9, int(pid), [int(n) for n in numbers]))
        self.all += new
        return new

    def wait_for(self, is_it, what, seconds=60):
        """The first new event for which is_it(event). Fails after so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for event in self.read():
                if is_it(event):
                    return event
            time.sleep(0.0005)
        raise SystemExit(f"no {what} in {seconds} s")

    def wait_for_commits(self, number, seconds=60):
        """After the last line that was read."""
        count = 0

        def is_last(event):
            nonlocal count
            count += event.name == "commit"
            return count == number

        return self.wait_for(is_last, f"{number} commits", seconds)

    def processes(self):
        """Pids of the newest generation, by their numbers in it."""
        newest = max(e.numbers[0] for e in self.all if e.name == "enter")
        return {e.numbers[1]: e.pid for e in self.all if e.name == "enter" and e.numbers[0] == newest}

    def steps(self):
        """Seconds from each commit to the next one."""
        commits = [e.seconds for e in self.all if e.name == "commit"]
        return [b - a for a, b in zip(commits, commits[1:])]


class Run:
    """Agents of one run. Each is a process of its own group."""

    def __init__(self, arguments, folder, nodes="1:1", nproc=2):
        self.arguments = arguments
        self.events = Events(pathlib.Path(folder) / "events")
        self.log = open(pathlib.Path(folder) / "log", "w")
        self.nodes, self.nproc = nodes, nproc
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.agents = []
        atexit.register(self.stop)  # also after a failure

    def command(self):
        a = self.arguments
        hidden = str(a.hidden)
        if a.torchrun:
            return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.nproc}", "--nnodes=1:1",
                    "--rdzv-backend=c10d", f"--rdzv-endpoint={self.endpoint}", "--rdzv-conf=last_call_timeout=1",
                    "--monitor-interval=0.05", "--max-restarts=100000", str(HERE / "recovery_torch.py"),
                    str(self.events.path), hidden]  # fmt: skip
        return [a.cohort, "run", "--elastic", f"--nnodes={self.nodes}", f"--rdzv-endpoint={self.endpoint}",
                f"--nproc-per-node={self.nproc}", f"--warm-ranks={a.warm_ranks}", "--max-restarts=100000",
                "--no-secret", "--bind-to=none", "--shutdown-timeout=5", "--",
                a.worker, str(self.events.path), str(ENDLESS), hidden]  # fmt: skip

    def add_agent(self):
        # torchrun keeps one store for all attempts, and its workers find there the addresses of processes that are dead.
        # They wait for them, or fail. So each attempt gets a store of its own.
        environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        agent = subprocess.Popen(self.command(), stdout=self.log, stderr=self.log, env=environment,
                                 start_new_session=True)  # fmt: skip
        self.agents.append(agent)
        return agent

    def stop(self):
        for agent in self.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in self.agents:
            try:
                agent.wait(20)
            except subprocess.TimeoutExpired:
                for pid in [*children(agent.pid), agent.pid]:
                    kill(pid, signal.SIGKILL)
                agent.wait()
        self.log.close()


def children(pid):
    try:
        return [int(c) for t in os.listdir(f"/proc/{pid}/task")
                for c in open(f"/proc/{pid}/task/{t}/children").read().split()]  # fmt: skip
    except OSError:
        return []


def kill(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def usage(pid):
    """Resident MiB, descriptors, threads."""
    status = open(f"/proc/{pid}/status").read().splitlines()
    values = {line.split(":")[0]: line.split()[1] for line in status if line.startswith(("VmRSS", "Threads"))}
    return int(values["VmRSS"]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(values["Threads"])


def print_times(what, seconds, steps):
    step = percentile(steps, 0.5)
    print(f"{what}: {len(seconds)} times, median {1e3 * percentile(seconds, 0.5):.1f} ms, "
          f"p99 {1e3 * percentile(seconds, 0.99):.1f} ms, maximum {1e3 * max(seconds):.1f} ms; "
          f"median step {1e3 * step:.2f} ms")  # fmt: skip


def warm_up(run, processes):
    run.events.wait_for(lambda e: e.name == "enter" and e.numbers[2] == processes, "generation")
    run.events.wait_for_commits(20)


def step_of_two_after(generation):
    """Whether an event is a step that is committed after two processes have entered a later generation."""
    entered = set()

    def is_it(event):
        if event.name == "enter" and event.numbers[0] > generation:
            entered.add(event.numbers[1])
        return event.name == "commit" and len(entered) == 2

    return is_it


def kill_processes(arguments, folder):
    run = Run(arguments, folder)
    run.add_agent()
    warm_up(run, 2)
    seconds = []
    for number in range(arguments.kills):
        time.sleep(arguments.every)
        run.events.read()
        before = max(e.numbers[0] for e in run.events.all if e.name == "enter")
        victim = run.events.processes()[number % 2]
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        step = run.events.wait_for(step_of_two_after(before), "step after a kill", 180)
        seconds.append(step.seconds - killed)
        run.events.wait_for_commits(5)
    run.stop()
    print_times("kill to the next committed step", seconds, run.events.steps())


def silence_hosts(arguments, folder):
    run = Run(arguments, folder, nodes="1:2", nproc=1)
    run.add_agent()
    warm_up(run, 1)
    other = run.add_agent()
    seconds = []
    for _ in range(arguments.kills):
        run.events.wait_for(lambda e: e.name == "enter" and e.numbers[2] == 2, "generation of two nodes")
        run.events.wait_for_commits(20)
        time.sleep(arguments.every)
        run.events.read()
        stopped = [other.pid, *children(other.pid)]
        began = time.monotonic()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        alone = run.events.wait_for(lambda e: e.name == "enter" and e.numbers[2] == 1, "generation without it")
        seconds.append(run.events.wait_for_commits(1).seconds - began)
        assert alone.pid not in stopped
        time.sleep(max(0, began + 3 - time.monotonic()))
        run.events.read()
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        if arguments.fresh:  # another agent, as one that was given up comes back later each time
            for pid in stopped[::-1]:
                kill(pid, signal.SIGKILL)
            other.wait()
            other = run.add_agent()
    run.stop()
    print_times("silence to the next committed step", seconds, run.events.steps())


def join_nodes(arguments, folder):
    run = Run(arguments, folder, nodes="1:2", nproc=1)
    run.add_agent()
    warm_up(run, 1)
    seconds = []
    for _ in range(arguments.kills):
        other = run.add_agent()
        entered = run.events.wait_for(lambda e: e.name == "enter" and e.numbers[2] == 2, "generation of two nodes")
        after = run.events.wait_for_commits(1)
        before = max(e.seconds for e in run.events.all if e.name == "commit" and e.seconds < entered.seconds)
        seconds.append(after.seconds - before)
        run.events.wait_for_commits(5)
        other.send_signal(signal.SIGTERM)
        other.wait(60)
        run.agents.remove(other)
        run.events.wait_for(lambda e: e.name == "enter" and e.numbers[2] == 1, "generation without it")
        run.events.wait_for_commits(5)
    run.stop()
    print_times("from the last commit before a join to the first after it", seconds, run.events.steps())


def soak(arguments, folder):
    run = Run(arguments, folder)
    agent = run.add_agent()
    warm_up(run, 2)
    time.sleep(5)
    run.events.read()
    undisturbed = percentile(run.events.steps()[20:], 0.5)
    began, first = time.monotonic(), run.events.all[-1].numbers[0]
    for number in range(arguments.kills):
        time.sleep(max(0, began + (number + 1) * arguments.every - time.monotonic()))
        run.events.read()
        processes = run.events.processes()
        os.kill(processes[number % 2], signal.SIGKILL)
        if number % max(1, arguments.kills // 10) == 0:
            mib, descriptors, threads = usage(agent.pid)
            print(f"after {number} kills: agent {mib:.1f} MiB, {descriptors} descriptors, {threads} threads; "
                  f"rank {', '.join(f'{value:.0f}' for value in usage(processes[1 - number % 2]))}", flush=True)  # fmt: skip
    run.events.wait_for_commits(1)
    seconds = time.monotonic() - began
    last = run.events.all[-1].numbers[0]
    print(f"{arguments.kills} kills, one each {arguments.every} s: {last - first} steps in {seconds:.1f} s; "
          f"undisturbed step {1e3 * undisturbed:.2f} ms: goodput {(last - first) * undisturbed / seconds:.4f}")  # fmt: skip
    commits = [e.numbers[0] for e in run.events.all if e.name == "commit"]
    missing = set(range(1, max(commits) + 1)) - set(commits)
    print(f"steps without a line: {len(missing)}; with two: {len(commits) - len(set(commits))}")
    run.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = {"kill": kill_processes, "silent": silence_hosts, "join": join_nodes, "soak": soak}
    parser.add_argument("mode", choices=modes)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=0.3, help="seconds between two faults")
    parser.add_argument("--hidden", type=int, default=64, help="width of the MLP; 0: ResNet-18")
    parser.add_argument("--warm-ranks", type=int, default=1)
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="silent: kill what was silent, and start it anew")
    build = HERE.parent.parent / "build" / "benchmarks"
    parser.add_argument("--cohort", default=str(build / "apps" / "cohort"))
    parser.add_argument("--worker", default=str(build / "benchmarks" / "elastic" / "elastic_recovery_worker"))
    arguments = parser.parse_args()
    if arguments.torchrun and arguments.mode not in ("kill", "soak"):
        parser.error("--torchrun goes with kill and soak")
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        try:
            modes[arguments.mode](arguments, folder)
        except BaseException:
            print(open(f"{folder}/log").read()[-4000:], file=sys.stderr)
            raise


if __name__ == "__main__":
    main()
