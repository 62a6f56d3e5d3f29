"""The reward functions of a recipe: one pool of processes for each environment that asks for one."""

from collections.abc import Callable, Mapping
from contextlib import suppress

from corral.recipe.schema import Environment, Reward
from corral.rewards.pool import Rewards, ScorerPool


class Pools:
    """By the environment's tag."""

    def __init__(self, environments: Mapping[str, Environment], make: Callable[[Reward], Rewards]) -> None:
        self.by_tag = {tag: make(environment.reward) for tag, environment in environments.items()}

    @classmethod
    def start(cls, environments: Mapping[str, Environment]) -> "Pools":
        """Returns when every function is loaded, in all pools at the same time; or raises what is wrong with one."""
        pools = cls(environments, ScorerPool)
        try:
            for pool in pools.by_tag.values():
                assert isinstance(pool, ScorerPool)
                pool.start()
            for pool in pools.by_tag.values():
                assert isinstance(pool, ScorerPool)
                pool.check()
        except BaseException:
            pools.close()
            raise
        return pools

    def close(self) -> None:
        for pool in self.by_tag.values():
            with suppress(Exception):
                pool.close()
