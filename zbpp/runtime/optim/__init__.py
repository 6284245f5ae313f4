"""The optimizer step across stages: `stage_optimizer` is its transaction.

`norms` and `decision` tell what the sums say, `step_state` what follows for the next
steps (`patience`, `loss_scale`); `rollback/` rolls a speculative step back.
"""
