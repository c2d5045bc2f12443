"""A run of recovery.py: its agents, the lines that its workers write, and what its log says of changes."""

import array
import atexit
import bisect
import collections
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
Event = collections.namedtuple("Event", "name seconds pid numbers")
Usage = collections.namedtuple("Usage", "mib held_mib descriptors threads")
ENDLESS = 10**9


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Events:
    """The lines that workers append to one file. A soak has millions of commits, so these are two arrays."""

    def __init__(self, path):
        self.path = path
        self.offset = 0
        self.all = []  # but commits
        self.starts = {}  # by pid: when a process was made, was ready, and its processor time until then in ms
        self.commit_seconds, self.commit_steps = array.array("d"), array.array("q")

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
            event = Event(name, int(nanoseconds) * 1e-9, int(pid), [int(n) for n in numbers])
            new.append(event)
            if name == "commit":
                self.commit_seconds.append(event.seconds)
                self.commit_steps.append(event.numbers[0])
            else:
                self.all.append(event)
            if name == "ready":
                self.starts[event.pid] = (started_at(event.pid), event.seconds, *event.numbers)
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

    def enters(self):
        return [e for e in self.all if e.name == "enter"]

    def generation(self):
        return max(e.numbers[0] for e in self.enters())

    def processes(self):
        """Pids of the newest generation, by their numbers in it."""
        newest = self.generation()
        return {e.numbers[1]: e.pid for e in self.enters() if e.numbers[0] == newest}

    def wait_for_reserve(self, number, seconds=120):
        """Until so many processes wait, ready, for a place."""
        end = time.monotonic() + seconds
        while True:
            self.read()
            newest = {e.pid: e.name for e in self.all}
            if sum(name == "ready" and is_alive(pid) for pid, name in newest.items()) >= number:
                return
            if time.monotonic() > end:
                raise SystemExit(f"no {number} processes in reserve in {seconds} s")
            time.sleep(0.005)

    def steps(self):
        """Seconds from each commit to the next one."""
        return [b - a for a, b in zip(self.commit_seconds, self.commit_seconds[1:])]

    def commits_between(self, begin, end):
        return bisect.bisect_left(self.commit_seconds, end) - bisect.bisect_left(self.commit_seconds, begin)

    def commit_after(self, seconds):
        """When the first one was after this time; None: never."""
        at = bisect.bisect_right(self.commit_seconds, seconds)
        return self.commit_seconds[at] if at < len(self.commit_seconds) else None

    def commit_before(self, seconds):
        at = bisect.bisect_left(self.commit_seconds, seconds)
        return self.commit_seconds[at - 1] if at > 0 else None

    def steps_of(self, num_processes):
        """Seconds from commit to commit in generations of so many processes, without the first step of each."""
        entries = sorted((e.seconds, e.numbers[2]) for e in self.enters())
        seconds = []
        for (begin, size), (end, _) in zip(entries, entries[1:] + [(float("inf"), 0)]):
            if size != num_processes:
                continue
            first, last = (bisect.bisect_left(self.commit_seconds, time) for time in (begin, end))
            commits = self.commit_seconds[first:last]
            seconds += [b - a for a, b in zip(commits, commits[1:])]
        return seconds

    def ledger(self):
        """How many steps have no line, and how many have two."""
        lines = bytearray(max(self.commit_steps) + 1)
        for step in self.commit_steps:
            lines[step] = min(lines[step] + 1, 2)
        return lines[1:].count(0), lines[1:].count(2)


class Run:
    """Agents of one run. Each is a process of its own group."""

    def __init__(self, arguments, folder, nodes="1:1", nproc=2):
        self.arguments = arguments
        self.events = Events(pathlib.Path(folder) / "events")
        self.log_path = pathlib.Path(folder) / "log"
        self.log = open(self.log_path, "w")
        self.temporary = pathlib.Path(folder) / "temporary"
        self.temporary.mkdir()
        self.nodes, self.nproc = nodes, nproc
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.agents = []
        atexit.register(self.stop)  # also after a failure

    def command(self):
        a = self.arguments
        hidden = str(a.hidden)
        if a.torchrun:
            # The best settings of torchrun. Its defaults: 30 s, 5 s and 3 times, 0.1 s.
            best = ["--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
                    "--monitor-interval=0.05"]  # fmt: skip
            return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.nproc}",
                    f"--nnodes={self.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.endpoint}",
                    "--local-addr=127.0.0.1", *([] if a.torchrun_default else best), "--max-restarts=100000",
                    str(HERE / "recovery_torch.py"), str(self.events.path), hidden, str(a.gloo_timeout)]  # fmt: skip
        return [a.cohort, "run", "--elastic", f"--nnodes={self.nodes}", f"--rdzv-endpoint={self.endpoint}",
                f"--nproc-per-node={self.nproc}", f"--warm-ranks={a.warm_ranks}", "--max-restarts=100000",
                "--no-secret", "--bind-to=none", "--shutdown-timeout=5", "--",
                a.worker, str(self.events.path), str(ENDLESS), hidden]  # fmt: skip

    def add_agent(self):
        # torchrun keeps one store for all attempts, and its workers find there the addresses of processes that are dead.
        # They wait for them, or fail. So each attempt gets a store of its own.
        environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TMPDIR=str(self.temporary),
                           TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # fmt: skip
        agent = subprocess.Popen(self.command(), stdout=self.log, stderr=self.log, env=environment,
                                 start_new_session=True)  # fmt: skip
        self.agents.append(agent)
        return agent

    def warm_up(self, processes):
        self.events.wait_for(lambda e: e.name == "enter" and e.numbers[2] == processes, "generation")
        self.events.wait_for_commits(20)
        self.wait_for_reserve()

    def wait_for_reserve(self):
        if not self.arguments.torchrun:
            self.events.wait_for_reserve(self.arguments.warm_ranks)

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

    def parts(self, pattern, skip=0):
        """{part: [ms]} of the log's lines of changes that have the pattern."""
        found = collections.defaultdict(list)
        lines = [line for line in self.log_path.read_text().splitlines() if re.search(pattern, line)]
        for line in lines[skip:]:
            for part, value in re.findall(r"(\w+)(?: <=)? ([\d.]+) ms", line):
                found[part].append(float(value))
        return found

    def left_behind(self):
        """Processes and files of the run that are still there, after stop()."""
        left = [str(path) for path in self.temporary.iterdir()]
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if str(self.events.path).encode() in command and int(pid) != os.getpid():
                left.append(f"process {pid}: {command.decode(errors='replace')}")
        return left


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


def stat_of(pid):
    """The fields of /proc/PID/stat after the name, from the state on."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_alive(pid):
    try:
        return stat_of(pid)[0] != "Z"
    except OSError:
        return False


def started_at(pid):
    """When it was made, on CLOCK_MONOTONIC, to 10 ms; None where it has ended."""
    try:
        ticks = int(stat_of(pid)[19])
    except OSError:
        return None
    slept = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return ticks / os.sysconf("SC_CLK_TCK") - slept


def usage(pid):
    """Resident MiB, MiB of files in memory that it holds, descriptors, threads."""
    status = open(f"/proc/{pid}/status").read().splitlines()
    values = {line.split(":")[0]: line.split()[1] for line in status if line.startswith(("VmRSS", "Threads"))}
    files = [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]
    held, count = 0, 0
    for file in files:
        try:
            held += os.stat(file).st_blocks * 512 if os.readlink(file).startswith("/memfd:") else 0
            count += 1
        except OSError:  # closed meanwhile
            pass
    return Usage(int(values["VmRSS"]) / 1024, held / 2**20, count, int(values["Threads"]))
