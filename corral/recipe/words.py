"""An algorithm in words, line by line, for the plan; and what is said of devices."""

from corral.recipe.mesh import MeshShape
from corral.recipe.placement import TransferKind
from corral.recipe.presets import CLIPS, ResolvedAlgorithm
from corral.recipe.schema import AdvantageName, AggregationName, LossName

ADVANTAGES: dict[AdvantageName, str] = {
    "gae": "generalised advantage estimation with a critic's values, whitened",
    "grpo": "reward minus the mean of the prompt's samples, divided by their standard deviation",
    "dr_grpo": "reward minus the mean of the prompt's samples",
    "rloo": "reward minus the mean of the prompt's other samples",
    "reinforce": "the reward still to come",
    "reinforce_plus_plus": "the reward still to come, whitened over the batch",
    "reinforce_plus_plus_baseline": "reward minus the mean of the prompt's samples, whitened over the batch",
    "remax": "reward minus that of a greedy answer to the same prompt",
    "opo": "reward minus the length-weighted mean of the prompt's samples",
    "gpg": "reward minus the mean of the prompt's samples, scaled up for the groups that teach nothing",
    "grpo_passk": "only the prompt's best sample counts, by its lead over the second best",
    "turn_grpo": "reward from a turn on, minus the mean of the same turn of the prompt's samples, over their deviation",
    "gigpo": "GRPO's, plus the same for turns that the prompt's samples took in the same state",
}
LOSSES: dict[LossName, str] = {
    "ppo": "clipped ratio of the new to the old probability, token by token",
    "gspo": "clipped ratio of the new to the old probability, of whole sequences",
    "cispo": "log-probability weighted with the clipped ratio; no token loses its gradient",
    "sapo": "a soft gate on the ratio in place of a clip",
    "gmpo": "geometric mean of a sequence's clipped ratios",
    "gpg": "log-probability weighted with the advantage; no ratio",
    "dro": "log-probability weighted with the advantage, and a quadratic penalty on leaving the old policy",
    "dppo_tv": "ratio, dropping tokens whose probability moved too far (total variation)",
    "dppo_kl": "ratio, dropping tokens whose probability moved too far (KL)",
}
AGGREGATIONS: dict[AggregationName, str] = {
    "token_mean": "mean over all tokens of an update",
    "token_sum": "sum over all tokens of an update",
    "seq_mean_token_sum": "sum over a trajectory's tokens, mean over trajectories",
    "seq_mean_token_mean": "mean over a trajectory's tokens, mean over trajectories",
    "seq_mean_token_sum_norm": "sum over a trajectory's tokens divided by a constant, mean over trajectories",
}
CORRECTIONS = {
    "none": "none",
    "token_tis": "token_tis: each token weighs min(trainer's / engine's probability, {cap:g})",
    "sequence_tis": "sequence_tis: each trajectory weighs min(trainer's / engine's probability, {cap:g})",
    "icepop": "icepop: tokens weigh trainer's / engine's probability, and are dropped outside [{floor:g}, {cap:g}]",
    "rejection": "rejection: a {level} is dropped if trainer's / engine's probability is outside [{floor:g}, {cap:g}]",
}
TRANSFERS: dict[TransferKind, str] = {
    "shared": "shared: gathered from the shards within each process",
    "collective": "collective: broadcast to the engines",
    "object": "object: through Ray's object store",
    "ipc": "ipc: through memory of the node that trainers and engines map",
}
DIMENSIONS = {"replicate": "replicas", "shard": "shards", "expert": "expert", "context": "context", "tensor": "tensor"}


def describe_mesh(mesh: MeshShape) -> str:
    """`2 shards x 2 tensor`; empty for one device."""
    sizes = {words: getattr(mesh, name) for name, words in DIMENSIONS.items()}
    return " x ".join(f"{size} {words}" for words, size in sizes.items() if size > 1)


def describe_transfer(kind: TransferKind, actor: MeshShape) -> str:
    if kind == "shared" and actor.is_whole:
        return "shared: nothing travels, the engine decodes with the trainer's own tensors"
    return TRANSFERS[kind]


