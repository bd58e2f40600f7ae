"""Ctrl-C and SIGTERM: finish the step, save, leave."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A run left early because it was asked to, after saving.

    Not an Exception, like KeyboardInterrupt itself: no handler of errors should swallow it.
    """

    def __init__(self, signal_number: int, step: int, checkpoint: Path) -> None:
        super().__init__(f"Stopped by {signal.Signals(signal_number).name} after step {step}; saved in {checkpoint}.")
        self.signal_number, self.step, self.checkpoint = signal_number, step, checkpoint

    @property
    def exit_status(self) -> int:
        """What a shell expects of a command ended by that signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signal_number


class StopSignals:
    """Notes SIGINT and SIGTERM while it is entered; the handlers of before are back afterwards.

    A second SIGINT raises KeyboardInterrupt on the spot, and a third ends the process as by default. A second SIGTERM
    changes nothing: torchrun sends one after the Ctrl-C that reached its processes anyway. Only Python's main
    thread gets signals; in another one this does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The first signal that came."""
        self._before: dict[int, Any] = {}
        self._interrupts = 0

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts == 2:
                signal.signal(number, signal.SIG_DFL)
                raise KeyboardInterrupt
