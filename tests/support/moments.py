"""Small buckets of parameters, so that an optimizer steps many of them."""

import contextlib
from collections.abc import Iterator

from zbpp.runtime.optim import rollback

__all__ = ["small_buckets"]


@contextlib.contextmanager
def small_buckets() -> Iterator[None]:
    """Optimizers step many small parts of their parameters."""
    sizes = rollback._BUCKET_BYTES
    kept = dict(sizes)
    sizes["cpu"] = 400
    try:
        yield
    finally:
        sizes.update(kept)
