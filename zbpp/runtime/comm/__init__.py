"""Messages between stages: `transport` is the interface, and serves one process.

    mailbox    one process a stage: values, and their shapes (`shapes`)
    links      single tensors by gloo or NCCL, in process groups (`groups`)
    failures   who failed first

`process_group` joins the processes.
"""
