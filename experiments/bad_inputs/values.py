"""Values that a command reads with a grammar of its own, each spoilt in one place, or put together at random."""

import json
import random
from pathlib import Path

from experiments.bad_inputs.case import OK, USAGE, Case, kind
from experiments.bad_inputs.contradictions import OWN
from experiments.bad_inputs.flags import NO_NAMES
from jaxremat.chips.catalog import PRESETS as XLA_PRESETS
from jaxremat.chips.nvidia.gpu import bundled_names
from jaxremat.mesh.axes import AXES
from jaxremat.model.presets import PRESETS
from jaxremat.policy.grammar import ALIASES, forms

#: Numbers of a size where a whole number from 1 up is needed.
NO_COUNTS = ("0", "-1", "1.5", "1e3", "x", "", "٣", "½", "9" * 400, "0x8", "1_0", "+3", "8 8", "nan", "∞")
#: Pieces that a policy is put together of at random, most of which make none.
_PIECES = ("save:", "offload:", "every:", "one-in:", "dots", "nothing", "attention", "auto", "plan:", "sqrt", "context")
_PIECES += ("+", "|", "*", ",", ":", "2", "0", "-1", " ", "\t", "é", "[/red]", "(", "\x00"[:0], "\u200b", "9" * 30)


def _of_run(flag: str, value: str, says: tuple[str, ...] = ()) -> Case:
    """`run` with one wrong value, which ends before anything is compiled, also where it is taken."""
    return Case(("run", "--list", "policies", f"{flag}={value}"), says=says)


def spoilt(draw: random.Random, text: str) -> str:
    """The text with one character changed, doubled, dropped or added, or cut."""
    at = draw.randrange(len(text))
    other = draw.choice("xX0 -+|*:=,;[]{}\"'\\/\t\u00e9\u200b\u202e")
    return draw.choice(
        [
            text[:at] + other + text[at:],
            text[:at] + other + text[at + 1 :],
            text[:at] + text[at + 1 :],
            text[: at + 1] + text[at:],
            text[:at],
            text + other,
        ]
    )


def _is_policy(text: str) -> bool:
    from jaxremat.errors import UsageError
    from jaxremat.policy.grammar import parse

    try:
        parse(text)
    except UsageError:
        return text == "auto" or text.startswith("plan:")
    return True


@kind("values")
def policies(draw: random.Random, folder: Path) -> Case:
    """Texts that are near a policy, and heaps of its pieces. What the grammar takes is expected to be taken."""
    known = [*(form.example for form in forms()), *ALIASES]
    text = draw.choice(
        [
            spoilt(draw, draw.choice(known)),
            "".join(draw.choice(_PIECES) for _ in range(draw.randrange(1, 12))),
            draw.choice(NO_NAMES),
            "+".join(["every:2"] * draw.choice([2, 5000])),
            "|".join(["1*nothing"] * draw.choice([13, 4000])),
        ]
    )
    if not text or text.startswith("plan:"):
        text = "x" + text
    if text == "auto" or _is_policy(text):
        return Case(("run", "--list", "policies", "--num-layers=12", f"--policy={text}"), OK | USAGE)
    return _of_run("--policy", text)


@kind("values")
def meshes(draw: random.Random, folder: Path) -> Case:
    """Meshes with an axis or a size that isn't there, or with devices and nodes that don't go with it."""
    axis, other = draw.sample(list(AXES), 2)
    wrong = [
        ("--mesh", f"{axis}={draw.choice(NO_COUNTS[:1] + NO_COUNTS[2:])}"),
        ("--mesh", f"{axis[:-1]}=2"),
        ("--mesh", f"{axis}=2,{axis}=2"),
        ("--mesh", f"{axis}=2,"),
        ("--mesh", f"{axis}=-1"),
        ("--mesh", f"{axis}=-1,{other}=-1", "--devices", "8"),
        ("--mesh", f"{axis}=3", "--devices", "8"),
        ("--mesh", f"{axis}=999999,{other}=999999"),
        ("--mesh", "AUTO"),
        ("--mesh", "auto"),
        ("--mesh", "=" * draw.choice([1, 3000])),
        ("--mesh", ",".join([f"{axis}=2"] * 3000)),
        ("--mesh", "pipeline=2"),
        ("--mesh", f"{axis}=6", "--nodes", "4"),
        ("--devices", draw.choice(["0", "-8", "131073", "9" * 25])),
        ("--devices", "8", "--nodes", draw.choice(["0", "3", "-1", "9"])),
        ("--nodes", "2"),
        ("--mesh", "tensor=7"),
        ("--mesh", "expert=2"),
    ]
    return Case(("run", "--list", "policies", *draw.choice(wrong)), says=())


