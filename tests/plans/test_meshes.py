"""Meshes of stages and replicas: by hand, and which one is chosen."""

from dataclasses import replace

import pytest

from zbpp.core import CollectiveOperation, Lane, LayerCosts, Link, Parts, RequestError
from zbpp.planning import Network, best_mesh, plan_meshes

LAYERS = LayerCosts(
    n_layers=8,
    optimizer=1.0,
    m_fixed=16.0,
    parameters=4.0,
    m_b=1.0,
    m_w=0.5,
)
FAST = Network(Link(0.0, 1e9))


def meshes(layers=LAYERS, network=FAST, **more):
    given = {"n_devices": 4, "n_microbatches": 8, "mode": "ZBH1"} | more
    return {one.name: one for one in plan_meshes(layers, network=network, **given)}


def test_free_collectives_do_not_change_the_step_time() -> None:
    """8 layers of 3 units: 4 stages hold 2 each, and idle 2 F + B - W at most."""
    found = meshes()
    assert list(found) == ["pp 1 x dp 4", "pp 2 x dp 2", "pp 4 x dp 1"]
    assert [one.n_microbatches for one in found.values()] == [2, 4, 8]
    one = found["pp 1 x dp 4"]
    assert one.step == pytest.approx(2 * 8 * 3 + 8 * 1)
    assert one.bubble == 0 and one.peak == 8 * 16 + 8 * 1
    assert found["pp 4 x dp 1"].step >= 8 * 2 * 3 + 2
    assert all(mesh.exposed == pytest.approx(0, abs=1e-6) for mesh in found.values())


def test_exchanges_of_replicas_count_in_the_step() -> None:
    """One stage: nothing overlaps with the sum of its only chunk, all 32 bytes."""
    slow = Network(Link(0.5, 2.0))
    (one, *_) = meshes(network=slow).values()
    each = slow.time(CollectiveOperation.ALL_REDUCE, 4.0, 4)
    assert one.exposed == pytest.approx(8 * each)
    (apart, *_) = meshes(network=slow, shard="optimizer").values()
    scatter = slow.time(CollectiveOperation.REDUCE_SCATTER, 4.0, 4)
    assert apart.exposed == pytest.approx(8 * 2 * scatter)  # gathered before, too
    assert apart.step == pytest.approx(2 * 24 + 16 * scatter + 8 / 4)  # optimizer
    (passes, *_) = meshes(network=slow, shard="parameters").values()
    assert not any("UNSHARD" in str(job) for job in passes.plan.schedule.orders[0])
    # two F and two B gather all; the first W's sum overlaps with the second F and B
    assert passes.exposed == pytest.approx(8 * (4 + 1) * scatter)


def test_step_times_of_each_reduction() -> None:
    """One stage of 8 layers on two nodes of 2: nothing runs during its only sum."""
    slow, fast = Link(0.0, 2.0), Link(0.0, 40.0)
    (one, *_, alone) = meshes(network=Network(slow, node=2, node_link=fast)).values()
    added = {name: found.exposed for name, found in one.variants.items()}
    at_two = 8 * 2 * (4.0 / 2 / 40.0 + 2.0 / 2 / 2.0)
    assert added["Reduction"] == pytest.approx(8 * 2 * 3 * 4.0 / 4 / 2.0)
    assert added["TwoLevel"] == pytest.approx(at_two)
    assert one.variants["TwoLevel"].step == one.step  # knows the nodes, as NCCL does
    places_too = 4 * 0.01 * 4.0 * 2
    at_top = 8 * (places_too / 2 / 40.0 + places_too / 2 / 2 / 2.0)
    assert added["TopK(0.01)"] == pytest.approx(at_top)
    assert not alone.variants
    (one, *_) = meshes(network=Network(slow)).values()  # there are no nodes
    assert one.variants["Reduction"].step == one.variants["TwoLevel"].step
    (one, *_) = meshes(network=Network(slow), shard="optimizer").values()
    assert not one.variants


def test_averages_send_a_hundredth_of_the_sums() -> None:
    """The residuals of `TopK`, and DiLoCo's average and momentum, take memory."""
    (one, *_) = meshes(network=Network(Link(0.0, 2.0))).values()
    added = {name: found.exposed for name, found in one.variants.items()}
    for name in ("Periodic(every=100)", "DiLoCo(every=100)"):
        assert added[name] == pytest.approx(added["Reduction"] / 100)
    memory = {name: found.peak - one.peak for name, found in one.variants.items()}
    two = ("TopK(0.01)", "DiLoCo(every=100)")
    assert memory == {name: 8 * 2 * 4 * (name in two) for name in memory}


@pytest.mark.parametrize("n", [1, 2])
def test_an_optimizer_on_the_host_saves_memory_for_copies(n: int) -> None:
    """One chunk a stage: gradients leave after its last W, and come before its first F.

    Of 16 bytes of a layer 8 are parameters and gradients, and stay.
    """
    slow = Network(Link(0.0, 2.0))
    given = {"network": slow, "n_devices": n, "n_microbatches": 2 * n}
    assert not any(
        "offload_optimizer" in one.variants for one in meshes(**given).values()
    )
    (one, *_) = meshes(**given, host_bandwidth=5.0).values()
    found = one.variants["offload_optimizer"]
    assert found.step - one.step == pytest.approx(2 * 8 * 4.0 / 5.0)
    assert one.peak - found.peak == 8 * (16 - 8)
    (one, *_) = meshes(**given, host_bandwidth=1e12).values()
    assert one.variants["offload_optimizer"].step == pytest.approx(one.step)


