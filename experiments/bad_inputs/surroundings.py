"""What surrounds a command: variables, permissions, disks, limits and terminals. The command itself is one that works.

The kinds of the environment start a process, because JAX reads its variables when it is imported. Those of terminals do, too. The
others change the surroundings of a fork (`Case.before`): for `permissions` it gives up the superuser's, and a path may be in
`/proc`, where nothing can be made. A full disk is a tmpfs of some KiB, which the superuser mounts, or `/dev/full`.
"""

import ctypes
import fcntl
import functools
import json
import os
import pty
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path

from experiments.bad_inputs.case import USAGE, Case, Ended, in_fork, in_process, kind

MODEL = ("--model", "tiny", "--num-layers", "1", "--seq-len", "32", "--policy", "nothing", "--batch", "2")
#: Commands that take few seconds. The first two start no XLA.
LIST = ("run", "--list", "models", "--json")
DUMP = ("run", "--dump-target")
COMPILE = ("run", *MODEL, "--target", "h100-80gb")
TRAIN = ("train", *MODEL, "--target", "cpu", "--num-steps", "4", "--eval-every", "0", "--sample-tokens", "0")
#: The seconds after which a command counts as hanging. It may start a process, import JAX and compile on a busy machine.
LIMIT_S = 120.0
#: How a command may end that understands its surroundings, or says what is wrong with them.
SAID = frozenset({0, 1, 2})
#: What a line of the progress on a terminal begins with: rich's spinner.
SPINNER = re.compile("[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏]")
#: What a terminal does: a code that ends in a letter, or a character.
_CODES = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])|([^\x1b])", re.DOTALL)
#: Below this width the terminal itself breaks the lines.
LEAST = 20


def setting(variables: dict[str, str | None]) -> Callable[[], None]:
    """What sets these variables, and unsets those that are None."""

    def set_them() -> None:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    return set_them


def unsaid(command: tuple[str, ...]) -> tuple[str, ...]:
    """The rules that don't hold for a command: the doctor's answer, on stdout, has what is wrong."""
    return ("message", "next step") if command[0] == "doctor" else ()


def drawn_of(draw: random.Random, values: dict[str, tuple[str | None, ...]], most: int = 2) -> dict[str, str | None]:
    """One variable or a few, each with one of its values."""
    names = draw.sample(sorted(values), draw.randint(1, most))
    return {name: draw.choice(values[name]) for name in names}


@kind("environments")
def variables_of_jax(draw: random.Random, folder: Path) -> Case:
    """Variables that JAX, XLA and CUDA read, with values that they know and values that nobody knows."""
    variables = drawn_of(
        draw,
        {
            "JAX_PLATFORMS": (None, "", "gpu", "cuda", "tpu", "nonsense", "cpu,gpu", "CPU"),
            "JAX_PLATFORM_NAME": ("cpu", "gpu", "nonsense"),
            "XLA_FLAGS": (
                "",
                "--nonsense",
                "nonsense",
                "--xla_force_host_platform_device_count=x",
                "--xla_gpu_autotune_level=99",
            ),
            "JAX_ENABLE_X64": ("1", "0", "maybe"),
            "JAX_DISABLE_JIT": ("1", "perhaps"),
            "JAX_DEFAULT_MATMUL_PRECISION": ("highest", "huge"),
            "JAX_NUMPY_DTYPE_PROMOTION": ("strict", "standard", "none"),
            "JAX_DEBUG_NANS": ("1", "2"),
            "XLA_PYTHON_CLIENT_MEM_FRACTION": ("0.5", "abc", "7"),
            "XLA_PYTHON_CLIENT_ALLOCATOR": ("platform", "nonsense"),
            "CUDA_VISIBLE_DEVICES": ("", "-1", "99", "x"),
            "JAX_CUDA_VISIBLE_DEVICES": ("all", "x"),
            "LD_LIBRARY_PATH": ("/nowhere",),
            "TF_CPP_MIN_LOG_LEVEL": ("x", "-1"),
            "JAX_COMPILATION_CACHE_DIR": ("/proc/nowhere",),
        },
    )
    command = draw.choice([COMPILE, (*DUMP, "t.toml")])
    return Case(command, SAID, run=in_process, limit_s=LIMIT_S, before=setting(variables))


