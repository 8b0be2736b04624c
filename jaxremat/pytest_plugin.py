"""A pytest plugin: the compiled memory of a train step may not grow above a baseline.

    def test_step_memory(memory_baseline):
        memory_baseline(step, (params, batch), "h100-80gb")

`pytest --update-baselines` writes the baselines, and any other run compares with them. They are in one file, by the version of
JAX, by target and by test. A test that fails names the buffers at the peak that grew, with their source lines. The file belongs
into the repository: `memory_baselines.json` beside pytest's configuration, or what its ini option `memory_baselines` says.
"""

import fcntl
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jaxremat.chips.target import Target
    from jaxremat.xla.compile import Compilation
    from jaxremat.xla.memory import CompiledMemory

#: How many of the grown buffers a failing test names.
_NUM_SHOWN = 8
#: Buffers of fewer bytes at the peak than this share of the total are one entry of a baseline.
_SMALL = 1e-3
_UPDATE = "pytest --update-baselines"
#: The properties of a test's report that have a baseline which the test wrote, and a step that differs within its tolerance.
_WRITTEN = "memory_baseline"
_WITHIN = "memory_baseline_within"


@dataclass(frozen=True)
class Holding:
    """The bytes at the peak of the buffers with one category and one label.

    Attributes:
        category: the category, such as `residuals`.
        label: the label, such as `mlp/wi/dot_general`.
        source: the source line of the largest buffer, such as `model.py:41`; empty if XLA doesn't know it.
        num_bytes: the bytes.
        shape: dtype and dimensions of each buffer, such as `bf16[32,1024,768]`. It is empty where they have several, and in
            baselines of former versions.
    """

    category: str
    label: str
    source: str
    num_bytes: int
    shape: str = ""


@dataclass(frozen=True)
class Baseline:
    """The compiled memory of one step.

    Attributes:
        total_bytes: XLA's total on a device.
        host_bytes: bytes of the host's memory.
        at_peak: the bytes of the buffers at the peak, the largest first.
        versions: by library, its version.
    """

    total_bytes: int
    host_bytes: int
    at_peak: tuple[Holding, ...]
    versions: dict[str, str | None]


#: A file of baselines: by JAX, by target, by test.
Baselines = dict[str, dict[str, dict[str, Baseline]]]
#: A baseline that was written: its test, its target, and the bytes of device and host before and now. None for a new one.
Written = tuple[str, str, tuple[int, int] | None, tuple[int, int]]
#: A step that differs from its baseline within its tolerance: the same, and the tolerance in words.
Within = tuple[str, str, tuple[int, int], tuple[int, int], str]


