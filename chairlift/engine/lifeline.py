"""How a process ends with the one that started it, even where that one is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1  # of prctl(2)


def own_pid_for_children() -> int | None:
    """What a child is to give :func:`die_with`; ``None`` where it has to notice in another way.

    The system kills a child with the thread that started it, which is this process only for the main one.
    """
    return os.getpid() if threading.current_thread() is threading.main_thread() else None


def die_with(parent_pid: int) -> None:
    """Has the system kill this process when its parent ends: one that hangs would not notice by itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it has ended already
            os._exit(0)
