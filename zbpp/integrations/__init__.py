"""A pipeline in the trainers of others, each module loaded where it is asked for.

torch_schedule  `TorchSchedule`: for a trainer that takes a schedule of torch
trainer         `PipelineTrainer`: transformers' ``Trainer``
loaders         `replica_loader`: a loader of accelerate, shared by replica
"""
