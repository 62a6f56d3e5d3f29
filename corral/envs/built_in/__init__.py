"""The environments that a recipe knows by name: each is the one environment class in the module of its name."""
