"""`corral bench`: rollout, training and a whole step, measured side by side with others on the same device."""
