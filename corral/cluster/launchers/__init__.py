"""From a recipe to the files and commands that start it on somebody's cluster. Each launcher is a function that returns
a `Launch`; nothing is written or run here."""
