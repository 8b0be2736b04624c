"""The numbers of rows in words, as the claims' sentences and tables write them."""

from collections.abc import Iterable, Sequence

from experiments.claims.claim import Row

LAYOUTS = {False: "unrolled", True: "in a loop"}
#: By implementation, the kind of attention.
ATTENTION = {"xla": "plain", "cudnn": "fused"}


def gib(num_bytes: float) -> str:
    """Bytes as GiB, `3.52 GiB`, or as MiB if they are few."""
    if 0 < num_bytes < 2**30 / 100:
        return f"{num_bytes / 2**20:.2g} MiB"
    return f"{num_bytes / 2**30:.3g} GiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.2f} GiB"


def percent(share: float) -> str:
    """A share in percent: `percent(0.413)` is `41 %`. Below 10 it has one digit more."""
    value = 100 * share if abs(share) >= 5e-4 else 0.0
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:.0f} %"


def signed(share: float) -> str:
    """A share in percent with its sign: `+41 %`."""
    return ("" if percent(share).startswith("-") else "+") + percent(share)


def ms(seconds: float) -> str:
    """Seconds as milliseconds: `26.2 ms`."""
    return f"{1e3 * seconds:.1f} ms"


def spans(shares: Iterable[float], unit: str = "%") -> str:
    """The least and the greatest of some shares, rounded as `percent` does: `40 to 60 %`, or `6.8 to 7.0 points`."""
    in_order = sorted(shares)
    low, high = (percent(share).removesuffix(" %") for share in (in_order[0], in_order[-1]))
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def within_error(share: float, row: Row) -> bool:
    """Whether a difference in time is too small to decide anything: less than the error of the predicted times."""
    return abs(share) <= row["predicted_error"]


def unless_clear(shares: Sequence[float], row: Row) -> str:
    """What stands after differences in time: how many of them are within the error of predictions. Empty if none is."""
    undecided = [share for share in shares if within_error(share, row)]
    if not undecided:
        return ""
    if len(undecided) == len(shares):
        return ", within the error of predictions"
    return f", for {len(undecided)} of {len(shares)} within the error of predictions"


def saved(row: Row, base: Row) -> float:
    """The share of the bytes of `base` that `row` saves."""
    return 1 - row["total_bytes"] / base["total_bytes"]


def slower(row: Row, base: Row) -> float:
    """The share of the predicted time of `base` that `row` adds."""
    return row["step_s"] / base["step_s"] - 1


def more_flops(row: Row, base: Row) -> float:
    """The share of the FLOPs of `base` that `row` adds."""
    return row["executed_flops"] / base["executed_flops"] - 1
