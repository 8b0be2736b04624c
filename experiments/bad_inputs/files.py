"""Files that a command reads: cut, damaged, of another format, of other types, too deep, too large, or no files at all."""

import functools
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.bad_inputs.case import OK, USAGE, Case, in_fork_of, kind
from jaxremat.chips.nvidia.gpu import bundled_names, load_gpu

_CONFIGS = Path(__file__).parent.parent.parent / "examples/configs"
#: Values of JSON that no key takes, and some that only look odd.
_NO_VALUES: tuple[Any, ...] = (None, True, -1, 0, 1.5, -0.0, 1e300, 10**400, "", "x", "12", [], {}, [[]], {"a": 1}, "\ud800")
#: What the keys of a config.json begin with whose values are sizes.
_SIZES = ("num_attention", "num_hidden", "hidden", "vocab", "intermediate")
#: Names of files that are allowed and odd.
NAMES = ("in put.json", "ü.json", "[red].json", "-x.json", "a\nb.json", "\x1b[31m.json", "%s.json", "$(id).json", "'\".json")


def not_a_file(draw: random.Random, path: Path) -> None:
    """Puts something at `path` that can't be read as text: nothing, a folder, or a link to itself or to nowhere."""
    what = draw.choice(["nothing", "folder", "loop", "nowhere"])
    if what == "folder":
        path.mkdir()
    elif what == "loop":
        path.symlink_to(path)
    elif what == "nowhere":
        path.symlink_to(path.with_name("nowhere"))


def damaged(draw: random.Random, data: bytes) -> bytes:
    """The bytes of a file, damaged: cut, overwritten, doubled, in another encoding, compressed, or of another format."""
    at = draw.randrange(1, len(data))
    return draw.choice(
        [
            lambda: data[:at],
            lambda: data[:at] + bytes([draw.randrange(128, 256)]) * 3 + data[at:],
            lambda: b"",
            lambda: b"\x00" * 4096,
            lambda: data.decode().encode("utf-16"),
            lambda: draw.randbytes(1000),
            lambda: b"\x1f\x8b\x08\x00" + draw.randbytes(200),
            lambda: b"\x89PNG\r\n\x1a\n" + draw.randbytes(200),
            lambda: b"<html><body>404</body></html>",
            lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            lambda: b"[" * 200_000,
            lambda: b'{"a":' * 200_000,
            lambda: data + data,
        ]
    )()


def _named(draw: random.Random, folder: Path, usual: str) -> Path:
    """A path for the file, which is often usual and sometimes odd."""
    return folder / (usual if draw.random() < 0.7 else draw.choice(NAMES).replace(".json", Path(usual).suffix))


@kind("files")
def hf_config(draw: random.Random, folder: Path) -> Case:
    """A config.json that is damaged, or whose keys or values are none of its family's."""
    path = _named(draw, folder, "config.json")
    data = draw.choice(sorted(_CONFIGS.glob("**/*.json"))).read_bytes()
    found, way = (
        json.loads(data),
        draw.choice(["damaged", "no file", "value", "value", "value", "key", "without", "no object"]),
    )
    if way == "damaged":
        path.write_bytes(damaged(draw, data))
    elif way == "no file":
        not_a_file(draw, path)
    else:
        sized = [
            key
            for key, value in found.items()
            if type(value) is int and key.startswith(("num_", "hidden", "vocab", "inter"))
        ]
        if way == "value":
            found[draw.choice(sized)] = draw.choice([value for value in _NO_VALUES if value is not True or value != 0])
        elif way == "key":
            found[draw.choice(["quantization_config", "é", "", "num_layer", "x" * 10_000, "\x00", "[red]"])] = {"bits": 4}
        elif way == "without":
            found["model_type"] = draw.choice([None, "", "llama4", 3, [], "GPT2", "x" * 9999])
        else:
            found = draw.choice([[found], "llama", 3, None, True, []])
        path.write_text(json.dumps(found))
    return Case(("run", "--list", "policies", f"--hf={path}"), says=(path.name,) if path.name.isprintable() else ())


