"""What collectives send, and how long links take for it, is what a person computes by hand."""

import dataclasses

import pytest

from jaxremat.chips.nvidia.speed import NCCL
from jaxremat.chips.nvidia.tables import load_tables
from jaxremat.chips.speed import DeviceSpeed, Links
from jaxremat.xla import clock, hlo
from jaxremat.xla.collectives import Collective, collective_seconds, groups_of, sent_bytes
from jaxremat.xla.kernels import kernels_of
from tests.roofline import uniform

MB = 10**6
#: Two nodes of 8 devices: 400 GB/s inside a node, 50 GB/s for each device to the other node.
LINKS = Links(16, 8, 400e9, 50e9, NCCL)
NODE = (tuple(range(8)), tuple(range(8, 16)))
ALL = (tuple(range(16)),)
ACROSS = tuple((n, n + 8) for n in range(8))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[4], dimensions={0}", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={0}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups={}, dimensions={0}", ()),
        ("channel_id=3, source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
    ],
)
def test_groups_in_every_form_that_xla_prints(text, groups):
    assert groups_of(text) == groups


def test_groups_in_another_form_are_rejected():
    with pytest.raises(ValueError, match="replica_groups=somehow"):
        groups_of("replica_groups=somehow")


@pytest.mark.parametrize(
    ("kind", "groups", "sent", "seconds"),
    [
        # A ring inside a node; of 800 MB, each device sends 700 at 400 GB/s.
        ("all-gather", NODE, 700 * MB, 700e6 / 400e9),
        ("reduce-scatter", NODE, 700 * MB, 700e6 / 400e9),
        ("all-reduce", NODE, 1400 * MB, 1400e6 / 400e9),
        ("all-to-all", NODE, 700 * MB, 700e6 / 400e9),
        # Through two nodes: their 8 network cards carry 400 GB/s together.
        ("all-gather", ALL, 750 * MB, 750e6 / 400e9),
        # One device of each node: one network card each.
        ("all-reduce", ACROSS, 800 * MB, 800e6 / 50e9),
        # 400 of 800 MB go to the other node.
        ("all-to-all", ALL, 750 * MB, 400e6 / 50e9),
        ("collective-permute", ((0, 1), (1, 0)), 800 * MB, 800e6 / 400e9),
        ("collective-permute", ((0, 8),), 800 * MB, 800e6 / 50e9),
        ("all-gather", (), 750 * MB, 750e6 / 400e9),
        ("all-gather", ((0,), (1,)), 0, 0.0),
    ],
)
def test_bytes_and_seconds_by_hand(kind, groups, sent, seconds):
    collective = Collective(kind, 800 * MB, groups)
    assert sent_bytes(collective, LINKS) == sent
    found = collective_seconds(collective, LINKS)
    assert seconds <= found <= seconds + 71e-6, "a ring of 16 adds 8.4 + 14 * 3.4 + 14 microseconds"


def test_small_collectives_take_the_time_of_their_hops():
    """NCCL's protocol LL: 6.6 microseconds, and 0.6 for each of 7 hops."""
    assert collective_seconds(Collective("all-gather", 8, NODE), LINKS) == pytest.approx(6.6e-6 + 7 * 0.6e-6, rel=1e-3)


@pytest.mark.parametrize("kind", ["all-to-all", "ragged-all-to-all", "collective-permute", "all-reduce"])
def test_no_collective_is_quicker_than_a_small_one_in_the_tables(kind):
    """Over two nodes, as over 8 GPUs of one: 12 to 40 microseconds before the bytes count."""
    tables = load_tables((9, 0))
    assert tables
    links = dataclasses.replace(LINKS, node_bytes_per_s=tables.node_bytes_per_s)
    groups = {"collective-permute": (((0, 1),), ((0, 8),))}.get(kind, (NODE, ALL))
    inside, across = (collective_seconds(Collective(kind, 8, some), links, tables) for some in groups)
    assert 12e-6 < inside < 45e-6
    assert across >= tables.latency_s(kind) > 12e-6
    large = collective_seconds(Collective(kind, 800 * MB, groups[1]), links, tables)
    assert large == pytest.approx(collective_seconds(Collective(kind, 800 * MB, groups[1]), links), abs=50e-6)


PROGRAM = """HloModule overlap, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%scatter (q: f32[1024,1024]) -> f32[128,1024] {
  %q = f32[1024,1024]{1,0} parameter(0)
  ROOT %part = f32[128,1024]{1,0} reduce-scatter(%q), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
}

ENTRY %main (p: f32[128,1024]) -> f32[128,1024] {
  %p = f32[128,1024]{1,0} parameter(0)
  %all-gather-start = (f32[128,1024], f32[1024,1024]) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={0}
  %dot.1 = f32[128,128] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %all-gather-done = f32[1024,1024]{1,0} all-gather-done(%all-gather-start)
  %async-start = ((f32[1024,1024]{1,0}), f32[128,1024]{1,0}, u32[]) async-start(%all-gather-done), calls=%scatter
  %dot.2 = f32[128,1024] dot(%p, %all-gather-done), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %async-done = f32[128,1024]{1,0} async-done(%async-start)
  ROOT %all-reduce = f32[128,1024]{1,0} all-reduce(%async-done), channel_id=3, replica_groups={}, to_apply=%add
}
"""


def test_collectives_hide_behind_what_is_scheduled_before_their_wait():
    """The gather and the scatter hide behind a dot each; the synchronous all-reduce hides behind nothing."""
    module = hlo.parse(PROGRAM)
    whole = 1024 * 1024 * 4
    gather, scatter, reduce = (k.collective for k in kernels_of(module) if k.collective)
    assert [(c.kind, c.num_bytes) for c in (gather, scatter, reduce)] == [
        ("all-gather", whole),
        ("reduce-scatter", whole),
        ("all-reduce", whole // 8),
    ]
    slow = Links(8, 8, whole * 7 / 8, None, NCCL)  # the whole array takes a second
    speed = DeviceSpeed(1e15, 5e14, 3e12, 5e10, 1e12, uniform(0.5, 2e-6), links=slow)
    step = clock.predict_step_time(module, speed)
    assert step.num_collectives == 3
    assert step.collective_bytes == 2 * whole * 7 // 8 + 2 * whole // 8 * 7 // 8
    assert step.collective_s == pytest.approx(2 + 2 / 8, rel=1e-3)
    alone = clock.predict_step_time(module, dataclasses.replace(speed, links=None))
    assert alone.collective_s == alone.collective_exposed_s == 0
    assert step.step_s == pytest.approx(alone.step_s + step.collective_exposed_s)
    assert step.collective_s - step.collective_exposed_s == pytest.approx(alone.step_s, rel=0.01)
    fast = dataclasses.replace(speed, links=dataclasses.replace(slow, node_bytes_per_s=1e18))
    assert clock.predict_step_time(module, fast).collective_exposed_s < 50e-6