@kind("environments")
def variables_of_the_doctor(draw: random.Random, folder: Path) -> Case:
    """A variable with which JAX cannot work, which the doctor must find."""
    found = {
        "JAX_PLATFORMS": ("gpu", "cuda", "nonsense"),
        "JAX_PLATFORM_NAME": ("gpu",),
        "XLA_FLAGS": ("--nonsense", "--xla_nonsense=1"),
        "JAX_DISABLE_JIT": ("1",),
        "JAX_DEFAULT_MATMUL_PRECISION": ("highest",),
        "JAX_NUMPY_DTYPE_PROMOTION": ("strict",),
        "JAX_DEBUG_NANS": ("1",),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ("abc", "7"),
        "XLA_PYTHON_CLIENT_ALLOCATOR": ("nonsense",),
        "JAX_CUDA_VISIBLE_DEVICES": ("x",),
    }
    variables = drawn_of(draw, found, most=1)
    (name,) = variables
    return Case(
        ("doctor", *draw.choice([(), ("--json",)])),
        frozenset({0, 1}),
        run=in_process,
        before=setting(variables),
        check=lambda ended: "" if name in ended.stdout else f"the doctor doesn't name {name}",
        without=("message", "next step"),  # its answer is on stdout
    )


@kind("environments")
def variables_of_launchers(draw: random.Random, folder: Path) -> Case:
    """Variables of clusters, by which JAX may take one process for one of many. They change nothing."""
    variables = drawn_of(
        draw,
        {
            "SLURM_JOB_ID": ("17",),
            "SLURM_NTASKS": ("8", "x"),
            "SLURM_PROCID": ("3", "x"),
            "SLURM_STEP_NODELIST": ("a[1-4]", "["),
            "OMPI_MCA_orte_hnp_uri": ("1.0;tcp://10.0.0.1:1", "x"),
            "OMPI_COMM_WORLD_SIZE": ("4", "x"),
            "OMPI_COMM_WORLD_RANK": ("2",),
            "JAX_COORDINATOR_ADDRESS": ("nowhere:1", "x"),
            "RANK": ("1",),
            "WORLD_SIZE": ("2",),
            "KUBERNETES_SERVICE_HOST": ("10.0.0.1",),
        },
        most=4,
    )
    return Case(
        draw.choice([COMPILE, (*DUMP, "t.toml")]), frozenset({0}), run=in_process, limit_s=LIMIT_S, before=setting(variables)
    )


@kind("environments")
def variables_of_terminals(draw: random.Random, folder: Path) -> Case:
    """Variables of terminals, languages and Python's own, at which a list has the same records."""
    variables = drawn_of(
        draw,
        {
            "COLUMNS": ("0", "1", "abc", "-5", "9" * 30, str(draw.randint(20, 200))),
            "LINES": ("0", "abc"),
            "TERM": ("dumb", "", "unknown", "nonsense", None),
            "NO_COLOR": ("", "1"),
            "FORCE_COLOR": ("1",),
            "LANG": ("C", "nonsense", None),
            "LC_ALL": ("C", "POSIX", "xx_YY.ZZ"),
            "PYTHONIOENCODING": ("ascii", "latin-1", "utf-16", "ascii:strict"),
            "PYTHONWARNINGS": ("error", "nonsense", "error::DeprecationWarning"),
            "PYTHONUTF8": ("0", "1"),
            "PYTHONOPTIMIZE": ("1", "2"),
            "PYTHONDEVMODE": ("1",),
            "PYTHONUNBUFFERED": ("1",),
            "CI": ("1", "true"),
        },
        most=3,
    )
    command = draw.choice([LIST, ("run", "--help"), ("doctor",), ("run", "--list", "policies")])

    def check(ended: Ended) -> str:
        return "" if ended.stdout.strip() else "nothing was printed"

    codes = SAID - {2} if command[0] == "doctor" else frozenset({0})
    return Case(
        command,
        codes,
        run=in_process,
        limit_s=LIMIT_S,
        before=setting(variables),
        check=check,
        without=("message", "next step"),
    )


@kind("environments")
def folders_of_the_user(draw: random.Random, folder: Path) -> Case:
    """The home, the cache and the place for temporary files aren't there, are files, or can't be written."""
    file = folder / "a file"
    file.write_text("")
    places = ("/proc", "/nowhere", str(file), "", None)
    variables = drawn_of(draw, {"HOME": places, "XDG_CACHE_HOME": (*places, "relative"), "TMPDIR": places}, most=3)
    (folder / "lengths.txt").write_text("32\n" * 50)
    command = draw.choice(
        [
            COMPILE,
            ("recommend", "--model", "tiny", "--policy", "nothing", "--target", "h100-80gb", "--batch", "2"),
            ("sweep", *MODEL, "--target", "h100-80gb", "--out", "rows.jsonl"),
            ("explain", *MODEL, "--target", "h100-80gb"),
            ("doctor",),
        ]
    )
    return Case(command, SAID, without=unsaid(command), run=in_process, limit_s=LIMIT_S, before=setting(variables))


