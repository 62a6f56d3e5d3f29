"""Reward functions that misbehave, for test_scorer_pool.py; loaded as a file in the workers."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def length(response: str) -> float:
    return float(len(response))


async def slow_length(response: str) -> dict[str, float]:
    await asyncio.sleep(0.01)
    return {"score": float(len(response)), "words": len(response.split())}


def stops(response: str) -> float:
    breakpoint()
    return 1.0


def process_id(response: str) -> int:
    return os.getpid()


def slowly_in_pairs(response: str, answer: str) -> float:
    """Returns when two processes have the same response; the answer is a folder."""
    (Path(answer) / f"{response}-{os.getpid()}").touch()
    time.sleep(0.1)
    while len(list(Path(answer).glob(f"{response}-*"))) < 2:
        time.sleep(0.01)
    return 1.0


def imported(response: str) -> dict[str, Any]:
    return {"score": 0, **{name: name in sys.modules for name in ("torch", "transformers", "numpy", "pydantic")}}


def act(response: str, answer: Any) -> float:
    """Do what the response says."""
    if response == "raise":
        raise RuntimeError("something\nbroke")
    if response == "exit":
        sys.exit(3)
    if response == "die":
        os._exit(7)
    if response == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "nap":
        time.sleep(0.05)
    if response == "sleep":
        time.sleep(1000)
    if response == "hang in C":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock
    if response == "spin":
        while True:
            pass
    if response == "print":
        print("x" * 100_000, flush=True)
        os.write(1, b"raw bytes\n")
        sys.stdout.close()
    if response == "close everything":
        os.closerange(3, 100)
    return 1.0


def start_a_child_and_hang(response: str, answer: Any) -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with open(answer, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(1000)
    return 0.0


class Flight:
    """Calls in flight in this process, and the most that there were."""

    now = most = 0
    all_here = asyncio.Barrier(256)


async def act_async(response: str) -> dict[str, float]:
    """Do what the response says, among other calls."""
    Flight.now += 1
    Flight.most = max(Flight.most, Flight.now)
    try:
        await asyncio.sleep(0.02)
        if response == "block in a task":
            await asyncio.gather(block(), asyncio.sleep(0.01))
        elif response == "block":
            time.sleep(1000)
        elif response == "late":
            await asyncio.sleep(1000)
        elif response == "late and stubborn":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1000)
        elif response == "together":
            await Flight.all_here.wait()
        elif response.startswith("wait"):
            await asyncio.sleep(float(response.removeprefix("wait")))
        else:
            act(response, "")
    finally:
        Flight.now -= 1
    return {"score": 1.0, "process": os.getpid(), "most": Flight.most}


async def block() -> None:
    time.sleep(1000)


def ranks(responses: list[str], answer: str) -> list[float]:
    """The number of responses that are shorter; leaves a line in the file that the answer names."""
    with open(answer, "a") as file:
        file.write(f"{len(responses)}\n")
    if "fail" in responses:
        raise RuntimeError("one of them says fail")
    return [float(sum(len(other) < len(one) for other in responses)) for one in responses]
