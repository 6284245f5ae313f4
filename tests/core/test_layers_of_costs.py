"""Costs of layers add up to those of the chunks of a split."""

from dataclasses import replace

import pytest

from zbpp.core import LayerCosts, Placement, RequestError, parse_layers, write_layers

LAYERS = LayerCosts(
    n_layers=4,
    f=(1.0, 2.0, 3.0, 4.0),
    m_b=(10.0, 20.0, 30.0, 40.0),
    m_w=5.0,
    m_r=1.0,
    peak_f=(15.0, 22.0, 90.0, 40.0),
    comm=(0.1, 0.2, 0.3),
)
TWO = Placement.single(2)


def test_times_and_what_passes_leave_are_added_up():
    costs = LAYERS.on(TWO, [1, 3])
    assert (costs.f, costs.b, costs.comm) == ((1.0, 9.0), (1.0, 3.0), (0.1,))
    assert (costs.m_b, costs.m_w) == ((10.0, 90.0), (5.0, 15.0))


def test_collectives_of_the_layers_are_added_up(tmp_path):
    layers = replace(LAYERS, all_gather=(1.0, 2.0, 3.0, 4.0), reduce_scatter=0.5)
    costs = layers.on(TWO, [1, 3])
    assert (costs.all_gather, costs.reduce_scatter) == ((1.0, 9.0), (0.5, 1.5))
    assert LAYERS.on(TWO, [1, 3]).all_gather == 0.0
    write_layers(layers, tmp_path / "layers.json")
    assert parse_layers((tmp_path / "layers.json").read_text()) == layers


def test_every_pass_of_a_chunk_has_an_overhead():
    layers = replace(LAYERS, pass_f=0.5, pass_b=0.25, pass_w=0.125)
    one = layers.on(TWO, [1, 3])
    assert (one.f, one.b, one.w) == ((1.5, 9.5), (1.25, 3.25), (1.125, 3.125))
    four = layers.on(Placement.wave(2), [1, 1, 1, 1])
    assert sum(four.f) == sum(one.f) + 2 * 0.5, "two more passes"
    again = layers.on(TWO, [2, 2], recompute=[1])
    assert again.b == (2.0 + 2.0 + 0.25, 2.25), "one pass, its layer's f once more"


def test_peaks_stand_on_what_the_layers_before_have_left():
    costs = LAYERS.on(TWO, [1, 3])
    assert costs.peak_f == (15.0, 20.0 + 90.0)


def test_a_recomputed_layer_leaves_little_and_its_b_runs_f_again():
    costs = LAYERS.on(TWO, [2, 2], recompute=[1])
    assert (costs.f, costs.b) == ((3.0, 7.0), (2.0 + 2.0, 2.0))
    assert costs.m_b == (10.0 + 1.0, 70.0)
    assert costs.peak_b == (21.0, 0.0)  # 22 - 1 of the forward that runs again


def test_messages_take_a_delay_and_their_bytes():
    layers = LayerCosts(3, message=(100.0, 300.0), bandwidth=(50.0, 200.0), delay=0.5)
    costs = layers.on(Placement.single(3), [1, 1, 1])
    assert costs.comm == (2.5, 2.0)
    assert layers.on(Placement.single(1), [3]).comm == 0.0


@pytest.mark.parametrize("split", ([4], [2, 1], [0, 4]))
def test_a_split_that_does_not_fit_is_refused(split):
    with pytest.raises(RequestError, match="must have 2 entries"):
        LAYERS.on(TWO, split)


def test_a_layers_file_comes_back_as_it_was(tmp_path):
    path = tmp_path / "layers.json"
    write_layers(LAYERS, path)
    assert parse_layers(path.read_text()) == LAYERS
    assert parse_layers('{"f": [1, 2, 3], "memory_limit": "2KiB"}').limit == 2048
    loaded = replace(LAYERS, pass_f=0.5, pass_w=0.25)
    write_layers(loaded, path)
    assert parse_layers(path.read_text()) == loaded
    with pytest.raises(RequestError, match="pass_b is a list"):
        parse_layers('{"f": [1, 2, 3], "pass_b": [1, 2, 3]}')
    with pytest.raises(RequestError, match="m_b has 2 entries for 3 layers"):
        parse_layers('{"f": [1, 2, 3], "m_b": [1, 2]}')