@kind("environments")
def deleted_folder(draw: random.Random, folder: Path) -> Case:
    """The working folder was deleted."""
    gone = folder / "gone"
    gone.mkdir()

    def before() -> None:
        os.chdir(gone)
        gone.rmdir()

    command = draw.choice(
        [LIST, ("run", "--help"), COMPILE, (*DUMP, "t.toml"), (*COMPILE, "--out", "rows.jsonl"), ("doctor",)]
    )
    return Case(command, SAID, without=unsaid(command), run=in_process, limit_s=LIMIT_S, before=before)


@kind("environments")
def limits(draw: random.Random, folder: Path) -> Case:
    """Little memory for addresses, or few open files.

    XLA's runtime and cuDNN end the process with a message of their own (SIGABRT) where they get no thread or no memory.
    """
    what, least, most = draw.choice([(resource.RLIMIT_AS, 2**28, 2**33), (resource.RLIMIT_NOFILE, 8, 64)])
    limit = draw.randint(least, most)
    command = draw.choice([LIST, COMPILE, (*DUMP, "t.toml"), ("doctor",)])
    return Case(
        command,
        SAID | ({-signal.SIGABRT} if what == resource.RLIMIT_AS else set()),
        without=unsaid(command),
        run=in_process,
        limit_s=LIMIT_S,
        before=functools.partial(resource.setrlimit, what, (limit, limit)),
    )


def give_up_permissions() -> None:
    """Makes the permissions of files hold for this process, which are nothing to the superuser (`man 7 capabilities`)."""
    version, of_this_process = 0x20080522, 0
    header, nothing = struct.pack("Ii", version, of_this_process), bytes(24)
    assert ctypes.CDLL(None, use_errno=True).capset(header, nothing) == 0, os.strerror(ctypes.get_errno())


@kind("permissions")
def file_that_cannot_be_written(draw: random.Random, folder: Path) -> Case:
    """A file or folder of a flag, in a folder where nothing can be made, or without the permission to write it."""
    flag, command = draw.choice(
        [
            ("--out", COMPILE),
            ("--out", ("sweep", *MODEL)),
            ("--out", ("recommend", "--model", "tiny")),
            ("--csv", ("sweep", *MODEL, "--out", "rows.jsonl")),
            ("--page", ("explain", *MODEL)),
            ("--xprof", ("explain", *MODEL)),
            ("--plot", ("explain", *MODEL)),
            ("--plot", COMPILE),
            ("--save-plan", ("run", "--model", "tiny", "--policy", "auto", "--target", "h100-80gb")),
            ("--dump-target", ("run",)),
            ("--run-dir", TRAIN),
        ]
    )
    ending = {"--plot": ".png", "--page": ".html"}.get(flag, "")
    where = draw.choice(["proc", "folder", "file", "nowhere", "below a file"])
    if where == "proc":
        path = Path("/proc/self", f"x{ending}")
    elif where == "nowhere":
        path = folder / "nowhere" / "deep" / f"x{ending}"
    else:
        inner = folder / "inner"
        inner.mkdir()
        path = inner / f"x{ending}"
        if where == "file":
            path.write_text("")
            path.chmod(0o444)
        elif where == "below a file":
            path = inner / "a" / f"x{ending}"
            (inner / "a").write_text("")
        inner.chmod(0o555)
    is_made = where == "nowhere" and flag in ("--xprof", "--run-dir")  # folders that the command makes
    if is_made:
        return Case((*command, flag, "/proc/self/deep"), USAGE | {1}, says=(flag,), before=give_up_permissions)
    return Case((*command, flag, str(path)), USAGE | {1}, says=(flag,), before=give_up_permissions, limit_s=LIMIT_S)


@kind("permissions")
def file_that_cannot_be_read(draw: random.Random, folder: Path) -> Case:
    """A file that a flag names, without the permission to read it, or in a folder without the permission to enter it."""
    inner = folder / "inner"
    inner.mkdir()
    flag, name, command = draw.choice(
        [
            ("--hf", "config.json", ("run", "--policy", "nothing")),
            ("--data", "text.txt", ("train", *MODEL, "--target", "cpu")),
            ("--lengths", "lengths.txt", ("run", "--model", "tiny")),
            ("--price", "price.toml", ("recommend", "--model", "tiny")),
            ("--target", "target.toml", ("run", "--model", "tiny")),
            ("--policy", "plan.json", ("run", "--model", "tiny")),
            ("--model", "model.py", ("run", "--policy", "nothing")),
        ]
    )
    path = inner / name
    path.write_text("{}")
    (path if draw.random() < 0.5 else inner).chmod(0)
    value = {"--policy": f"plan:{path}", "--model": f"{path}:workload"}.get(flag, str(path))
    return Case((*command, flag, value), USAGE | {1}, says=(name,), before=give_up_permissions)


