"""From a schedule to another one, or to programs.

`lower` adds messages and places their receives, `post_validation` places V's,
`collectives` adds those of data parallelism, `parts` lays passes in parts out and cuts
them into segments, `torch_csv` writes what torch.distributed.pipelining reads.
"""
