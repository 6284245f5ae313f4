"""Messages between stages: `transport` says what there is, for one process.

`distributed` does the same over torch.distributed, with `channels` and `header`;
`process_group` joins the processes.
"""