def lines_whole(path: Path) -> str:
    """What is wrong with a file of JSON lines. Empty where each line is whole, or there is no file."""
    for line in path.read_text().split("\n") if path.exists() else ():
        try:
            json.loads(line or "{}")
        except ValueError:
            return f"{path.name} has a line that isn't whole: {line[:80]!r}"
    return ""


def on_small_disk(size: int, case: Case, folder: Path) -> Ended:
    """Runs the case where `disk` in its folder is a disk of `size` bytes. Only the superuser may mount one.

    The files are there afterwards, too, in `disk`.
    """
    disk, copy = folder / "disk", folder / "copy"
    shutil.copytree(disk, copy)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "tmpfs", disk], check=True)
    try:
        shutil.copytree(copy, disk, dirs_exist_ok=True)
        ended = in_fork(case, folder)
        shutil.rmtree(copy)
        shutil.copytree(disk, copy)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    shutil.rmtree(disk)
    copy.rename(disk)
    return ended


@kind("disks")
def full_disk(draw: random.Random, folder: Path) -> Case:
    """A disk of some KiB. What was there before stays, and each line of a store is whole or the last one."""
    disk = folder / "disk"
    disk.mkdir()
    old = disk / "old"
    old.write_text("before\n")
    flag, name, command = draw.choice(
        [
            ("--out", "rows.jsonl", COMPILE),
            ("--out", "rows.jsonl", ("sweep", *MODEL, "--target", "h100-80gb")),
            ("--csv", "old", ("sweep", *MODEL, "--target", "h100-80gb", "--out", "disk/rows.jsonl")),
            ("--page", "old", ("explain", *MODEL, "--target", "h100-80gb")),
            ("--xprof", "profile", ("explain", *MODEL, "--target", "h100-80gb")),
            ("--dump-target", "old", ("run",)),
            ("--run-dir", "runs", TRAIN),
            ("--run-dir", "runs", TRAIN),
        ]
    )
    pages = draw.choice([2, 3, 4, 16, 64, 256, 1024])

    def check(ended: Ended) -> str:
        if name == "old" and ended.exit_code and old.read_text() != "before\n":
            return "what was there before is gone"
        return lines_whole(disk / "rows.jsonl") or lines_whole(disk / "runs" / "metrics.jsonl")

    run = functools.partial(on_small_disk, pages * resource.getpagesize())
    return Case((*command, flag, f"disk/{name}"), SAID, check=check, run=run, limit_s=LIMIT_S)


@kind("disks")
def full_device(draw: random.Random, folder: Path) -> Case:
    """`/dev/full` as stdout or as the file of a flag: the exit code is 1 or 2, and what a file could hold is in it."""
    if draw.random() < 0.5:
        command = draw.choice(
            [LIST, (*COMPILE, "--out", "rows.jsonl"), (*COMPILE, "--json"), ("run", "--help"), ("doctor",)]
        )

        def before() -> None:
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

        def check(ended: Ended) -> str:
            return lines_whole(folder / "rows.jsonl") or (
                "" if "--out" not in command or (folder / "rows.jsonl").exists() else "no rows in --out"
            )

        return Case(command, frozenset({1}), before=before, check=check)
    command = draw.choice(
        [
            (*COMPILE, "--out"),
            ("sweep", *MODEL, "--target", "h100-80gb", "--out"),
            ("sweep", *MODEL, "--target", "h100-80gb", "--out", "rows.jsonl", "--csv"),
            ("explain", *MODEL, "--target", "h100-80gb", "--page"),
            (*DUMP,),
        ]
    )
    return Case((*command, "/dev/full"), frozenset({1, 2}), says=(command[-1],), limit_s=LIMIT_S)


@kind("terminals")
def any_width(draw: random.Random, folder: Path) -> Case:
    """A terminal of any width. No number is cut, nothing is glued to the line of progress, and nothing of it stays."""
    width = draw.randint(1, 200)
    command = draw.choice([COMPILE, COMPILE, ("doctor",), ("sweep", *MODEL, "--target", "h100-80gb"), TRAIN])
    out = folder / "rows.jsonl"
    if command[0] in ("run", "sweep"):
        command = (*command, "--out", str(out))

    def check(ended: Ended) -> str:
        lines = shown(ended.stdout, max(width, 1))
        if stays := [line for line in lines if SPINNER.search(line)]:
            return f"of the progress stays, or is glued to it: {stays[0]!r}"
        if width >= LEAST and out.exists() and (cut := cut_numbers(lines, out)):
            return f"a number is cut: {cut}"
        return ""

    before = functools.partial(on_terminal, width)
    return Case(command, SAID, run=in_process, limit_s=LIMIT_S, before=before, check=check, without=("message", "next step"))