_NO_PRICES = ("-2", "0", "nan", "inf", "-inf", "true", "[2.5]", "{ a = 1 }", "2024-01-01", '"2.50"', "1e999", "-0.0")


@kind("files")
def price_files(draw: random.Random, folder: Path) -> Case:
    """Prices that are none, of GPUs that aren't there, or no TOML."""
    path = _named(draw, folder, "prices.toml")
    gpu = draw.choice(bundled_names())
    wrong = [
        f"{gpu} = {draw.choice(_NO_PRICES)}",
        f"{gpu} = 2.5\n{gpu} = 3",
        f"{gpu[:-1]} = 2.5",
        f"[{gpu}]\nprice = 2.5",
        f"{gpu}.hour = 2.5",
        f"{gpu} = 2,50",
        f"{gpu} = $2.50",
        f"{gpu} = {'9' * 6000}",
        f"{gpu}: 2.5",
        "# nothing",
        "a = " + "[" * 50_000,
        f'"{gpu}\\u0000" = 1',
        "[[red]]\nx = 1",
    ]
    if draw.random() < 0.2:
        not_a_file(draw, path)
    else:
        path.write_bytes(draw.choice([damaged(draw, f"{gpu} = 2.5\n".encode()), *(text.encode() for text in wrong)]))
        if path.read_bytes() in (f"{gpu} = 2.5\n".encode()[:n] for n in range(len(gpu) + 4, 30)):
            path.write_bytes(b"x")  # it was cut such that it is still right
    return Case(("recommend", "--price", str(path), "--target", gpu, "--devices", "1"), says=("--price",))


@kind("files")
def lengths_files(draw: random.Random, folder: Path) -> Case:
    """Lengths that are none, counts that are none, or no text."""
    path = _named(draw, folder, "lengths.txt")
    wrong = [
        "0",
        "-5",
        "1.5",
        "512;3",
        "512,0",
        "512,-1",
        "512,1,1",
        "1e3",
        "x",
        "٥١٢",
        "9" * 6000,
        "10000001",
        "length,count",
    ]
    wrong += ["512," + "9" * 18, "\ufeff512", "[red]", "512\x1b[31m", "0x10", "NaN", "512 , "]
    if draw.random() < 0.2:
        not_a_file(draw, path)
    else:
        lines = [f"{draw.randrange(1, 900)},{draw.randrange(1, 99)}" for _ in range(draw.choice([0, 1, 300]))]
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(wrong))
        data = draw.choice(["\n".join(lines).encode(), b"", b"\n\n# nothing\n", draw.randbytes(500) + b"\xff", b"\x00" * 99])
        path.write_bytes(data)
    return Case(("run", "--list", "policies", f"--lengths={path}"), says=("--lengths",))


@kind("files")
def target_files(draw: random.Random, folder: Path) -> Case:
    """The description of a GPU, cut, edited, of another GPU maker, or with a field that XLA would divide by."""
    path = _named(draw, folder, "gpu.txt")
    text = load_gpu(draw.choice(bundled_names()))[1].to_text()
    lines = text.splitlines()
    numbered = [n for n, line in enumerate(lines) if line.startswith("  ") and line.partition(": ")[2].isdigit()]
    way, at = (
        draw.choice(["no file", "cut", "damaged", "edited", "edited", "edited", "without", "brackets"]),
        draw.choice(numbered),
    )
    name = lines[at].partition(":")[0].strip()
    if way == "no file":
        not_a_file(draw, path)
    elif way == "cut":
        path.write_text(text[: draw.randrange(text.index("cuda_compute_capability"))])
    elif way == "damaged":
        path.write_bytes(
            draw.choice([b"", b"{" * 100_000, draw.randbytes(999), b"platform_name", text.encode("utf-16"), b"a: 1" * 9])
        )
    elif way == "edited":
        lines[at] = f"  {name}: " + draw.choice(
            ["0", "-1", '"x"', "1e400", "nan", "9" * 6000, "{ a: 1 }", "true", "1 1", "x"]
        )
        path.write_text("\n".join(lines))
    elif way == "without":
        path.write_text("\n".join(lines[:at] + lines[at + 1 :]))
    else:
        path.write_text(
            text.replace(*draw.choice([("{", ""), ("}", ""), ("{", "{{"), ("}", "}}"), ("{", "("), ("{", "}")]), 1)
        )
    return Case(("run", "--list", "policies", f"--target={path}"))


