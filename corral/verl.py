"""`python -m corral.verl data.train_files=... actor_rollout_ref.model.path=...`, in place of verl's `main_ppo`."""

import sys

from corral.cli.main import main

if __name__ == "__main__":
    sys.argv[1:] = ["train", "--dialect", "verl", "--", *sys.argv[1:]]
    main()