@kind("terminals")
def closed_streams(draw: random.Random, folder: Path) -> Case:
    """Some of stdin, stdout and stderr are closed, full, or pipes that nobody reads. The rows are in --out all the same."""
    numbers = draw.sample(range(3), draw.randint(1, 3))
    hows = {number: draw.choice(["closed", "full", "unread"]) for number in numbers}

    def before() -> None:
        for number, how in hows.items():
            if how == "closed":
                os.close(number)
            elif how == "full":
                os.dup2(os.open("/dev/full", os.O_RDWR), number)
            else:
                reader, writer = os.pipe()
                os.dup2(writer, number)
                os.close(reader)
                os.close(writer)

    out = folder / "rows.jsonl"
    command = draw.choice([LIST, ("run", "--help"), (*COMPILE, "--out", str(out)), (*COMPILE, "--json", "--out", str(out))])

    ends = hows.get(2) == "unread"  # a pipe of messages that nobody reads ends the command

    def check(ended: Ended) -> str:
        if "--out" in command and not out.exists() and not ends:
            return f"no rows in --out: {hows}"
        return lines_whole(out)

    codes = frozenset({1}) if 1 in hows else frozenset({0, 1} if ends else {0})
    return Case(
        command, codes, run=in_process, limit_s=LIMIT_S, before=before, check=check, without=("message", "next step")
    )


@kind("terminals")
def closed_pipe(draw: random.Random, folder: Path) -> Case:
    """A pipe that its reader closes after some lines, as `head` does."""
    num_lines = draw.randint(0, 8)
    out = folder / "rows.jsonl"
    command = draw.choice(
        [LIST, ("run", "--help"), (*COMPILE, "--out", str(out)), (*COMPILE, "--json", "--out", str(out)), TRAIN]
    )

    def check(ended: Ended) -> str:
        return lines_whole(out) if out.exists() or "--out" not in command else "no rows in --out"

    before = functools.partial(read_by_head, num_lines)
    return Case(
        command,
        frozenset({0, 1}),
        run=in_process,
        limit_s=LIMIT_S,
        before=before,
        check=check,
        without=("message", "next step"),
    )


def copied_by_a_parent(reader: int, writer: int, streams: tuple[int, ...], num_lines: int | None = None) -> None:
    """Continues in a fork with `writer` as its streams.

    This process copies from `reader` to its own stdout, stops after some lines, and ends as the fork does.
    """
    if not (child := os.fork()):
        for number in streams:
            os.dup2(writer, number)
        os.close(reader)
        os.close(writer)
        return
    os.close(writer)
    seen = 0
    while num_lines is None or seen < num_lines:
        try:
            data = os.read(reader, 2**16)
        except OSError:  # the other end of the terminal is closed
            break
        if not data:
            break
        os.write(1, data)
        seen += data.count(b"\n")
    os.close(reader)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)


def on_terminal(width: int) -> None:
    """Makes all streams a terminal of that width."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    os.environ.pop("COLUMNS")
    os.environ.pop("CI", None)  # which has no line of progress
    os.environ["TERM"] = "xterm"
    copied_by_a_parent(master, slave, (0, 1, 2))


def read_by_head(num_lines: int) -> None:
    """Makes stdout a pipe of which some lines are read."""
    copied_by_a_parent(*os.pipe(), (1,), num_lines)


def shown(text: str, width: int) -> list[str]:
    """The lines that a terminal shows in the end, of what was printed on it: with the codes that rich uses."""
    lines, row, column = [""], 0, 0
    for code, letter, character in _CODES.findall(text):
        if letter == "A":
            row = max(0, row - int(code or 1))
        elif letter == "K":
            lines[row] = "" if code == "2" else lines[row][:column]
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif character:
            if column == width:
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def cut_numbers(lines: list[str], out: Path) -> set[str]:
    """The numbers of bytes of the records in `out` that aren't among the words of the lines."""
    words = set(re.findall(r"[\d,.]+", " ".join(lines)))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    numbers = {f"{row['total_bytes'] / 2**30:.3f}" for row in rows if row.get("total_bytes")}
    return {number for number in numbers if number not in {word.rstrip(".,") for word in words}}
