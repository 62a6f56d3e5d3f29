"""The mathematics of training: pure functions on tensors, no state, no I/O, nothing else of this package imported.

A batch is ragged, never padded. `N` trajectories are flat arrays of `T` tokens, one after the other, and `offsets`
(`N + 1` positions, from 0 to `T`) says where each begins. `mask` is True on the tokens the model generated; what stands
on any other token (prompt, observation) changes no result here, not even when it is NaN.

In the order in which an update uses them: `advantages` (and what happens to rewards before), `corrections` (tokens that
another policy sampled), `losses` (policy, value, regularizers, KL, and from tokens to one number) with `pair_losses`
(answers of which one was preferred). `ragged` has the reductions that they have in common. `declarations` says how a
part is declared, once, beside its function: recipes, rules, plans and reference pages follow from that.
"""