def _a_plan() -> dict[str, Any]:
    """A plan as --save-plan writes it."""
    train = {"seq_len": 64, "loss": "full", "optimizer": "adamw"}
    return {
        "record": "plan",
        "schema": 2,
        "model": "tiny",
        "num_params": 10**5,
        "target": "h100-80gb",
        "seq_len": 64,
        "objective": "time",
        "policy": "save:context",
        "loss": "full",
        "batch": 2,
        "budget_bytes": 10**9,
        "total_bytes": 10**6,
        "predicted_total_bytes": None,
        **{"step_s": 0.01, "recompute_s": None, "bound_s": 0.01},
        **{"layers": ["save:context"] * 2, "prices": [], "more": [], "tried": [], "num_compiles": 3},
        "config": {"model": {"num_layers": 2}, "train": train},
        "versions": {"jax": "0.10.2"},
        "layout": "loop",
    }


@kind("files")
def plan_files(draw: random.Random, folder: Path) -> Case:
    """A plan that was cut or edited, of a newer version, or another file."""
    path = _named(draw, folder, "plan.json")
    plan, way = _a_plan(), draw.choice(["no file", "damaged", "edited", "edited", "edited", "without", "newer", "no plan"])
    if way == "no file":
        not_a_file(draw, path)
    elif way == "damaged":
        path.write_bytes(damaged(draw, json.dumps(plan).encode()))
    else:
        needed = ["model", "target", "policy", "loss", "batch", "total_bytes", "budget_bytes", "config", "versions"]
        name = draw.choice(needed)
        if way == "edited":
            wrong = {
                "batch": (0, -1, 1.5, "2", None, 10**30, True, 2**40),
                "policy": ("", "auto", "plan:x", "dots+", 3, None, "[red]", "x" * 5000),
                "loss": ("Full", "chunked:0", 3, None, ""),
            }.get(name, (None, 3.5, [], True, {"a": []} if name == "versions" else "\x00" if name == "total_bytes" else []))
            plan[name] = draw.choice(wrong)
        elif way == "without":
            del plan[name]
        elif way == "newer":
            plan["schema"] = draw.choice([1, 3, 10**30])
        else:
            plan = draw.choice(
                [[plan], {"record": "trial"}, {}, "plan", None, {"record": ["plan"]}, {**plan, "record": "plans"}]
            )
        path.write_text(json.dumps(plan))
    model = ("--model", "tiny", "--seq-len", "64")
    return Case(("run", "--list", "policies", *model, f"--policy=plan:{path}"))


@kind("files")
def a_plan_as_saved(draw: random.Random, folder: Path) -> Case:
    """A plan as it was saved, under odd names and behind links: it is taken."""
    path = folder / draw.choice(NAMES)
    path.write_text(json.dumps(_a_plan(), indent=draw.choice([None, 1, "\t"]), ensure_ascii=draw.choice([True, False])))
    if draw.random() < 0.3:
        (folder / "link").symlink_to(path)
        path = folder / "link"
    return Case(("run", "--list", "policies", "--model", "tiny", "--seq-len", "64", f"--policy=plan:{path}"), OK)


@kind("files")
def data_files(draw: random.Random, folder: Path) -> Case:
    """Text to train on that isn't there, is empty or too short."""
    path = _named(draw, folder, "text.txt")
    if draw.random() < 0.4:
        not_a_file(draw, path)
    else:
        path.write_bytes(draw.randbytes(draw.choice([0, 1, 2, 63, 64])))
    flags = ("--model", "tiny", "--seq-len", "64", "--batch", "1", "--policy", "nothing")
    command = draw.choice([("train", *flags, "--num-steps", "1"), ("run", "--target", "cpu", *flags)])
    return Case((*command, f"--data={path}"), says=())


