"""Board games in text: the kit that makes an environment of a game (`kit.py`), its prompts, and the games."""