def describe_algorithm(algorithm: ResolvedAlgorithm) -> dict[str, str]:
    """What to call each line, and what it says. Things that are off and rarely used are left out."""
    lines = {
        "advantage": describe_advantage(algorithm),
        "loss": describe_loss(algorithm),
        "aggregation": AGGREGATIONS[algorithm.aggregation] + describe_norm(algorithm),
        "KL": describe_kl(algorithm),
        "old log-probs": describe_old_logprobs(algorithm),
        "correction": CORRECTIONS[algorithm.correction_name].format(
            cap=algorithm.correction_cap, floor=algorithm.correction_floor, level=algorithm.correction_level
        ),
    }
    if algorithm.max_mean_ratio is not None:
        lines["mean ratio"] = (
            f"an update with a mean ratio of new to old probability above {algorithm.max_mean_ratio:g} is not made"
        )
    if algorithm.reward_clip is not None:
        lines["rewards"] = f"of a trajectory, within [{-algorithm.reward_clip:g}, {algorithm.reward_clip:g}]"
    if algorithm.entropy_coefficient:
        lines["entropy"] = f"bonus with coefficient {algorithm.entropy_coefficient:g}"
    if algorithm.llds_coefficient:
        lines["LLDS"] = f"penalty with coefficient {algorithm.llds_coefficient:g} on good samples becoming less likely"
    if algorithm.dynamic_sampling:
        lines["dynamic sampling"] = (
            f"groups with equal rewards are replaced by other prompts, in up to {algorithm.max_rounds} rounds"
        )
    if algorithm.overlong_buffer is not None:
        lines["overlong"] = (
            f"up to {algorithm.overlong_penalty:g} off the reward in the last {algorithm.overlong_buffer} tokens "
            "before the limit"
        )
    return lines


def describe_advantage(algorithm: ResolvedAlgorithm) -> str:
    words = f"{algorithm.advantage}: {ADVANTAGES[algorithm.advantage]}"
    if algorithm.needs_critic:
        words += f"; gamma {algorithm.gamma:g}, lambda {algorithm.gae_lambda:g}"
    elif algorithm.gamma != 1:
        words += f"; gamma {algorithm.gamma:g}"
    if algorithm.whiten:
        words += "; whitened over the batch"
    bound = algorithm.advantage_clip
    return words if bound is None else f"{words}; within [{-bound:g}, {bound:g}]"


def describe_loss(algorithm: ResolvedAlgorithm) -> str:
    words = f"{algorithm.loss}: {LOSSES[algorithm.loss]}"
    match algorithm.loss:
        case "gmpo":
            words += f"; log-ratio within [{-algorithm.clip_low:g}, {algorithm.clip_high:g}]"
        case loss if loss in CLIPS:
            words += f"; ratio within [{1 - algorithm.clip_low:g}, {1 + algorithm.clip_high:g}]"
        case "sapo":
            words += f"; tau {algorithm.sapo_tau_positive:g} and {algorithm.sapo_tau_negative:g}"
        case "dro":
            words += f"; beta {algorithm.dro_beta:g}"
        case "dppo_tv" | "dppo_kl":
            words += f"; threshold {algorithm.dppo_threshold:g}"
    return words if algorithm.dual_clip is None else f"{words}; dual clip {algorithm.dual_clip:g}"


def describe_norm(algorithm: ResolvedAlgorithm) -> str:
    return f" ({algorithm.aggregation_norm:g})" if algorithm.aggregation == "seq_mean_token_sum_norm" else ""


def describe_kl(algorithm: ResolvedAlgorithm) -> str:
    if algorithm.kl_where is None:
        return "none, so no reference model"
    words = f"in the {algorithm.kl_where}, estimator {algorithm.kl_estimator}, coefficient {algorithm.kl_coefficient:g}"
    if algorithm.kl_controller == "adaptive":
        words += f" to begin with, adapted to a KL of {algorithm.kl_target:g} over {algorithm.kl_horizon} trajectories"
    return words


def describe_old_logprobs(algorithm: ResolvedAlgorithm) -> str:
    if algorithm.old_logprobs == "engine":
        return "those the engine sampled with"
    return "recomputed by the trainer before the first update"
