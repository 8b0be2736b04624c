"""A policy that cannot be meant is refused with one message, which says what is allowed and what to type next.

Every message is asserted to the letter. The other refusals of the command are in `tests/test_errors.py`.
"""

import pytest

from jaxremat.errors import UnknownNameError
from jaxremat.policy.grammar import parse
from jaxremat.policy.names import resolve

FORMS = (
    "none, everything, nothing, dots, dots-no-batch, save:NAME,..., offload:NAME,..., every:K, every:sqrt, every:K+INNER, "
    "one-in:K, N*POLICY|N*POLICY"
)
GRAMMAR = f"Allowed: {FORMS}, each rule and name list with +attention, and JAX's and MaxText's own names."
EMPTY_PART = f"Allowed: {FORMS}. Next: see --list policies."
COUNT = "Allowed: a whole number from 1 up, or sqrt. Next: write it like every:4 or every:sqrt."
NAMES = "context, decoder_layer_input, key_proj, mlpwi_0, mlpwo, out_proj, query_proj, value_proj"
BY_PATH = "or any other value by module path and operation, such as"
MISSPELT = "Likely cause: a misspelt name would recompute that value without a word."
POLICY_TEXTS = {
    "dotts": f"unknown policy 'dotts'. {GRAMMAR} Next: did you mean 'dots'?",
    "Dots": f"unknown policy 'Dots'. {GRAMMAR} Next: did you mean 'dots'?",
    "nothin": f"unknown policy 'nothin'. {GRAMMAR} Next: did you mean 'nothing' or 'none' or 'nothing_saveable'?",
    "save_qkv": f"unknown policy 'save_qkv'. {GRAMMAR} Next: did you mean 'save_qkv_proj' or 'save'?",
    "zzzzqq": f"unknown policy 'zzzzqq'. {GRAMMAR} Next: see --list policies.",
    "save:context+dotz": f"unknown policy 'dotz' in 'save:context+dotz'. {GRAMMAR} Next: did you mean 'dots'?",
    "save_only_these_names(a)": f"unknown policy 'save_only_these_names(a)'. {GRAMMAR} "
    "Next: write JAX's name policies as save:NAME,NAME and offload:NAME,NAME.",
    "custom": f"unknown policy 'custom'. {GRAMMAR} "
    "Next: MaxText's custom is its own lists: write them as save:NAME,NAME+offload:NAME,NAME.",
    "every": f"unknown policy 'every'. {GRAMMAR} "
    "Next: every takes a number of layers and stands first: every:4, every:4+dots, one-in:2.",
    "": f"the policy is empty. {EMPTY_PART}",
    "+": f"policy '+' has an empty part. {EMPTY_PART}",
    "dots+": f"policy 'dots+' has an empty part. {EMPTY_PART}",
    "save:": "policy 'save:' has an empty name after save:. Allowed: checkpoint names joined by commas. "
    "Next: see the names of a model with --list names.",
    "every:": f"policy 'every:' needs a number of layers and got ''. {COUNT}",
    "every:0": f"policy 'every:0' needs a number of layers and got '0'. {COUNT}",
    "every:-1": f"policy 'every:-1' needs a number of layers and got '-1'. {COUNT}",
    "every:1.5": f"policy 'every:1.5' needs a number of layers and got '1.5'. {COUNT}",
    "one-in:x": "policy 'one-in:x' needs a number of layers and got 'x'. Allowed: a whole number from 1 up. "
    "Next: write it like one-in:2.",
    "every:" + 5000 * "9": f"policy 'every:{5000 * '9'}' needs a number of layers and got '{5000 * '9'}'. {COUNT}",
    "save": f"unknown policy 'save'. {GRAMMAR} Next: save takes checkpoint names: save:NAME,NAME.",
    "every:3": "policy 'every:3' asks for 3 layers, and the model has 2. Allowed: K from 1 to 2. "
    "Next: every:2 takes all the layers as one group.",
    "one-in:3": "policy 'one-in:3' asks for 3 layers, and the model has 2. Allowed: K from 1 to 2. "
    "Next: one-in:2 takes all the layers as one group.",
    "one-in:2+dots": "policy 'one-in:2+dots' gives one-in:K an inner policy, and its rematted layer always recomputes "
    "everything. Allowed: one-in:K alone. Next: write one-in:2, or every:K+dots to recompute in groups.",
    "attention": "policy 'attention' says only 'attention', which goes with another policy. Allowed: RULE+attention with a "
    "rule of none, everything, nothing, dots, dots-no-batch. "
    "Next: nothing+attention saves fused attention's outputs and recomputes the rest.",
    "dots+nothing": "policy 'dots+nothing' adds 'nothing' to 'dots', a policy on its own. Allowed: one rule, or save:NAME,... "
    "and offload:NAME,..., each with +attention, also as INNER of every:K. Next: choose one of them, for example dots.",
    "save:a+offload:a": "policy 'save:a+offload:a' both saves and offloads a. Next: keep each name in one of the two lists.",
    "save:a+save:b": "policy 'save:a+save:b' says save: twice. Next: join them: save:NAME,NAME.",
    "save:qery_proj": f"policy 'save:qery_proj' names 'qery_proj', and no tensor carries that name. Allowed: {NAMES}, "
    f"{BY_PATH} mlp/integer_pow. {MISSPELT} Next: did you mean 'query_proj' or 'key_proj' or 'value_proj'?",
    "every:2+save:context+offload:xx,yy": "policy 'save:context+offload:xx,yy' names 'xx', 'yy', and no tensor carries those "
    f"names. Allowed: {NAMES}, {BY_PATH} Dropout_0/max. {MISSPELT} Next: choose among the names above.",
}  # fmt: skip


@pytest.mark.parametrize("text", POLICY_TEXTS)
def test_policies(text, refusal):
    assert refusal(["--model", "tiny", "--target", "cpu", "--batch", "2", "--policy", text]) == POLICY_TEXTS[text]


def test_an_alias_none_of_whose_names_exist():
    """A preset may name tensors that a model lacks, but not only such; the gelu MLP has no mlpwi_1."""
    with pytest.raises(UnknownNameError) as raised:
        resolve(parse("save_out_proj"), {"context", "mlpwo"})
    assert str(raised.value) == (
        "policy 'save_out_proj' names 'out_proj', and no tensor carries that name. Allowed: context, mlpwo. "
        f"{MISSPELT} Next: choose among the names above."
    )
    assert resolve(parse("minimal"), {"context", "mlpwo"}) == parse("save:mlpwo")
