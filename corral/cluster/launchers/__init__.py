"""From a recipe to the files and commands that start it on a cluster. Each launcher is a function that returns
`LaunchFiles`, or an object that returns commands; only `ssh.py` runs them."""
