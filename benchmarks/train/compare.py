"""The quick job by `cohort train` and by its PyTorch peer, in turn, in one run: images/s, data wait, start, memory.

    python benchmarks/train/compare.py --cohort build/release/apps/cohort --data data/fashion-mnist --rounds 2

Prints a table with the ratio to the best of the peer's runs. Run it on a machine that does nothing else: OpenMP's threads
spin, and one busy neighbour makes either side many times slower.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(__file__))
import fashion_peer

HERE = os.path.dirname(os.path.abspath(__file__))


def run(command):
    """Returns (text, seconds, peak PSS in bytes) of a whole process tree."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak = [0]

    def watch():
        while process.poll() is None:
            peak[0] = max(peak[0], fashion_peer.tree_pss(process.pid))
            time.sleep(0.2)

    watcher = threading.Thread(target=watch)
    watcher.start()
    text = process.communicate()[0]
    watcher.join()
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{text}")
    return text, time.perf_counter() - begin, peak[0]


def cohort(arguments, *settings):
    with tempfile.TemporaryDirectory() as folder:
        config = os.path.join(HERE, "..", "..", "configs", "fashion-vgg.yaml")
        command = [arguments.cohort, "train", "--config", config, f"data.path={arguments.data}"]
        text, seconds, peak = run([*command, f"run.dir={folder}/run", "run.progress=plain", *settings])
    rows = re.findall(r"^epoch .* (\d+) samples/s .* data wait ([\d.]+) %", text, re.MULTILINE)
    return [(float(rate), float(wait) / 100) for rate, wait in rows], seconds, peak


def peer(arguments, *options):
    command = [sys.executable, os.path.join(HERE, "fashion_peer.py"), "--data", arguments.data, *options]
    text, _, peak = run(command)
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [row for row in rows if "peak_pss_bytes" not in row], peak


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cohort", required=True)
    parser.add_argument("--data", default="data/fashion-mnist")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    arguments = parser.parse_args()
    epochs = ["--epochs", str(arguments.epochs)]

    ours, theirs, tuned, our_peak, their_peak = {}, {}, 0.0, 0, 10**18
    for _ in range(arguments.rounds):
        for workers in arguments.workers:
            rows, _, peak = cohort(arguments, f"train.epochs={arguments.epochs}", f"data.workers={workers}")
            ours[workers] = max(ours.get(workers, (0, 0)), max(rows))
            our_peak = max(our_peak, peak)
            rows, peak = peer(arguments, *epochs, "--workers", str(workers))
            theirs[workers] = max(theirs.get(workers, 0), max(row["images_per_second"] for row in rows))
            their_peak = min(their_peak, peak)
            rows, _ = peer(arguments, *epochs, "--workers", str(workers), "--tuned-malloc")
            tuned = max(tuned, max(row["images_per_second"] for row in rows))
    best = max(theirs.values())
    for workers in arguments.workers:
        rate, wait = ours[workers]
        print(f"cohort, {workers} workers: {rate:8.0f} images/s, data wait {100 * wait:.1f} %, {rate / best:.2f}x")
        print(f"pytorch, {workers} workers: {theirs[workers]:8.0f} images/s, {theirs[workers] / best:.2f}x")
    print(f"pytorch, tuned malloc, best of its workers: {tuned:.0f} images/s, {tuned / best:.2f}x")
    print(f"peak PSS: cohort {our_peak / 2**20:.0f} MiB, pytorch {their_peak / 2**20:.0f} MiB, {our_peak / their_peak:.2f}")

    one_step = ["train.max_steps=1", "train.eval_every=0", "run.tensorboard=false"]
    start = min(cohort(arguments, *one_step, "data.workers=0")[1] for _ in range(3))
    first = min(peer(arguments, "--first-step")[0][0]["first_step_seconds"] for _ in range(3))
    print(f"to the end of the first step: cohort {start:.2f} s (whole process, with its checkpoint), pytorch {first:.2f} s")


if __name__ == "__main__":
    main()
