"""A small language model trained by a pipeline: what `zbpp train` runs.

options      flags that commands share; loads no torch
setup        from the options to processes, model, plan and pipeline
launch       processes of our own: started, watched, ended
train        one process's share: steps, checkpoints, validation, the log
stop_request a run that a signal ends, between two steps on all ranks
text, llama  the text, and the model
profiled     `zbpp profile`, on the same setup
user_model   ``--model module:function``, in all commands

Whatever is wrong in a request, or cannot be met, is a `zbpp.core.RequestError`.
"""
