"""Other clocks for real processes, by libfaketime: a fixed offset each, with the monotonic clocks left alone."""

from __future__ import annotations

import time
from pathlib import Path


def library() -> str:
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    assert found, "libfaketime is missing: apt-get install faketime"
    return str(found[0])


class FakeClock:
    """A clock some seconds off; `set_to` and `shift` move it while processes use it."""

    def __init__(self, folder: Path, name: str, offset_s: float = 0.0) -> None:
        self._file = folder / f"{name}.faketime"
        self.offset_s = 0.0
        self.shift(offset_s)

    @property
    def env(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": library(),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }

    def shift(self, seconds: float) -> None:
        self.offset_s += seconds
        new = self._file.with_suffix(".new")
        new.write_text(f"{self.offset_s:+.3f}\n")
        new.replace(self._file)

    def set_to(self, epoch: float) -> None:
        self.shift(epoch - time.time() - self.offset_s)

    def now(self) -> float:
        return time.time() + self.offset_s
