"""How long an elastic run stands still when a process dies, a host is silent or a node joins, beside torchrun.

  recovery.py kill   --kills 200                  a process of one host is killed; a warm one takes its place
  recovery.py kill   --kills 50 --warm-ranks 0    its successor starts only then: what the default costs
  recovery.py kill   --kills 50 --hidden 0        the same with ResNet-18: 90 MB of state
  recovery.py kill   --kills 20 --torchrun        the same with PyTorch's launcher and Gloo, at its best settings
  recovery.py silent --kills 200                  the agent and the rank of one of two nodes are stopped for 3 s
  recovery.py silent --kills 10 --torchrun --fresh
  recovery.py join   --kills 20 --hidden 0        a second node joins and leaves
  recovery.py soak   --kills 40 --every 15        goodput, and what a kill costs, part by part
  recovery.py soak   --kills 1000 --check         fails where memory, descriptors or threads grow, or something is left

Times are from the fault (or the line before the change) to the next committed step, on CLOCK_MONOTONIC. They include that
step; the median step is printed beside them. --cohort and --worker name the programs, in a build with -O3.
"""

import argparse
import collections
import os
import signal
import sys
import tempfile
import time

from recovery_run import HERE, Run, children, is_alive, kill, usage

sys.path.insert(0, str(HERE.parent))
from timing import percentile


def median(values):
    return percentile(values, 0.5) if values else float("nan")


def print_times(what, seconds, steps):
    print(f"{what}: {len(seconds)} times, median {1e3 * median(seconds):.1f} ms, "
          f"p99 {1e3 * percentile(seconds, 0.99):.1f} ms, maximum {1e3 * max(seconds):.1f} ms; "
          f"median step {1e3 * median(steps):.2f} ms")  # fmt: skip


def print_parts(what, parts, names):
    """Medians of what the log says."""
    texts = [f"{name} {median(parts[name]):.1f} (max {max(parts[name]):.1f})" for name in names if parts[name]]
    print(f"  {what}, medians in ms: {', '.join(texts)}")


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
    run.warm_up(2)
    seconds = []
    for number in range(arguments.kills):
        time.sleep(arguments.every)
        run.wait_for_reserve()
        run.events.read()
        before = run.events.generation()
        victim = run.events.processes()[number % 2]
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        step = run.events.wait_for(step_of_two_after(before), "step after a kill", 180)
        seconds.append(step.seconds - killed)
        run.events.wait_for_commits(5)
    run.stop()
    print_times("kill to the next committed step", seconds, run.events.steps())
    if not arguments.torchrun:
        print_parts("the agent's lines", run.parts(r"generation \d+: .*detect <="), ["detect", "agree", "rebuild", "redo"])


def silence_hosts(arguments, folder):
    run = Run(arguments, folder, nodes="1:2", nproc=1)
    run.add_agent()
    run.warm_up(1)
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
            run.agents.remove(other)
            other = run.add_agent()
    run.stop()
    print_times("silence to the next committed step", seconds, run.events.steps())


def join_nodes(arguments, folder):
    run = Run(arguments, folder, nodes="1:2", nproc=1)
    run.add_agent()
    run.warm_up(1)
    joins = []
    for _ in range(arguments.kills):
        other = run.add_agent()
        run.events.wait_for(lambda e: e.name == "enter" and e.numbers[1:3] == [0, 2], "generation of two nodes")
        joins.append(run.events.generation())
        run.events.wait_for_commits(8)
        other.send_signal(signal.SIGTERM)
        other.wait(60)
        run.agents.remove(other)
        run.events.wait_for(lambda e: e.name == "enter" and e.numbers[2] == 1, "generation without it")
        run.events.wait_for_commits(5)
    run.stop()
    print_joins(run, joins)


def print_joins(run, joins):
    """The step that ends the interval is one of two processes, so the median of these is what a join adds to."""
    entered = {e.numbers[0]: e.seconds for e in run.events.enters() if e.numbers[1] == 0}
    begin = [run.events.commit_before(entered[number]) for number in joins]
    end = [run.events.commit_after(entered[number]) for number in joins]
    whole = [b - a for a, b in zip(begin, end)]
    step = median(run.events.steps_of(2))
    print_times("from the last commit before a join to the first after it", whole, run.events.steps_of(2))
    print(f"  median step of one process {1e3 * median(run.events.steps_of(1)):.1f} ms, of two {1e3 * step:.1f} ms")
    stalls = [seconds - step for seconds in whole]
    print_times("  without the median step of two: the others are held up", stalls, run.events.steps_of(2))
    before = [entered[number] - seconds for number, seconds in zip(joins, begin)]
    first = [seconds - entered[number] for number, seconds in zip(joins, end)]
    print(f"  medians in ms: from the commit until the survivor has entered {1e3 * median(before):.1f}, "
          f"first step of two {1e3 * median(first):.1f}, {1e3 * (median(first) - step):.1f} above the others")  # fmt: skip
    survivor = r"generation \d+, process 0 of 2,"
    print_parts("of it, the survivor's lines", run.parts(survivor), ["agree", "rebuild", "state"])
    joining = run.parts(r"generation \d+, process 1 of 2,")
    joining["copy"] = joining["process"]
    print_parts("the joining process's lines", joining, ["agree", "rebuild", "copy"])


