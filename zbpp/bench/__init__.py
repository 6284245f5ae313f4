"""`zbpp bench`: modes of zbpp and schedules of torch on one model, timed by turns.

request  the options, and the schedules that follow from them
setting  model, batch and optimizer of all contenders
ours     a mode of zbpp, run by `zbpp.Pipeline`
torchs   a schedule of torch.distributed.pipelining
run      one process's share: the first step compared, then interleaved steps
results  figures as JSON, table, page and trace
"""
