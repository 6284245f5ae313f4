"""`zbpp bench`: modes of zbpp and schedules of torch on one model, timed in turns.

names        contenders, as the flags name them
request      the options, and the schedules that follow from them
contender    what all contenders share: model, batch, optimizer
ours         a mode of zbpp, run by `zbpp.Pipeline`
torchs       a schedule of torch.distributed.pipelining
turns        the steps of one turn, timed; peak memory
run          one process's share: the first step compared, then turns
results      figures as JSON, table, page and trace
"""
