"""verl, from 0.3 on, and Search-R1, an early verl in which the model searches."""