def test_copies_to_the_host_overlap_the_passes_of_other_chunks() -> None:
    """Of two chunks, one is copied while the other computes."""
    given = {"n_devices": 1, "n_microbatches": 4, "mode": "ZBV"}
    (one,) = meshes(**given, host_bandwidth=16.0).values()
    found = one.variants["offload_optimizer"]
    assert 0 < found.exposed < 2 * 8 * 4.0 / 16.0 * 0.75


def test_slow_links_favour_stages_and_fast_ones_replicas() -> None:
    layers = replace(LAYERS, optimizer=0.0)  # which stages share, too
    chosen = {
        bandwidth: best_mesh(
            list(meshes(layers, Network(Link(0.0, bandwidth))).values())
        ).data_parallel
        for bandwidth in (0.1, 1e9)
    }
    assert chosen == {0.1: 1, 1e9: 4}


def test_tensor_parallelism_divides_layers() -> None:
    """By hand: all is divided, and four all-reduces of the activations are added."""
    layers = replace(LAYERS, message=8.0)
    slow = Network(Link(0.5, 2.0))
    each = slow.time(CollectiveOperation.ALL_REDUCE, 8.0, 2)
    assert each > 0
    found = meshes(layers, slow, n_devices=2, tensor_parallel=(1, 2))
    assert list(found) == ["pp 1 x dp 2", "pp 2 x dp 1", "pp 1 x dp 1 x tp 2"]
    one = found["pp 1 x dp 1 x tp 2"]
    assert one.step == pytest.approx(8 * 8 * (3 / 2 + 4 * each) + 8 / 2)
    assert one.peak == pytest.approx((8 * 16 + 8) / 2)
    assert one.n_microbatches == 8 and one.exposed == pytest.approx(0, abs=1e-6)


def test_layers_are_shared_where_links_are_fast_inside_a_node() -> None:
    """Replicas of shared layers have the places of a node that are left."""
    # one stage needs 136 alone
    layers = replace(LAYERS, message=8.0, memory_limit=40.0)
    chosen = {}
    for inside in (1.0, 1e9):
        network = Network(Link(0.0, 1.0), node=4, node_link=Link(0.0, inside))
        found = meshes(layers, network, n_devices=8, tensor_parallel=(1, 4))
        chosen[inside] = best_mesh(list(found.values())).tensor_parallel
    assert chosen == {1.0: 1, 1e9: 4}


@pytest.mark.parametrize(
    ("shard", "held"),
    [
        ("none", 16),
        ("optimizer", 2 * 4 + 12 / 4),
        ("gradients", 4 + 16 / 4),
        ("parameters", 16 / 4),
    ],
)
def test_memory_of_replicas_by_shard(shard, held) -> None:
    # a chunk's gradients are whole for a while, and a layer's parameters
    (one, *_) = meshes(shard=shard).values()
    whole = 8 * 4 * 3 / 4 if shard in ("gradients", "parameters") else 0
    whole += 4 if shard == "parameters" else 0
    assert one.peak == pytest.approx(8 * held + 8 + whole)


def test_a_limit_leaves_the_meshes_that_fit() -> None:
    """One stage needs 128 + 8, two 64 + 2 x 4, four 32 + 4 x 2."""
    found = meshes(replace(LAYERS, memory_limit=80.0))
    assert [one.plan is not None for one in found.values()] == [False, True, True]
    assert "pp 1" not in best_mesh(list(found.values())).name
    assert "the smallest limit that works is 136" in found["pp 1 x dp 4"].reason
    with pytest.raises(RequestError, match=r"none of 3 meshes fits; pp 4 x dp 1: "):
        best_mesh(list(meshes(replace(LAYERS, memory_limit=10.0)).values()))


def test_impossible_meshes_give_their_reason() -> None:
    found = meshes(n_devices=16, n_microbatches=4)
    reasons = {name: one.reason for name, one in found.items() if one.reason}
    assert reasons == {
        "pp 1 x dp 16": "4 micro-batches do not divide among 16 replicas",
        "pp 2 x dp 8": "4 micro-batches do not divide among 8 replicas",
        "pp 16 x dp 1": "8 layers cannot fill 16 chunks, one each at least; use fewer "
        "stages, or a mode with fewer chunks a stage",
    }


def test_layers_with_parts_refuse_collectives_inside_passes():
    part = (Lane.COMPUTE, 1.0)
    layers = LayerCosts(8, parts=Parts((part,), (part,), (part,)), message=1.0)
    layers = replace(layers, bandwidth=1.0, parameters=4.0)
    found = meshes(layers, Network(Link(0.1, 1.0)), shard="parameters")
    assert any("'parts'" in one.reason for one in found.values() if one.reason)
    with pytest.raises(RequestError, match="leave the key 'parts' out of the file"):
        meshes(layers, Network(Link(0.1, 1.0)), tensor_parallel=(2,))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_devices": 0}, "--devices is 0"),
        ({"n_microbatches": 0}, "--microbatches is 0"),
        ({"layers": replace(LAYERS, parameters=0.0)}, "add 'parameters'"),
        ({"tensor_parallel": (3,)}, "--tensor_parallel 3 does not divide 4 devices"),
        ({"tensor_parallel": (2,)}, "add 'message'"),
    ],
)
def test_wrong_mesh_requests_are_refused(wrong, message) -> None:
    with pytest.raises(RequestError, match=message):
        meshes(**wrong)
