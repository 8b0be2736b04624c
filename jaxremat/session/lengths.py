"""Several lengths in one command: a request for each, and what doesn't go with several.

`--seq-len 2048,8192` is one request with `lengths=(2048, 8192)`, and `at_each_length` makes the request of each length of it.
`--lengths FILE` is one request with the boundaries of the buckets as its lengths.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxremat.errors import UsageError, alone, bad_value, both, reject
from jaxremat.search.batch import usual_first_batch
from jaxremat.search.buckets import Bucketed, granularity, make_buckets
from jaxremat.search.histogram import read_histogram
from jaxremat.session.flags import RunFlags
from jaxremat.session.request import MESH_AUTO, Request, RequestedPolicy, check_run, requested_model, without_maxtext
from jaxremat.trial.record import TrialRecord

DEFAULT_BUCKETS = 4
MAX_BUCKETS = 64


def check_lengths(flags: RunFlags) -> Request[RunFlags]:
    """The request of the flags of `jaxremat run`, checked at each of its lengths.

    Raises:
        UsageError: a value isn't valid, or two flags contradict each other.
    """
    flags = without_maxtext(flags)
    reject((flags.buckets is not None and flags.lengths is None, alone("--buckets", "--lengths"), "add --lengths FILE"))
    bucketed = bucketed_by(flags) if flags.lengths is not None else None
    lengths = tuple(bucket.seq_len for bucket in bucketed.buckets) if bucketed else flags.training.seq_len
    if not bucketed and len(lengths) < 2:
        return check_run(flags)
    of_one_length = {
        f"--list {flags.list}": flags.list in ("names", "shardings", "optimizers"),
        "--frontier": flags.frontier,
        "--save-plan": flags.save_plan,
    }
    what = "--lengths has buckets of several" if bucketed else f"--seq-len has {len(lengths)}"
    given = next((flag for flag, is_given in of_one_length.items() if is_given), "")
    instead = f"leave {given} out" if bucketed else f"--seq-len {lengths[0]}"
    reject((given, f"{given} is about one length, and {what}", instead))
    first, *_ = [check_run(_at_length(flags, length)) for length in lengths]
    return replace(first, flags=flags, lengths=lengths, bucketed=bucketed)


def at_each_length(request: Request[RunFlags]) -> tuple[Request[RunFlags], ...]:
    """The request of each requested length. It is the request itself if it has one length."""
    return tuple(check_run(_at_length(request.flags, length)) for length in request.lengths) or (request,)


def at_length(flags: Any, length: int) -> Any:
    """The flags with --seq-len `length`."""
    return replace(flags, training=replace(flags.training, seq_len=(length,)))


def _at_length(flags: RunFlags, length: int) -> RunFlags:
    """The flags of the request at one length.

    In a bucket of --lengths the policy is auto unless another was given.
    """
    if flags.lengths is not None:
        flags = replace(flags, lengths=None, buckets=None, policy=flags.policy or ("auto",))
    return at_length(flags, length)


def bucketed_by(flags: RunFlags) -> Bucketed:
    """The sequences of --lengths in the buckets in which padded sequences have the fewest FLOPs.

    The FLOPs of a workload of the user's own aren't known before its code runs. Its sequences cost what they have in tokens.

    Raises:
        UsageError: the file, or another flag, isn't valid.
    """
    assert flags.lengths is not None
    num_buckets = DEFAULT_BUCKETS if flags.buckets is None else flags.buckets
    if not 1 <= num_buckets <= MAX_BUCKETS:
        raise bad_value("--buckets", num_buckets, f"1 to {MAX_BUCKETS}")
    histogram, cut, model = read_histogram(flags.lengths), _cut(flags), requested_model(at_length(flags, 1)).model
    num_cut = histogram.longer_than(cut) if cut else 0
    histogram = histogram.cut_at(cut) if cut else histogram
    upto = model.max_seq_len
    if upto and histogram.longest > upto:
        raise UsageError(
            f"--lengths has sequences of up to {histogram.longest} tokens",
            allowed=f"up to the model's {upto} learned positions",
            next_step=f"--seq-len {upto} cuts longer sequences; --max-seq-len {histogram.longest} makes the table longer",
        )
    longest = min((bound for bound in (cut, upto) if bound), default=None)
    buckets = make_buckets(histogram, num_buckets, model.flops_at, granularity(histogram.longest), longest)
    return Bucketed(histogram, num_cut, buckets)


def first_batch(answers: Sequence[TrialRecord], one: RequestedPolicy, seq_len: int | None) -> int:
    """The first batch of a search: of as many tokens as the policy's at the length before.

    Where there is none, it is the usual one.
    """
    of_policy = (one.text, one.xla_preset)
    before = [row for row in answers if (row.requested_policy, row.xla_preset) == of_policy and row.fits]
    if not before or not before[-1].seq_len or not seq_len:
        return usual_first_batch(seq_len)
    return max(1, before[-1].batch * before[-1].seq_len // seq_len)


def _cut(flags: RunFlags) -> int | None:
    """The length of --seq-len beside --lengths. Longer sequences are cut to it.

    Raises:
        UsageError: a flag was given that doesn't go with --lengths.
    """
    lengths, own_batch = flags.training.seq_len, "each bucket has a batch of its own, which fills the budget"
    without = "leave {} out; --max-batch N bounds the batches"
    reject(
        (flags.batch, both("--batch", "--lengths"), without.format("--batch"), own_batch),
        (flags.global_batch, both("--global-batch", "--lengths"), without.format("--global-batch"), own_batch),
        (flags.mesh == MESH_AUTO, both("--mesh auto", "--lengths"),
         "--mesh auto with --seq-len at the longest length, and then that mesh with --lengths",
         "the mesh that is best for one bucket need not be best for another, and all buckets share one"),
        (any(policy.startswith("plan:") for policy in flags.policy), both("--policy plan:FILE", "--lengths"),
         "--policy auto, which plans for each bucket, or a named policy",
         "a plan has one batch, and each bucket has a batch of its own"),
        (len(lengths) > 1, f"--seq-len has {len(lengths)} lengths beside --lengths", f"--seq-len {max(lengths, default=0)}",
         "", "one, to which longer sequences are cut"),
    )  # fmt: skip
    return lengths[0] if lengths else None
