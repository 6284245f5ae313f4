"""A small language model trained by a pipeline, for `zbpp train`.

options      flags that commands share; loads no torch
user_model   ``--model module:function``, in all commands
setup        from the options to model, plan and pipeline
launch       processes: started, watched, ended
train        one process's share: steps, checkpoints, validation, the log
text, llama  the text, and the model

Whatever is wrong in a request, or cannot be met, is a `zbpp.core.RequestError`.
"""
