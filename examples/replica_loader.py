"""Batches for the stages of a pipeline, by accelerate."""

from typing import Any

from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

import zbpp


def replica_loader(
    loader: DataLoader[Any], pipeline: zbpp.Pipeline, **options: Any
) -> DataLoader[Any]:
    """Prepare a loader as ``Accelerator.prepare`` does, but by replica.

    ``prepare`` gives every process a share of the data. The stages of one replica read
    the same batch, so here only replicas have shares.

    Args:
        loader: the same in all processes.
        pipeline: whose replicas share the data; batches come to its device.
        options: of ``accelerate.data_loader.prepare_data_loader``, over the defaults of
            an ``Accelerator``.
    """
    defaults = {"put_on_device": True, "rng_types": ["generator"]}
    place = pipeline.place
    prepared: DataLoader[Any] = prepare_data_loader(
        loader,
        pipeline.device,
        num_processes=place.n_replicas,
        process_index=place.replica,
        **(defaults | options),
    )
    return prepared