@kind("values")
def sizes(draw: random.Random, folder: Path) -> Case:
    """Budgets, headrooms and shares that are no size."""
    unit = draw.choice(["GiB", "GB", "B", "", "gib", "TiB"])
    value, flag = draw.choice(
        [
            (f"-1{unit}", "--budget"),
            (f"0{unit}", "--budget"),
            ("40 " + draw.choice(["GiBs", "Gi", "PiB", "G", "g i b", "%", "GiB "]) + draw.choice(["x", "1"]), "--budget"),
            (
                draw.choice(["nan", "inf", "1e9", "1,5GiB", "GiB", ".", "1.2.3GiB", "٤GiB", "40\u00a0GiBx", "9" * 6000]),
                "--budget",
            ),
            ("9" * draw.choice([20, 300]) + unit, "--budget"),
            (draw.choice(["1", "-0.1", "nan", "inf", "1.5"]), "--headroom"),
            (draw.choice(["0", "-0.1", "nan", "inf", "1.01", "75"]), "--mem-fraction"),
        ]
    )
    return _of_run(flag, value, () if flag == "--budget" else (flag,))


@kind("values")
def counts(draw: random.Random, folder: Path) -> Case:
    """Batches and lengths that are no whole numbers from 1 up."""
    flag = draw.choice(["--batch", "--seq-len"])
    parts = [draw.choice(["8", "128"]) for _ in range(draw.randrange(4))]
    parts.insert(draw.randrange(len(parts) + 1), draw.choice([number for number in NO_COUNTS if number or parts]))
    return _of_run(flag, ",".join(parts), (flag,))


@kind("values")
def names(draw: random.Random, folder: Path) -> Case:
    """Models, targets and sets of flags of XLA that aren't there."""
    flag, known = draw.choice(
        [("--model", list(PRESETS)), ("--target", list(bundled_names())), ("--xla-preset", list(XLA_PRESETS))]
    )
    near = [name for name in (spoilt(draw, draw.choice(known)) for _ in range(9)) if name.strip() not in ["", *known]]
    return _of_run(flag, draw.choice([near[0], *NO_NAMES]))


@kind("values")
def losses(draw: random.Random, folder: Path) -> Case:
    """Losses that aren't there, or whose chunk is no number of positions."""
    wrong = [f"chunked:{count}" for count in NO_COUNTS] + [
        "Full",
        "chunk",
        "chunked:",
        ":8",
        "full:8",
        "chunked:8:8",
        "[/b]",
    ]
    return _of_run("--loss", draw.choice(wrong), ("--loss",))


_SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@kind("values")
def rope_scaling(draw: random.Random, folder: Path) -> Case:
    """Stretched rope that is no JSON, or whose keys and values aren't those of its type."""
    good = json.dumps(_SCALING)
    wrong = [
        good[: draw.randrange(1, len(good))],
        json.dumps({**_SCALING, "factor": draw.choice([0, -1, "4", None, [], True])}),
        json.dumps({**_SCALING, "rope_type": draw.choice(["YaRN", "", None, 3])}),
        json.dumps({**_SCALING, draw.choice(["facto", "é", ""]): 1}),
        json.dumps({"rope_type": "linear"}),
        good.replace("4.0", draw.choice(["NaN", "Infinity", "1e999", "9" * 5000])),
        "[" * draw.choice([1, 100_000 // 2]),
        draw.choice(
            ["null", "[]", "1", '"yarn"', "{}", "yarn", "{'rope_type': 'yarn'}", "\x07", '{"rope_type": "yarn"} {}']
        ),
    ]
    command = ("run", "--list", "policies", "--model", "llama3.2-1b", f"--rope-scaling={draw.choice(wrong)}")
    return Case(command, says=("--rope-scaling",))


@kind("values")
def model_arguments(draw: random.Random, folder: Path) -> Case:
    """Arguments that the user's function doesn't take, and words that are no argument."""
    (folder / "own.py").write_text(OWN)
    word = draw.choice(
        ["width", "=8", "wid=8", "1width=8", "width 8=8", "é-=8", "width=8,batch=2", "width:8", "__class__=1", "[/b]=1"]
    )
    words = draw.choice([(word,), ("width=8", "width=9"), ("width=8", word)])
    command = ("run", "--list", "names", "--model", "own.py:workload", "--target", "cpu", "--model-arg", *words)
    return Case(command)
