"""The optimizer step across stages; read in this order.

decision          judges a step by sums over all stages
stage_optimizer   the transaction: states of a step, and the transitions between them
optimizers        the optimizers of a stage, as if they were one (`make` builds them)
rollback          a step of one optimizer that can be undone
step_state        state between steps: speculation, loss scale, skips
"""
