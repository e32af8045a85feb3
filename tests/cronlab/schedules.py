"""Random schedules of the accepted language."""

from __future__ import annotations

import os
import random

from clustercron.errors import BadSchedule
from clustercron.schedule import parse

# Printed by every test that uses it, so that a failure can be run again.
SEED = int(os.environ.get("CLUSTERCRON_TEST_SEED", random.SystemRandom().randrange(10**9)))

MONTH_NAMES = ("jan", "FEB", "Mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAY_NAMES = ("sun", "mon", "TUE", "wed", "thu", "Fri", "sat")


def seeded(what: str) -> random.Random:
    """Return a generator of the run's seed for one test, and say the seed."""
    print(f"CLUSTERCRON_TEST_SEED={SEED}")
    return random.Random(f"{SEED} {what}")


def random_field(rng: random.Random, low: int, high: int, star: float, names: tuple[str, ...] = ()) -> str:
    def value(number: int) -> str:
        if number - low < len(names) and rng.random() < 0.3:
            return names[number - low]
        return f"{number:02}" if rng.random() < 0.05 else str(number)

    def item() -> str:
        first = rng.randint(low, high)
        last = rng.randint(first, high)
        kind = rng.random()
        if kind < star:
            return "*" if rng.random() < 0.6 else f"*/{rng.choice([1, 2, 3, 5, 7, 15, 20, 30, 60, 100])}"
        if kind < star + (1 - star) * 0.5:
            return value(first)
        step = "" if rng.random() < 0.6 else f"/{rng.randint(1, 9)}"
        return f"{value(first)}-{value(last)}{step}"

    return ",".join(item() for _ in range(rng.choice([1, 1, 1, 2, 3])))


def random_schedule(rng: random.Random) -> str:
    """Write a schedule, often in the hours in which clocks change."""
    while True:
        minute = random_field(rng, 0, 59, 0.25)
        hour = random_field(rng, 0, 23, 0.25) if rng.random() < 0.5 else random_field(rng, 0, 4, 0.1)
        day, month, weekday = "*", "*", "*"
        if rng.random() < 0.5:
            day = random_field(rng, 1, 31, 0.7)
            month = random_field(rng, 1, 12, 0.8, MONTH_NAMES)
            weekday = random_field(rng, 0, 7, 0.7, WEEKDAY_NAMES)
        text = f"{minute} {hour} {day} {month} {weekday}"
        try:
            parse(text)
        except BadSchedule as exc:
            # The one thing that a text written like this may still be wrong in.
            if "no month of this schedule has such a day" not in exc.message:
                raise
        else:
            return text
