"""The mathematics of training: pure functions on tensors, no state, no I/O, nothing else of this package imported.

A batch is ragged, never padded. `N` trajectories are flat arrays of `T` tokens, one after the other, and `offsets`
(`N + 1` positions, from 0 to `T`) says where each begins. `mask` is True on the tokens the model generated; what stands
on any other token (prompt, observation) changes no result here, not even when it is NaN.

In the order in which an update uses them: `shaping` (rewards), `advantages`, `corrections` (another policy played),
`losses`, `kl`, `regularizers`, `values` (critic), and `aggregate` (tokens to one number). `ragged` is what they share.
"""
