"""What stages know is joined within a pipeline, not over its replicas."""

import pytest
from pool import Pool
from small_model import make_pipeline

import zbpp


def gathered() -> tuple[int, dict[int, int]]:
    mesh = zbpp.mesh(stages=2, data_parallel=2)
    with make_pipeline("ZBH1", None, mesh=mesh) as pipeline:
        (stage,) = pipeline.stages.executors
        replica = pipeline.place.replica
        return replica, pipeline.stages.gather_dict({stage: replica})


@pytest.mark.dist
def test_reports_do_not_mix_replicas(pool: Pool) -> None:
    for replica, by_stage in pool.run(gathered, 4):
        assert by_stage == {0: replica, 1: replica}
