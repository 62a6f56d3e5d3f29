"""A reward function in a module of its own, which the reward processes import without torch and pytest."""


def length(response: str) -> float:
    return len(response) % 3