@dataclass
class MemoryBaseline:
    """What the fixture `memory_baseline` gives to a test: a function that compiles a step and compares its memory.

    Attributes:
        path: the file of baselines.
        root: pytest's root folder, from which source lines are shown.
        test: the node id of the test.
        update: whether baselines are written.
        warn: takes a warning's text.
        wrote: takes each baseline that was written.
        differed: takes each step that differs from its baseline within its tolerance.
    """

    path: Path
    root: Path
    test: str
    update: bool
    warn: Callable[[str], None]
    wrote: Callable[["Written"], None] = lambda written: None
    differed: Callable[["Within"], None] = lambda within: None
    _seen: set[tuple[str, str]] = field(default_factory=set)

    def __call__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        target: "Target | str",
        *,
        name: str = "",
        tolerance: int | str = 0,
        donate_argnums: int | tuple[int, ...] = (),
    ) -> "CompiledMemory":
        """Compiles `step(*args)` for `target`, and fails the test if it needs more memory than its baseline.

        An argument that isn't allowed, a damaged file and a program that XLA rejects fail it too, with one message.

        Args:
            step: any function that JAX can trace, or an already jitted function, which has its own donation.
            args: the arguments, or a `jax.ShapeDtypeStruct` for each array.
            target: a target or its name, such as `h100-80gb`.
            name: tells two steps of one test for one target apart.
            tolerance: how much more is allowed: bytes, or text such as `64MiB` or `1%`.
            donate_argnums: as for `jax.jit`. It has an effect only if `step` isn't jitted yet.

        Returns:
            The compiled memory, for further assertions.
        """
        __tracebackhide__ = True
        from jaxremat.errors import JaxrematError

        try:
            return self._compare(step, args, target, name, tolerance, donate_argnums)
        except JaxrematError as error:
            message = f"{self.test}: {error}"
        pytest.fail(message, pytrace=False)

    def _compare(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        target: "Target | str",
        name: str,
        tolerance: int | str,
        donate_argnums: int | tuple[int, ...],
    ) -> "CompiledMemory":
        """What a call does, where its errors are exceptions."""
        __tracebackhide__ = True
        import jax

        from jaxremat.errors import UsageError
        from jaxremat.units import gib
        from jaxremat.xla.compile import lower_and_compile

        target_name = target if isinstance(target, str) else target.name
        if (target_name, name) in self._seen:
            raise UsageError(f"memory_baseline was called twice for {target_name}", next_step="name= for one of the steps")
        self._seen.add((target_name, name))
        key, places = f"{self.test} {name}".strip(), (f"jax {jax.__version__}", target_name)
        allowed = _bytes_of(tolerance)
        found = lower_and_compile(step, args, target, donate_argnums=donate_argnums, keep_dump=True)
        now = baseline_of(found, self.root)
        if self.update:
            before = _update(self.path, key, places, now)
            was = (before.total_bytes, before.host_bytes) if before else None
            self.wrote((key, target_name, was, (now.total_bytes, now.host_bytes)))
            return found.memory
        baselines = _baselines_of(self.path.read_bytes() if self.path.exists() else b"", self.path)
        before = baselines.get(places[0], {}).get(places[1], {}).get(key)
        if before is None:
            pytest.fail(_missing(key, places, now, baselines, self.path), pytrace=False)
        pairs = (("total", before.total_bytes, now.total_bytes), ("host", before.host_bytes, now.host_bytes))
        if any(after > was + allowed(was) for _, was, after in pairs):
            pytest.fail(_grown(key, places, before, now, tolerance), pytrace=False)
        if now.total_bytes < before.total_bytes - allowed(before.total_bytes):
            share = f"{now.total_bytes / before.total_bytes - 1:+.1%}"
            both = f"{gib(before.total_bytes)} became {gib(now.total_bytes)} ({share})"
            self.warn(f"{key}: the step takes less than its baseline on {places[1]}: {both}; {_UPDATE} writes the new one")
        elif any(after != was for _, was, after in pairs):
            was, after = (before.total_bytes, before.host_bytes), (now.total_bytes, now.host_bytes)
            self.differed((key, target_name, was, after, _in_words(tolerance)))
        return found.memory


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--update-baselines` and the ini option `memory_baselines`."""
    group = parser.getgroup("jaxremat")
    group.addoption(
        "--update-baselines", action="store_true", help="write the baselines of the tests that use memory_baseline"
    )
    parser.addini("memory_baselines", "the file of baselines of memory_baseline", default="memory_baselines.json")


@pytest.fixture
def memory_baseline(request: pytest.FixtureRequest) -> MemoryBaseline:
    """Compares the compiled memory of a step with its baseline: see `MemoryBaseline`."""
    config = request.config
    return MemoryBaseline(
        path=config.rootpath / config.getini("memory_baselines"),
        root=config.rootpath,
        test=request.node.nodeid,
        update=bool(config.getoption("--update-baselines")),
        warn=lambda text: request.node.warn(pytest.PytestWarning(text)),
        wrote=lambda written: request.node.user_properties.append((_WRITTEN, written)),
        differed=lambda within: request.node.user_properties.append((_WITHIN, within)),
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how many baselines were written, which of them changed, and what differs within its tolerance.

    Tests in other processes hand theirs over in their reports.
    """
    config, found = terminalreporter.config, {_WRITTEN: dict[tuple[str, str], Any](), _WITHIN: dict[tuple[str, str], Any]()}
    for report in (one for reports in terminalreporter.stats.values() for one in reports):
        for name, one in getattr(report, "user_properties", ()):
            if name in found:
                found[name][one[:2]] = one
    written, within = (list(some.values()) for some in found.values())
    path = os.path.relpath(config.rootpath / config.getini("memory_baselines"))
    lines = [*(_written_lines(written, path) if written else ()), *_within_lines(within)]
    if lines:
        terminalreporter.section("memory baselines")
    for line in lines:
        terminalreporter.line(line)


def baseline_of(compilation: "Compilation", root: Path) -> Baseline:
    """The baseline of a step that was compiled with `keep_dump`."""
    from jaxremat.chips.installed import versions
    from jaxremat.xla.buffers import Holder, held, holders, one_shape

    memory_map = compilation.memory_map
    total, groups = memory_map.total_bytes, dict[tuple[str, str], list[Holder]]()
    for group in holders(held(memory_map, memory_map.peak)):
        small = group.num_bytes < _SMALL * total
        key = ("smaller buffers", "") if small else (group.buffers[0].category, group.label)
        groups.setdefault(key, []).append(group)
    parts: dict[tuple[str, str], Holding] = {}
    for key, some in groups.items():
        of_first = (_shown(some[0].buffers[0].source, root), one_shape(some)) if key[1] else ("", "")
        parts[key] = Holding(*key, of_first[0], sum(group.num_bytes for group in some), of_first[1])
    parts["gaps", ""] = Holding("gaps", "", "", total - sum(part.num_bytes for part in parts.values()))
    by_size = tuple(sorted(parts.values(), key=lambda part: -part.num_bytes))
    return Baseline(total, memory_map.host_bytes, by_size, versions())


def _bytes_of(tolerance: int | str) -> Callable[[int], int]:
    """The allowed growth of a number of bytes.

    Raises:
        UsageError: the tolerance is neither whole bytes, nor a size, nor a share. An example is 0.01, which may mean 1%.
    """
    from jaxremat.errors import UsageError
    from jaxremat.units import parse_bytes

    if isinstance(tolerance, int) and not isinstance(tolerance, bool) and tolerance >= 0:
        return lambda _: tolerance
    text = tolerance if isinstance(tolerance, str) else ""
    if share := re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text):
        return lambda num_bytes: int(float(share[1]) / 100 * num_bytes)
    try:
        num_allowed = parse_bytes(text)
    except UsageError:
        is_number = re.fullmatch(r"[0-9]+(\.[0-9]+)?", text)
        raise UsageError(
            f"the tolerance is {tolerance!r}",
            allowed="a share such as '3%', a size such as '64MiB', or whole bytes from 0 up",
            next_step=f"did you mean '{text}%'?" if is_number else "tolerance='3%'",
        ) from None
    return lambda _: num_allowed


def _in_words(tolerance: int | str) -> str:
    """A tolerance in words: `3%`, `64MiB` or `4096 bytes`."""
    return tolerance.strip() if isinstance(tolerance, str) else f"{tolerance} bytes"


def _shown(source: str, root: Path) -> str:
    """A source line from the root folder, or from a package's folder: the same on every machine."""
    inside = source.removeprefix(f"{root}/")
    return inside.rpartition("site-packages/")[2]


def _update(path: Path, key: str, places: tuple[str, str], now: Baseline) -> Baseline | None:
    """Writes one baseline into the file, whole or not at all. Returns the one that it replaces.

    Tests in other processes may write theirs at the same time. Each replaces the file. Another one may have done so while this
    one waited for its lock.
    """
    import msgspec

    from jaxremat.system.files import write_whole

    while True:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue
            file.seek(0)
            baselines = _baselines_of(file.read(), path)
            of_target = baselines.setdefault(places[0], {}).setdefault(places[1], {})
            before, of_target[key] = of_target.get(key), now
            text = msgspec.json.format(msgspec.json.encode(baselines, order="deterministic"), indent=1)
            write_whole(path, text + b"\n")
            return before


def _written_lines(written: Sequence[Written], path: str) -> list[str]:
    """How many baselines a run wrote into the file at `path`, and the old and new bytes of those that changed."""
    changed = [(key, target, was, now) for key, target, was, now in sorted(written) if was and was != now]
    num_new = sum(was is None for _, _, was, _ in written)
    same = len(written) - num_new - len(changed)
    lines = [f"{path}: {len(written)} written, {num_new} new, {len(changed)} changed, {same} with the same bytes"]
    return lines + [f"  {key} on {target}: {_both_became(was, now)}" for key, target, was, now in changed]


def _within_lines(within: Sequence[Within]) -> list[str]:
    """The old and new bytes of steps that differ from their baselines within their tolerances."""
    return [
        f"{key} on {target}: {_both_became(was, now)}, within {tolerance}"
        for key, target, was, now, tolerance in sorted(within)
    ]


def _both_became(was: tuple[int, int], now: tuple[int, int]) -> str:
    """The bytes of the device and of the host before and now, where they differ."""
    both = zip(("", "host "), was, now, strict=True)
    return ", ".join(where + _became(*pair) for where, *pair in both if pair[0] != pair[1])


def _became(was: int, now: int) -> str:
    """Two numbers of bytes: `0.047 GiB became 0.079 GiB, +0.032 GiB (+67.0%)`.

    A change that GiB don't show is in bytes: `1,677,721,600 bytes became 1,677,721,856, +256 bytes`.
    """
    from jaxremat.units import gib, signed_gib

    if gib(was) == gib(now):
        return f"{was:,} bytes became {now:,}, {now - was:+,} bytes"
    return f"{gib(was)} became {gib(now)}, {signed_gib(now - was)}{f' ({now / was - 1:+.1%})' if was else ''}"


def _baselines_of(content: bytes, path: Path) -> Baselines:
    """The baselines that a file holds."""
    import msgspec

    from jaxremat.errors import UsageError

    try:
        return msgspec.json.decode(content or b"{}", type=Baselines)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{str(path)!r} holds no baselines: {error}",
            next_step=f"the file as it was committed, or remove it and {_UPDATE}",
        ) from None


def _missing(key: str, places: tuple[str, str], now: Baseline, baselines: Baselines, path: Path) -> str:
    """The message of a test without a baseline, with those of other versions of JAX."""
    from jaxremat.units import gib

    others = [
        f"with {jax} it is {gib(of_target[places[1]][key].total_bytes)}"
        for jax, of_target in baselines.items()
        if key in of_target.get(places[1], {})
    ]
    lines = [
        f"{path.name} has no baseline of {key} on {places[1]} with {places[0]}",
        f"The step takes {gib(now.total_bytes)}{''.join(f'; {other}' for other in others)}",
        f"Next: {_UPDATE}",
    ]
    return "\n".join(lines)


def _grown(key: str, places: tuple[str, str], before: Baseline, now: Baseline, tolerance: int | str = 0) -> str:
    """The message of a test whose step grew: by how much, in which buffers, and what else is different."""
    from jaxremat.units import gib, signed_gib
    from jaxremat.xla.buffers import shape_change

    more = f" and the tolerance of {_in_words(tolerance)}" if tolerance else ""
    first = _both_became((before.total_bytes, before.host_bytes), (now.total_bytes, now.host_bytes))
    lines = [first, f"{key}: the step takes more memory on {places[1]} than its baseline{more}, with {places[0]}"]
    former = {(one.category, one.label): one for one in before.at_peak}
    pairs = [(former.get((one.category, one.label)), one) for one in now.at_peak]
    changes = [(one.num_bytes - (was.num_bytes if was else 0), was, one) for was, one in pairs]
    least = max(1, (now.total_bytes - before.total_bytes) // 1000)  # of a buffer that explains something
    grown = sorted((change for change in changes if change[0] >= least), key=lambda change: -change[0])
    lines += ["At the peak on the device these grew:"] if grown else []
    for growth, was, one in grown[:_NUM_SHOWN]:
        size = f"{gib(was.num_bytes)} became {gib(one.num_bytes)}" if was else "new"
        words = (one.category, one.label, one.source, size, shape_change(was.shape if was else one.shape, one.shape))
        lines.append(f"  {signed_gib(growth):>12}  {'  '.join(word for word in words if word)}")
    if len(grown) > _NUM_SHOWN:
        lines.append(f"  and {len(grown) - _NUM_SHOWN} more")
    gone = sum(growth for growth, _, _ in grown) - (now.total_bytes - before.total_bytes)
    if gone >= least:
        lines.append(f"  {signed_gib(-gone):>12}  others, which shrank or are no longer at the peak")
    others = [
        f"{package} {before.versions.get(package)} became {version}"
        for package, version in now.versions.items()
        if before.versions.get(package) != version
    ]
    lines += [f"Other versions: {', '.join(others)}"] if others else []
    return "\n".join([*lines, f"Next: {_UPDATE}, if this is meant"])
