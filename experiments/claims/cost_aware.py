"""Articles: choose what to keep by its cost, and adapt the choice as the budget moves."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, Verdict, some
from experiments.claims.steps import TOY, Step, step
from experiments.claims.words import gib, ms, percent, spans, within_error

#: Policies that treat all layers and all values alike by a rule.
UNIFORM = ("none", "dots", "dots-no-batch", "dots+attention", "nothing", "every:2", "one-in:2", "one-in:3")
#: Budgets: the shares of the bytes of `none`.
SHARES = (0.34, 0.4, 0.6)


def steps(size: Size) -> list[Step]:
    """The uniform policies, and plans within shares of the bytes of `none`."""
    if size == "tiny":
        return [*(step(policy=p, **TOY) for p in ("none", "nothing")), step("plan", policy="nothing", **TOY)]
    uniform = [step(policy=policy, batch=32, scan_layers=True) for policy in UNIFORM]
    return [*uniform, *(step("plan", policy="none", batch=32, scan_layers=True, share=share) for share in SHARES)]


def judge(rows: Sequence[Row]) -> Judgement:
    """For each budget, the plan against the fastest uniform policy that fits."""
    uniform, planned = some(rows, what="step"), [row for row in some(rows, what="plan") if row["planned"]]
    table = [("budget", "fastest uniform that fits", "predicted", "plan", "predicted", "less time")]
    gains, sentences = [], []
    for plan in planned:
        fitting = [row for row in uniform if row["total_bytes"] <= plan["budget_bytes"]]
        best = min(fitting, key=lambda row: row["step_s"]) if fitting else None
        gain = 1 - plan["step_s"] / best["step_s"] if best else None
        gains += [gain] if gain is not None else []
        of_best = (f"`{best['policy']}`", ms(best["step_s"])) if best else ("no one fits", "-")
        of_plan = (f"`{plan['planned'].replace(',', ', ')}`", ms(plan["step_s"]), "-" if gain is None else percent(gain))
        table += [(gib(plan["budget_bytes"]), *of_best, *of_plan)]
    plans = list(dict.fromkeys(row["planned"] for row in planned))
    budgets = [gib(row["budget_bytes"]) for row in planned]
    keeps_attention = any(name in plan for plan in plans for name in ("context", "attention/fused", "out_proj"))
    sentences = [
        f"From {budgets[0]} to {budgets[-1]} there {'is one plan' if len(plans) == 1 else f'are {len(plans)} plans'}, and "
        f"attention's output is {'' if keeps_attention else 'not '}among what is kept.",
        f"Against the fastest of the {len(uniform)} uniform policies that fits, a plan takes {spans(gains)} less predicted time.",
    ]
    undecided = [gain for gain in gains if within_error(gain, rows[0])]
    if undecided:
        sentences.append(
            f"That is less than the error of predictions, {percent(rows[0]['predicted_error'])}: a GPU decides it."
        )
    if len(plans) == 1:
        sentences.append(
            f"The layers run in a loop. There `{plans[0].replace(',', ', ')}` is predicted faster than keeping more, within each "
            "of these budgets, since what is kept is copied into stacks and out of them again."
        )
    room = min((row["budget_bytes"] - row["total_bytes"] for row in planned), default=0)
    if len(plans) == 1 and len(planned) > 1 and room > 0:
        sentences.append(
            f"The smallest budget, too, leaves {gib(room)} free beside that plan. No budget binds, so that these steps can't "
            "show a choice that adapts."
        )
    better = [gain for gain in gains if gain > 0 and gain not in undecided]
    if len(better) == len(gains) and keeps_attention and len(plans) > 1:
        verdict: Verdict = "holds"
    elif better:
        verdict = "holds under conditions"
    else:
        verdict = "open" if undecided else "refuted"
    ours = f"plans take {spans(gains)} less time than the best uniform policy"
    ours += ", which is less than the error of predictions" if len(undecided) == len(gains) else ""
    ours += "" if len(plans) > 1 else "; one plan for all budgets" + (", none of which binds" if room > 0 else "")
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Predicted time of the uniform policies and of the plans, from the fewest bytes to the most."""
    uniform = sorted(some(rows, what="step"), key=lambda row: row["total_bytes"])
    planned = [row for row in some(rows, what="plan") if row["planned"]]
    series = {
        "uniform": [(f"{row['policy']}\n{gib(row['total_bytes'])}", 1e3 * row["step_s"]) for row in uniform],
        "planned": [(f"plan within\n{gib(row['budget_bytes'])}", 1e3 * row["step_s"]) for row in planned],
    }
    return Picture("", "predicted ms", series, kind="stack")  # a policy has one bar, so that none is on another


CLAIM = Claim(
    name="cost_aware",
    title="Keeping what is cheap to keep",
    source="articles",
    says="keep what is cheap to store and dear to run again, attention's output rather than the MLP, adapt the choice as the "
    "budget moves, and the step is faster than under a uniform rule",
    on="gpt2 at batch 32 of 1024 tokens, in a loop, H100, within shares of the bytes of `none`",
    steps=steps,
    judge=judge,
    picture=picture,
)
