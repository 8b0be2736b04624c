// A step as a trace in Chrome's JSON format, which Perfetto opens: instructions, loops, phases, large buffers, and the bytes in use.

const TRACED = 1000; // buffers, the largest ones

// Without predicted seconds a position takes a microsecond.
function traceOf(map, title) {
  const timed = map.stepMs > 0;
  const starts = [0];
  for (let p = 0; p < map.program.length; p++) starts.push(starts[p] + (timed ? map.nanoseconds[p] / 1000 : 1));
  const events = [{ ph: "M", name: "process_name", pid: 1, args: { name: timed ? title : `${title}: positions, not time` } }];
  const slice = (tid, name, first, last, args = {}) =>
    events.push({ ph: "X", pid: 1, tid, name, ts: starts[first], dur: starts[last + 1] - starts[first], args });
  const tracks = ["phases", "loops", "instructions"];
  tracks.forEach((name, tid) => events.push({ ph: "M", name: "thread_name", pid: 1, tid, args: { name } }));
  for (const [phase, first, last] of map.phases) slice(0, phase, first, last);
  for (const loop of map.loops) slice(1, loopText(loop), loop.first, loop.last);
  map.program.forEach((name, p) => {
    if (starts[p + 1] > starts[p]) slice(2, name, p, p, { position: p });
    events.push({ ph: "C", pid: 1, name: "bytes in use", ts: starts[p], args: { bytes: map.inUse[p] } });
  });
  const buffers = Array.from({ length: map.num }, (_, i) => i).sort((a, b) => map.bytes[b] - map.bytes[a]);
  for (const i of buffers.slice(0, TRACED)) {
    const common = { pid: 1, tid: 3, cat: map.categoryOf(i), id: i, name: labelled(map, i) };
    const args = { bytes: map.bytes[i], name: map.nameOf(i), shape: map.shapeOf(i), source: map.sourceOf(i) };
    events.push({ ...common, ph: "b", ts: starts[map.first[i]], args });
    events.push({ ...common, ph: "e", ts: starts[map.last[i] + 1] });
  }
  return { displayTimeUnit: "ms", traceEvents: events };
}
