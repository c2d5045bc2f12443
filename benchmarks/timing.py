"""How the Python programs here time and compare: the Python twin of cohort/bench.

Variants take turns, one round each, in an order that reverses from turn to turn. A ratio is the median of the
ratios within a turn. So a machine that is slow for a while is slow for all.
"""

import math


def percentile(values, part):
    """Linear between the two nearest values, as bench::percentile."""
    values = sorted(values)
    place = part * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def compare(variants, rounds):
    """Calls each of variants {name: function that returns seconds} `rounds` times. Returns {name: [seconds]}."""
    seconds = {name: [] for name in variants}
    for turn in range(rounds):
        for name in list(variants)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(variants[name]())
    return seconds


def ratios(first, second):
    """Above 1: `second` was faster in this turn."""
    return [a / b for a, b in zip(first, second)]


def report(seconds, baseline, unit, per_second):
    """Prints a line for each variant: min, median and 99th percentile of the time in ms, `per_second` units per
    second of the median, and the ratio to the baseline with the least and the largest of a turn."""
    print(f"{'':32} {'min ms':>10} {'median ms':>10} {'p99 ms':>10} {unit:>10}  ratio (of turns)")
    for name, values in seconds.items():
        least, median, high = (1e3 * percentile(values, part) for part in (0, 0.5, 0.99))
        of_turns = ratios(seconds[baseline], values)
        text = f"{percentile(of_turns, 0.5):.2f} ({min(of_turns):.2f} to {max(of_turns):.2f})"
        rate = per_second / (median / 1e3)
        print(f"{name:32} {least:10.2f} {median:10.2f} {high:10.2f} {rate:10.1f}  {text}")
