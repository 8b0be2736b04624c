"""Which layer's values a compiled loop copies, read from HLO text: the computed index, and what XLA wrote down beside it."""

import pytest

from jaxremat.xla.hlo import parse as parse_hlo
from jaxremat.xla.host_slices import host_slices, misread

TRIPS = ', backend_config={"known_trip_count":{"n":"%d"}}'
LOOPS = """HloModule step
%flipped (i: s32[]) -> s32[] {{
  %i = s32[] parameter(0)
  %last = s32[] constant({last})
  ROOT %sub = s32[] subtract(%last, %i)
}}
%copied (stack: f32[4,8], at: s32[]) -> f32[1,8] {{
  %stack = f32[4,8]{{1,0:S(5)}} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %read = f32[1,8]{{1,0}} dynamic-slice(%stack, %at, %zero), dynamic_slice_sizes={{1,8}}{config}
}}
%inner (p: (s32[], f32[4,8], s32[])) -> (s32[], f32[4,8], s32[]) {{
  %p = (s32[], f32[4,8]{{1,0:S(5)}}, s32[]) parameter(0)
  %k = s32[] get-tuple-element(%p), index=0
  %stacked = f32[4,8]{{1,0:S(5)}} get-tuple-element(%p), index=1
  %base = s32[] get-tuple-element(%p), index=2
  %step = s32[] constant(1)
  %next = s32[] add(%k, %step)
  %back = s32[] fusion(%k), kind=kLoop, calls=%flipped
  %place = s32[] add(%back, %base)
  %copy = f32[1,8]{{1,0}} fusion(%stacked, %place), kind=kCustom, calls=%copied
  ROOT %out = (s32[], f32[4,8]{{1,0:S(5)}}, s32[]) tuple(%next, %stacked, %base)
}}
%ends (q: (s32[], f32[4,8], s32[])) -> pred[] {{
  %q = (s32[], f32[4,8]{{1,0:S(5)}}, s32[]) parameter(0)
  %m = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant({times})
  ROOT %less = pred[] compare(%m, %n), direction=LT
}}
ENTRY %main (given: f32[4,8]) -> s32[] {{
  %given = f32[4,8]{{1,0:S(5)}} parameter(0)
  %start = s32[] constant(0)
  %above = s32[] constant({base})
  %init = (s32[], f32[4,8]{{1,0:S(5)}}, s32[]) tuple(%start, %given, %above)
  %loop = (s32[], f32[4,8]{{1,0:S(5)}}, s32[]) while(%init), condition=%ends, body=%inner{trips}
  ROOT %done = s32[] get-tuple-element(%loop), index=0
}}
"""


def program(offset, stride, *, nested=False, times=4, base=0):
    """A loop that reads a stack of four rows of 32 bytes from the last row on, with what XLA wrote down next to the copy."""
    numbers = f'"byte_offset":"{offset}","byte_stride":"{stride}"'
    written = f'"byte_offset":"0","byte_stride":"0","linear":{{{numbers}}}' if nested else numbers
    config = "" if offset is None else f', backend_config={{"dynamic_slice_config":{{"loop_index":"0",{written}}}}}'
    return parse_hlo(LOOPS.format(config=config, trips=TRIPS % times, times=times, last=times - 1, base=base))


@pytest.mark.parametrize("nested", [False, True])
def test_what_is_written_down_must_be_what_the_program_computes(nested):
    assert misread(program(96, -32, nested=nested)) == ()
    (wrong,) = misread(program(0, 32, nested=nested))
    assert (wrong.computed, wrong.written, wrong.is_write) == ((96, 64, 32, 0), (0, 32, 64, 96), False)
    assert misread(program(96, -16, nested=nested))


def test_without_anything_written_down_the_computed_index_counts():
    (copy,) = host_slices(program(None, None))
    assert (copy.written, copy.used, copy.is_right) == (None, (96, 64, 32, 0), True)


def test_an_index_outside_the_stack_is_clamped_as_xla_does():
    assert misread(program(128, -32, times=3, base=2)) == ()
    assert host_slices(program(None, None, times=3, base=2))[0].computed == (96, 96, 64)


def test_an_index_that_is_not_understood_is_no_proof():
    text = LOOPS.replace("subtract(%last, %i)", "xor(%last, %i)")
    config = ', backend_config={"dynamic_slice_config":{"loop_index":"0","byte_offset":"96","byte_stride":"-32"}}'
    (copy,) = misread(parse_hlo(text.format(config=config, trips=TRIPS % 4, times=4, last=3, base=0)))
    assert copy.computed == (None,) * 4