# Seconds that are lost until the next committed step, while the next process starts, and later; the time until that step;
# when the process that is in reserve next was made, and was ready, and its processor time in ms.
Parts = collections.namedtuple("Parts", "gap start later until_step reserve")


class Soak:
    """Kills at a fixed interval, and what they cost."""

    def __init__(self, arguments, folder):
        self.arguments = arguments
        self.run = Run(arguments, folder)
        self.agent = self.run.add_agent()
        self.kills, self.samples = [], {}

    def sample(self, number):
        """Of the agent, where nothing is under way: after so many kills."""
        self.run.wait_for_reserve()
        self.samples[number] = of_agent = usage(self.agent.pid)
        ranks = [usage(pid) for pid in self.run.events.processes().values() if is_alive(pid)]
        texts = [f"{name} {u.mib:.1f} MiB, {u.held_mib:.1f} MiB in files, {u.descriptors} descriptors, {u.threads} threads"
                 for name, u in [("agent", of_agent), *(("rank", rank) for rank in ranks[:1])]]  # fmt: skip
        print(f"after {number} kills: {'; '.join(texts)}", flush=True)

    def kill_processes(self):
        arguments, events = self.arguments, self.run.events
        tenth = max(1, arguments.kills // 10)
        self.run.warm_up(2)
        time.sleep(2)
        self.undisturbed = time.monotonic()
        time.sleep(arguments.undisturbed)
        began = time.monotonic()
        for number in range(arguments.kills):
            if number % tenth == 0 or number == min(tenth, 100):
                self.sample(number)
            events.read()
            victim = events.processes().get(number % 2)
            self.kills.append(time.monotonic())
            if victim is not None:  # torchrun may not have started it again
                kill(victim, signal.SIGKILL)
            time.sleep(max(0, began + (number + 1) * arguments.every - time.monotonic()))
        self.end = time.monotonic()
        events.wait_for_commits(5)
        self.sample(arguments.kills)

    def lost(self, begin, end):
        """Seconds in which no step was made, at the rate before the first kill."""
        return end - begin - self.run.events.commits_between(begin, end) * self.mean_step

    def parts_of(self, begin, end):
        """What the kill at `begin` has cost until `end`; None where no step of two processes came before."""
        events = self.run.events
        entered = {}
        for event in events.enters():
            if begin < event.seconds < end:
                entered.setdefault(event.numbers[0], []).append(event.seconds)
        whole = [max(times) for times in entered.values() if len(times) == 2]
        step = events.commit_after(whole[0]) if whole else None
        starts = [start for start in events.starts.values() if begin < start[1] < end and start[0] is not None]
        if step is None or step > end:
            return None
        gap = self.lost(begin, step)
        start = max(0.0, self.lost(max(step, starts[0][0]), max(step, starts[0][1]))) if starts else 0.0
        later = self.lost(begin, end) - gap - start
        return Parts(gap, start, later, step - begin, starts[0] if starts else None)

    def print_goodput(self):
        events, kills, arguments = self.run.events, self.kills, self.arguments
        undisturbed = events.commits_between(self.undisturbed, kills[0])
        self.mean_step = (kills[0] - self.undisturbed) / undisturbed
        first = events.commits_between(0, self.undisturbed)
        commits = events.commit_seconds[first : first + undisturbed]
        steps = [b - a for a, b in zip(commits, commits[1:])]
        seconds, number = self.end - kills[0], events.commits_between(kills[0], self.end)
        lost = self.lost(kills[0], self.end) / len(kills)
        print(f"{len(kills)} kills, one each {arguments.every:g} s: {number} steps in {seconds:.1f} s; undisturbed step "
              f"{1e3 * self.mean_step:.3f} ms in the mean, {1e3 * median(steps):.3f} ms in the median")  # fmt: skip
        print(f"goodput {number * self.mean_step / seconds:.4f} (of the median step {number * median(steps) / seconds:.4f}); "
              f"lost per kill {1e3 * lost:.1f} ms; goodput at a kill each 600 s, computed: {1 - lost / 600:.6f}")  # fmt: skip
        parts = [self.parts_of(begin, end) for begin, end in zip(kills, kills[1:] + [self.end])]
        parts = [part for part in parts if part is not None]
        mean = [1e3 * sum(part[i] for part in parts) / max(1, len(parts)) for i in range(3)]
        print(f"of it, means of {len(parts)} kills: {mean[0]:.1f} ms until the next committed step, {mean[1]:.1f} ms of slower "
              f"steps while the next process starts, {mean[2]:.1f} ms later")  # fmt: skip
        print(f"medians: kill to the next committed step {1e3 * median([part.until_step for part in parts]):.1f} ms", end="")
        starts = [part.reserve for part in parts if part.reserve is not None]
        if starts:
            print(f"; start of the next process {1e3 * median([ready - made for made, ready, _ in starts]):.0f} ms, of it "
                  f"{median([processor for *_, processor in starts]):.0f} ms of processor time", end="")  # fmt: skip
        print()

    def check(self):
        """Returns what has grown, is missing or is left."""
        wrong = []
        missing, twice = self.run.events.ledger()
        print(f"steps without a line: {missing}; with two: {twice}")
        if missing:
            wrong.append(f"{missing} steps have no line")
        if twice > 2 * len(self.kills):
            wrong.append(f"{twice} steps have two lines")
        first, last = self.samples[min(100, max(1, self.arguments.kills // 10))], self.samples[self.arguments.kills]
        for name in ("mib", "held_mib"):
            if getattr(last, name) > getattr(first, name) + 2:
                wrong.append(f"{name} of the agent has grown from {getattr(first, name):.1f} to {getattr(last, name):.1f}")
        for name in ("descriptors", "threads"):
            if getattr(last, name) != getattr(first, name):
                wrong.append(f"{name} of the agent: {getattr(first, name)}, then {getattr(last, name)}")
        wrong += [f"{left} is left" for left in self.run.left_behind()]
        return wrong


def soak(arguments, folder):
    soak = Soak(arguments, folder)
    soak.kill_processes()
    soak.run.stop()
    soak.print_goodput()
    wrong = soak.check()
    for line in wrong:
        print(f"wrong: {line}")
    if wrong and arguments.check:
        raise SystemExit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = {"kill": kill_processes, "silent": silence_hosts, "join": join_nodes, "soak": soak}
    parser.add_argument("mode", choices=modes)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, help="seconds between two faults; 0.3, soak: 3")
    parser.add_argument("--hidden", type=int, default=64, help="width of the MLP; 0: ResNet-18")
    parser.add_argument("--warm-ranks", type=int, help="1; join: 0, as the start of one takes time from the steps after it")
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--torchrun-default", action="store_true", help="torchrun with the settings that it has by itself")
    parser.add_argument("--gloo-timeout", type=int, help="seconds; 1800, silent: 5, as nothing else ends a wait there")
    parser.add_argument("--fresh", action="store_true", help="silent: kill what was silent, and start it anew")
    parser.add_argument("--undisturbed", type=float, default=20, help="soak: seconds before the first kill")
    parser.add_argument("--check", action="store_true", help="soak: fail where something grows, is missing or is left")
    build = HERE.parent.parent / "build" / "benchmarks"
    parser.add_argument("--cohort", default=str(build / "apps" / "cohort"))
    parser.add_argument("--worker", default=str(build / "benchmarks" / "elastic" / "elastic_recovery_worker"))
    arguments = parser.parse_args()
    arguments.torchrun = arguments.torchrun or arguments.torchrun_default
    if arguments.every is None:
        arguments.every = 3 if arguments.mode == "soak" else 0.3
    if arguments.warm_ranks is None:
        arguments.warm_ranks = 0 if arguments.mode == "join" else 1
    if arguments.gloo_timeout is None:
        arguments.gloo_timeout = 5 if arguments.mode == "silent" else 1800
    if arguments.torchrun and arguments.mode == "join":
        parser.error("--torchrun goes with kill, silent and soak")
    if arguments.torchrun and arguments.mode == "silent" and not arguments.fresh:
        parser.error("silent --torchrun needs --fresh: an agent that torchrun has given up does not come back")
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        try:
            modes[arguments.mode](arguments, folder)
        except BaseException:
            print(open(f"{folder}/log").read()[-4000:], file=sys.stderr)
            raise


if __name__ == "__main__":
    main()
