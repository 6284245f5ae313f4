"""`zbpp bench`: our modes and torch's own schedules on the same model, in turns.

names        contenders, by what the flags call them
request      what is asked for, and its schedules
contender    what all contenders have in common, and the batch of a step
ours         a mode of ours, as `zbpp.Pipeline` runs it
peer_stage   chunks of a model as torch's stages take them
peers        one of torch's schedules
sleeping     layers that sleep under torch's split backward
gradients    compared before anything is timed
turns        steps of one contender, timed; peak memory
run          torchrun's processes or new ones, and one process's share of all that
results      all figures, as JSON, table, page and trace
"""
