"""The optimizer step across stages: `stage_optimizer` is its transaction.

`optimizers` holds a stage's optimizers, `norms` and `decision` judge the sums,
`step_state` keeps what follows for the next steps (`patience`, `loss_scale`);
`rollback/` rolls a speculative step back, `untouched` notices writes before that.
"""
