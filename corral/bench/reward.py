"""A reward that always teaches something. Imported by processes that have nothing else of Corral to load."""

import hashlib


def hash_reward(response: str) -> float:
    """A number in [0, 1) that is a function of the text alone. Different samples get different rewards, so no sample
    has advantage 0, and neither side can leave one out."""
    return int.from_bytes(hashlib.blake2b(response.encode(), digest_size=4).digest(), "big") / 2**32
