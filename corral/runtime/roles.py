"""From a role's name to the role, on the worker where it is to live."""

from pathlib import Path
from typing import Any

from corral.envs.registry import EnvSet, uses_rewards
from corral.model.load import load_model
from corral.recipe.mesh import mesh_shape
from corral.recipe.schema import Environment, Recipe
from corral.rewards.pools import Pools
from corral.runtime.model_workers import Actor, Critic, Scorer
from corral.runtime.rollout_worker import Player
from corral.runtime.worker import WorkerContext

ORDER = ("rewards", "actor", "reference", "critic", "rollout")
"""In which roles are built. Rewards first: their processes start while models are loaded, and a wrong one is known
before that. The rollout last: it may share the actor's tensors."""


def build_role(role: str, site: WorkerContext, recipe: Recipe, resume_from: Path | None) -> Any:
    """`resume_from`: a checkpoint whose model the policy starts as."""
    trained = recipe.model.path if resume_from is None else str(resume_from)
    match role:
        case "rewards":
            pools = Pools.start(rewarded(recipe))
            try:
                EnvSet(recipe.tagged_environments, pools.by_tag, recipe.rollout).close()  # before any model is loaded
            except BaseException:
                pools.close()
                raise
            return pools
        case "actor":
            return Actor("actor", site, recipe, trained)
        case "reference":
            return Scorer("reference", site, recipe, recipe.reference.path)
        case "critic":
            return Critic(site, recipe)
        case "rollout":
            return Player(site, recipe, engine_model(site, recipe, trained), site.hosted["rewards"])
    raise ValueError(f"there is no role {role}")


def rewarded(recipe: Recipe) -> dict[str, Environment]:
    """Environments whose reward is a function's, by tag."""
    return {tag: environment for tag, environment in recipe.tagged_environments.items() if uses_rewards(environment)}


def engine_model(site: WorkerContext, recipe: Recipe, path: str) -> Any:
    """The trainer's own, where it is here and whole; else a copy."""
    if "actor" in site.hosted and mesh_shape(recipe.train.parallel, site.size).is_whole:
        return site.hosted["actor"].trainer.model
    model = load_model(recipe.model.model_copy(update={"path": path}), site.device)
    return model.requires_grad_(False)
