"""What budget a site needs for runs that were chosen one after the other, beside their epsilon if fixed beforehand.

`python -m small_tasks.budgets`: exact figures, the same on each machine; and last, the CPU time of judging a budget
by many entries of a ledger, of as many different settings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tessera.shared.run_settings import Budget
from tessera.worker.privacy.accountant import admits, epsilon, least_budget, noise_multiplier
from tessera.worker.state.privacy_ledger import NoisySteps

DELTA = 1e-5

RUNS = {
    "A: epsilon 3, a tenth of the examples in each of 200 steps": (3.0, 0.1, 200),
    "B: epsilon 3, a sixtieth in each of 3,750 steps": (3.0, 1 / 60, 3750),
    "C: epsilon 1, a quarter in each of 40 steps": (1.0, 0.25, 40),
    "D: epsilon 3, a fiftieth in each of 100 steps": (3.0, 0.02, 100),
}


def run(target: float, rate: float, steps: int) -> NoisySteps:
    """Return what the run spends, with the least noise that keeps its target."""
    noise = noise_multiplier(Budget(epsilon=target, delta=DELTA), [], rate, steps)
    return NoisySteps(noise_multiplier=noise, sampling_rate=rate, steps=steps)


ENTRIES = 1000


def print_judging() -> None:
    """Print the CPU time of judging a budget by ENTRIES entries, in a new process and with one entry more."""
    entries = [
        NoisySteps(noise_multiplier=1 + number / 50, sampling_rate=(1 + number % 200) / 1000, steps=20)
        for number in range(ENTRIES)
    ]
    for most in (8.0, 3.0, 1.0):
        seconds = []
        for known in (entries[1:], entries):
            began = time.process_time()
            admits(known, Budget(epsilon=most, delta=DELTA))
            seconds.append(time.process_time() - began)
        print(f"epsilon {most:g}: {ENTRIES} entries {seconds[0]:.2f} s, one entry more {seconds[1]:.3f} s of CPU")


def main() -> None:
    runs = {name: run(*settings) for name, settings in RUNS.items()}
    a, b, c, d = runs.values()
    together = {"A twice": (a, a), "A and B": (a, b), "A and C": (a, c), "A and D": (a, d), "A, B and C": (a, b, c)}
    rows: dict[str, Sequence[NoisySteps]] = {**{name: (one,) for name, one in runs.items()}, **together}
    print(
        f"at delta {DELTA:g}\n\n| runs | noise | epsilon, fixed beforehand | budget | more |\n|---|---|---|---|---|"
    )
    for name, events in rows.items():
        fixed, budget = epsilon(events, DELTA), least_budget(events, DELTA)
        noise = ", ".join(f"{event.noise_multiplier:.2f}" for event in events)
        print(f"| {name} | {noise} | {fixed:.2f} | {budget:.2f} | {budget / fixed - 1:.0%} |")
    print()
    print_judging()


if __name__ == "__main__":
    main()
