"""The thread pool: right results from many callers at once, changes of size, forks, and silence when idle."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ralo import _core

TASKS = Path("/proc/self/task")


class Work:
    """A few small regions whose results are known: sums of whole numbers, exact in float32."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        weights = rng.integers(-9, 10, (33, 320)).astype(np.float32)  # (ic, oc)
        self.matrix = _core.Matrix("f32", 33, 320, weights.view(np.uint8), None, None)
        self.x = [rng.integers(-9, 10, (t, 33)).astype(np.float32) for t in (1, 2, 20)]
        self.want = [x @ weights for x in self.x]

    def right(self, times: int) -> bool:
        for _ in range(times):
            for x, want in zip(self.x, self.want, strict=True):
                y = np.full_like(want, np.nan)
                self.matrix.apply(x, y)
                out = np.full_like(want, np.nan)
                _core.act("relu", y, None, out)
                if not (np.array_equal(y, want) and np.array_equal(out, np.maximum(want, 0))):
                    return False
        return True


def test_many_small_regions_from_many_python_threads(threads):
    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(lambda seed: Work(seed).right(200), range(4)))


def test_size_changes_while_others_compute(threads):
    with ThreadPoolExecutor(3) as callers:
        running = [callers.submit(Work(seed).right, 200) for seed in range(3)]
        for i in range(60):
            _core.set_threads(1 + i % 4)
            time.sleep(0.001)
        assert all(r.result() for r in running)


@pytest.mark.skipif(not TASKS.exists(), reason="counts threads in /proc")
def test_set_threads_takes_effect(threads):
    def alive(n: int) -> int:
        _core.set_threads(n)
        assert _core.threads() == n
        assert Work(0).right(3)
        counts = []
        for _ in range(20):  # threads that have ended stay on the list for a moment
            time.sleep(0.005)
            counts.append(len(list(TASKS.iterdir())))
        return min(counts)

    single = alive(1)
    assert [alive(n) - single for n in (2, 5, 3, 1)] == [1, 4, 2, 0]  # the caller works too


@pytest.mark.parametrize("bad", [0, 1025])
def test_sizes_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="between 1 and 1024"):
        _core.set_threads(bad)
    with pytest.raises(TypeError):
        _core.set_threads(-1)


def alone(code: str) -> subprocess.CompletedProcess[str]:
    """Runs in a process of its own, so that what hangs is a failure and not the end of the tests."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{code}"
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}  # newer Pythons warn of every fork with threads
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)


RESIZE = """
import numpy as np
from ralo import _core

x = np.ones((20, 8), np.float32)
for i in range(10000):  # threads that start, work, fall asleep and end, all at once
    _core.set_threads(2 + i % 3)
    for _ in range(i % 3):
        _core.act("relu", x, None, x)
print("done")
"""


def test_size_changes_right_after_a_region():
    done = alone(RESIZE)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


FORK = """
import os, threading
from test_pool import Work
from ralo import _core

work, stop = Work(0), threading.Event()
_core.set_threads(3)
assert work.right(3)
busy = threading.Thread(target=lambda: [work.right(1) for _ in iter(stop.is_set, True)])
busy.start()  # so that some forks fall into the middle of a region
for i in range(20):
    child = os.fork()
    if child == 0:
        ok = work.right(3)
        _core.set_threads(2)
        os._exit(0 if ok and work.right(3) else 1)
    assert os.waitpid(child, 0)[1] == 0, i
stop.set()
busy.join()
assert work.right(3)
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes():
    done = alone(FORK)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_an_idle_pool_burns_no_cpu(threads):
    assert Work(0).right(50)
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_more_regions_than_epochs_have_numbers(threads):
    """Epochs are counted in 16 bits: what is left of one must not be taken for the one 65,536 regions later."""
    _core.set_threads(3)
    work = Work(0)
    assert work.right(23_000)  # three products of several tasks each


def test_threads_that_went_to_sleep_between_two_regions_wake_up(threads):
    _core.set_threads(3)
    work = Work(1)
    for pause in (0.0, 1e-4, 2e-4, 1e-3, 0.02) * 10:  # around the time that threads spin for
        time.sleep(pause)
        assert work.right(1)
