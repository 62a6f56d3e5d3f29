"""`corral bench`: rollout, training and a whole step, measured beside other libraries on the same device."""
