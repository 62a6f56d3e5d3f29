"""Every engine against the contract. A new one is one more line of `ENGINES`."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from engine_contract import ENGINE_CONTRACT, MakeEngine
from test_native_engine import make_engine
from tiny import DEVICE

from corral.rollout.engine import Engine

ENGINES: dict[str, MakeEngine] = {
    "native-slots": lambda: make_engine(max_sequences=4),
    "native-paged": lambda: make_engine(max_sequences=4, core="paged"),
    "native-general": lambda: make_engine(max_sequences=4, core="general"),
}


@pytest.mark.parametrize("check", ENGINE_CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ENGINES)
def test_engine_keeps_its_contract(name: str, check: Callable[[MakeEngine], Awaitable[None]]) -> None:
    if name == "native-paged" and DEVICE.type == "cuda":
        pytest.skip("the kernels need heads of 32 and more: test_paged_on_gpu.py")
    made: list[Engine] = []

    def make() -> Engine:
        made.append(ENGINES[name]())
        return made[-1]

    async def run() -> None:
        await check(make)

    asyncio.run(run())
    for engine in made:
        engine.close()
