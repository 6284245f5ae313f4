"""A small language model trained by a pipeline: what `zbpp train` runs.

options      flags, by group; loads no torch
start        processes of torchrun, or of our own, or this one
launch       processes of our own: started, watched, ended
setup        from the options to model, plan and pipeline
loop         one process's share: train, validate, report
log, resume  lines and metrics; checkpoints, and where a run goes on
stop_request a run that a signal ends, between two steps on all ranks
data, llama  the text, and the model
fingerprint  a hash of all parameters
profiled     `zbpp profile`, on the same setup
user_model   ``--model module:function``, in all commands

Whatever is wrong in a request, or cannot be met, is a `zbpp.core.RequestError`.
"""
