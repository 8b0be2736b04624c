"""Articles: choose what to keep by its cost, and adapt the choice as the budget moves."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, Verdict
from experiments.claims.steps import TOY, Step, step
from experiments.claims.words import gib, ms, percent, spans, within_error
from experiments.common import where
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import Mix, Names

#: Policies that follow one rule, whatever a value costs.
UNIFORM = ("none", "dots", "dots+attention", "nothing", "every:2", "one-in:2", "one-in:3")
#: Budgets: the shares of the bytes of `none`.
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
#: Values of a layer, and the names that keep them.
VALUES = {"attention's output": ("attention", "context"), "the MLP's first matmul": ("mlpwi_0", "mlp/wi_0/dot_general")}


def steps(size: Size) -> list[Step]:
    """The uniform policies, and plans within shares of the bytes of `none`, all unrolled."""
    if size == "tiny":
        return [*(step(policy=p, **TOY) for p in ("none", "nothing")), step("plan", policy="nothing", **TOY)]
    uniform = [step(policy=policy, batch=32, scan_layers=False) for policy in UNIFORM]
    return [*uniform, *(step("plan", policy="none", batch=32, scan_layers=False, share=share) for share in SHARES)]


def kept(plan: Row) -> set[str]:
    """The names of the values that a plan keeps in some layer. `attention` stands for what fused attention keeps."""
    policy = parse(plan["planned"])
    parts = [part for _, part in policy.parts] if isinstance(policy, Mix) else [policy]
    names = {name for part in parts if isinstance(part, Names) for name in part.save}
    return names | ({"attention"} if any(getattr(part, "attention", False) for part in parts) else set())


def best_uniform(rows: Sequence[Row], plan: Row) -> Row | None:
    """The fastest uniform policy that fits the plan's budget. None where no one fits."""
    fitting = [row for row in where(rows, what="step") if row["total_bytes"] <= plan["budget_bytes"]]
    return min(fitting, key=lambda row: row["step_s"], default=None)


def judge(rows: Sequence[Row]) -> Judgement:
    """For each budget, the plan against the fastest uniform policy that fits."""
    planned = [row for row in where(rows, what="plan") if row["planned"]]
    table: list[tuple[str, ...]] = [
        ("budget", "fastest uniform that fits", "predicted", "the plan takes", "predicted", "less time", "it keeps")
    ]
    gains = []
    for plan in planned:
        best = best_uniform(rows, plan)
        gain = 1 - plan["step_s"] / best["step_s"] if best else None
        gains += [gain] if gain is not None else []
        of_best = (f"`{best['policy']}`", ms(best["step_s"])) if best else ("no one fits", "-")
        of_plan = (gib(plan["total_bytes"]), ms(plan["step_s"]), "-" if gain is None else percent(gain))
        names = kept(plan)
        holds = [value for value, of_value in VALUES.items() if names & set(of_value)]
        table.append((gib(plan["budget_bytes"]), *of_best, *of_plan, ", ".join([f"{len(names)} names", *holds])))
    plans = list(dict.fromkeys(row["planned"] for row in planned))
    sentences = [
        f"For {len(planned)} budgets from {gib(planned[0]['budget_bytes'])} to {gib(planned[-1]['budget_bytes'])} there "
        f"{'is one plan' if len(plans) == 1 else f'are {len(plans)} plans'}; the file of results has their policies.",
        f"Against the fastest of the {len(where(rows, what='step'))} uniform policies that fits, a plan takes {spans(gains)} "
        "less predicted time.",
    ]
    first = {
        value: next((n for n, plan in enumerate(planned) if kept(plan) & set(of_value)), None)
        for value, of_value in VALUES.items()
    }
    sentences += [
        f"The smallest of these budgets whose plan keeps {value} is {gib(planned[n]['budget_bytes'])}."
        if n is not None
        else f"No plan keeps {value}."
        for value, n in first.items()
    ]
    undecided = [gain for gain in gains if within_error(gain, rows[0])]
    if undecided:
        sentences.append(
            f"For {len(undecided)} of {len(gains)} budgets that is less than the error of predictions, "
            f"{percent(rows[0]['predicted_error'])}: a GPU decides it. Two steps share most kernels, so that their errors may "
            "cancel. That wasn't measured."
        )
    none = next(iter(where(rows, policy="none", what="step")), None)
    if none and (faster := [plan for plan in planned if plan["step_s"] < none["step_s"]]):
        sentences.append(
            f"{len(faster)} of the plans {'is' if len(faster) == 1 else 'are'} predicted faster than `none`, which recomputes "
            "nothing: what isn't written needn't be read. A GPU decides whether that is so."
        )
    sentences.append("The planner chooses by the same predicted times by which its plans are compared here.")
    attention, mlp = (len(planned) if n is None else n for n in first.values())
    better = [gain for gain in gains if gain > 0 and gain not in undecided]
    if better and len(better) == len(gains) and attention < mlp and len(plans) > 1:
        verdict: Verdict = "holds"
    elif better:
        verdict = "holds under conditions"
    else:
        verdict = "open" if undecided else "refuted"
    ours = f"{len(plans)} plans for {len(planned)} budgets, {spans(gains)} faster than the best uniform policy that fits"
    ours += ", which is less than the error of predictions" if len(undecided) == len(gains) else ""
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Predicted time over the bytes, of the plans and of each uniform policy."""
    planned = [row for row in where(rows, what="plan") if row["planned"]]
    series = {"planned": [(row["total_bytes"] / 2**30, 1e3 * row["step_s"]) for row in planned]}
    series |= {row["policy"]: [(row["total_bytes"] / 2**30, 1e3 * row["step_s"])] for row in where(rows, what="step")}
    return Picture("GiB", "predicted ms", series, ticks=False, zero=False)


CLAIM = Claim(
    name="cost_aware",
    title="Keeping what is cheap to keep",
    source="articles",
    says="keep what is cheap to store and dear to run again, attention's output rather than the MLP, adapt the choice as the "
    "budget moves, and the step is faster than under a uniform rule",
    on="gpt2 at batch 32 of 1024 tokens, unrolled, H100, within shares of the bytes of `none`",
    steps=steps,
    judge=judge,
    picture=picture,
)
