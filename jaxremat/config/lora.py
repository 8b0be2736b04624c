"""LoRA adapters as `--lora` spells them: `16`, or `16:query,value` for some linear layers.

    parse_lora("16:q_proj,wi_*")    # Lora(rank=16, layers=("query", "wi_0", "wi_1"))

A linear layer with the kernel W computes `x W + (alpha / rank) x A B`. W is frozen, and A and B are trained.

References:
    Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; peft's `LoraConfig`, whose scaling and default alpha
    these are; Dettmers et al. 2023, "QLoRA".
"""

import fnmatch
import re
from dataclasses import dataclass

from jaxremat.errors import bad_value, nearest

#: The linear layers of a decoder layer, with the names that Hugging Face's models have for them.
LINEAR_LAYERS = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "wi_0": "gate_proj",
    "wi_1": "up_proj",
    "wo": "down_proj",
}
#: Those of the MLP. Experts have them without modules of their own.
OF_MLP = ("wi_0", "wi_1", "wo")
MAX_RANK = 4096


@dataclass(frozen=True)
class Lora:
    """The adapters of a model.

    Attributes:
        rank: the columns of A and the rows of B.
        layers: the names of the linear layers that have an adapter.
    """

    rank: int
    layers: tuple[str, ...]


def parse_lora(text: str) -> Lora | None:
    """The adapters of `RANK[:PATTERN,...]`. None for an empty text.

    Raises:
        UsageError: the text isn't of that form, or a pattern matches no linear layer.
    """
    if not text:
        return None
    match = re.fullmatch(r"([0-9]{1,6})(?::(.+))?", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= MAX_RANK:
        raise bad_value(
            "--lora", repr(text), f"RANK[:PATTERNS], with a rank from 1 to {MAX_RANK}", "--lora 16, or --lora 16:query,value"
        )
    layers = list[str]()
    for pattern in (match[2] or "*").split(","):
        found = [
            name
            for names in LINEAR_LAYERS.items()
            for name in names[:1]
            if any(fnmatch.fnmatchcase(one, pattern) for one in names)
        ]
        if not found:
            names = [*LINEAR_LAYERS, *LINEAR_LAYERS.values()]
            raise bad_value(
                "--lora",
                repr(pattern),
                f"globs of the linear layers {', '.join(names)}",
                nearest(pattern, names) or "--lora 16",
            )
        layers += found
    return Lora(int(match[1]), tuple(dict.fromkeys(layers)))
