"""`python -m corral.verl data.train_files=... actor_rollout_ref.model.path=...`, in place of verl's `main_ppo`."""

import sys

from corral.cli.main import main

OPTIONS = ("-h", "--help", "--debug", "--post-mortem", "--allow-unsupported")
"""Options of `corral migrate`; all other words are verl's."""

if __name__ == "__main__":
    options = [word for word in sys.argv[1:] if word in OPTIONS]
    words = [word for word in sys.argv[1:] if word not in OPTIONS]
    sys.argv[1:] = ["migrate", "--system", "verl", "--train", *options, "--", *words]
    main()