_TINY: dict[str, Any] = {"vocab_size": 8, "num_layers": 1, "embed_dim": 4, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4}
_TINY |= {"mlp_dim": 8, "max_seq_len": 8, "positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "use_bias": False}


def _weights(edit: Callable[[dict[str, Any]], None]) -> bytes:
    """A safetensors file for a decoder of `_TINY`, whose header was edited. Its values are zeros."""
    shapes = {"model.embed_tokens.weight": [8, 4], "model.norm.weight": [4]}
    layer = "model.layers.0."
    shapes |= {f"{layer}self_attn.{name}_proj.weight": [4, 4] for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj.weight": [8, 4] for name in ("gate", "up")} | {
        f"{layer}mlp.down_proj.weight": [4, 8]
    }
    shapes |= {f"{layer}{name}_layernorm.weight": [4] for name in ("input", "post_attention")}
    header, at = dict[str, Any](), 0
    for name, shape in shapes.items():
        num_bytes = 4 * functools.reduce(lambda a, b: a * b, shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    edit(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def _load_weights(path: Path) -> int:
    from jaxremat.config import ModelConfig
    from jaxremat.model.weights import load_safetensors

    load_safetensors(path, ModelConfig(**_TINY))
    return 0


@kind("files")
def weights_as_saved(draw: random.Random, folder: Path) -> Case:
    """Weights as they were saved, under odd names: they are loaded."""
    path = folder / draw.choice(NAMES).replace(".json", ".safetensors")
    path.write_bytes(_weights(lambda header: None))
    return Case(("python", "load_safetensors", str(path)), OK, run=in_fork_of(lambda: _load_weights(path)))


@kind("files")
def weights(draw: random.Random, folder: Path) -> Case:
    """Weights whose header is cut, too long, has a tensor twice or too few, or of other shapes and types."""
    path = _named(draw, folder, "model.safetensors")
    good = _weights(lambda header: None)
    names = list(json.loads(good[8:].partition(b"\x00")[0]))
    name = draw.choice(names)

    def edit(header: dict[str, Any]) -> None:
        tensor = header[name]
        size = tensor["data_offsets"][1] - tensor["data_offsets"][0]
        way = draw.randrange(9)
        if way == 0:
            tensor["dtype"] = draw.choice(["I32", "U32", "F33", "", "bool"])
        elif way == 1:
            tensor["shape"] = draw.choice([[size // 4, 1, 1], [1, size // 4, 1], [], [-1], [2**62, 2**62], "x"])
        elif way == 2:
            tensor["data_offsets"] = draw.choice([[0, 10**15], [-4, 0], [8, 4], [0], "x"])
        elif way == 3:
            del header[name]
        elif way == 4:
            header[name.replace("model.", "", 1)] = {**tensor}
        elif way == 5:
            header[draw.choice(["model.layers.1.mlp.up_proj.weight", "é", "lm_head.weight", "x" * 9999])] = header.pop(name)
        elif way == 6:
            header[name] = draw.choice([None, 3, [], {}])
        elif way == 7:
            header["__metadata__"] = draw.choice([{"a": 1}, 3, []])
        else:
            header.clear()

    length = draw.choice([0, 7, 2**31, 2**63, 2**64 - 1, len(good)])
    data = draw.choice(
        [
            lambda: good[: draw.randrange(len(good) - 1)],
            lambda: struct.pack("<Q", length) + good[8:],
            lambda: good + draw.randbytes(9),
            lambda: draw.randbytes(500),
            lambda: b"\x80\x04\x95" + draw.randbytes(99),
            lambda: _weights(edit),
            lambda: _weights(edit),
            lambda: _weights(edit),
            lambda: _weights(edit),
        ]
    )()
    path.write_bytes(data)
    return Case(("python", "load_safetensors", str(path)), USAGE, run=in_fork_of(lambda: _load_weights(path)))
