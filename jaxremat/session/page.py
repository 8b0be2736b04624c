"""The memory page of compiled steps, as a file and inline in a notebook."""

import html
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxremat.report.page import PageInput, build_page, write_page

if TYPE_CHECKING:
    from jaxremat.policy.spec import Policy
    from jaxremat.trial.record import ExplainRecord
    from jaxremat.trial.trials import Trials
    from jaxremat.xla.buffers import MemoryMap

#: The height of a page in a notebook, in pixels.
_HEIGHT = 640


@dataclass(frozen=True, repr=False)
class Page:
    """The memory of compiled steps as one offline HTML page. A notebook shows it inline.

    Attributes:
        inputs: the steps. The page compares several.
        redact: whether source lines and absolute paths are left out.
    """

    inputs: tuple[PageInput, ...]
    redact: bool = False

    def write(self, path: str | Path) -> Path:
        """Writes the page to a file that a browser opens, and returns its path.

        Raises:
            JaxrematError: the file can't be written.
        """
        write_page(Path(path), self.inputs, redact=self.redact)
        return Path(path)

    def __repr__(self) -> str:
        steps = ", ".join(f"{one.policy} at batch {one.batch}" for one in self.inputs)
        return f"the memory page of {self.inputs[0].title}: {steps}; write('report.html') files it"

    def _repr_html_(self) -> str:
        page = html.escape(build_page(self.inputs, redact=self.redact))
        style = f"width: 100%; height: {_HEIGHT}px; border: 0"
        return f'<iframe srcdoc="{page}" sandbox="allow-scripts allow-downloads allow-modals" style="{style}"></iframe>'


def page_input(row: "ExplainRecord", trials: "Trials", policy: "Policy", command: Sequence[str] = ()) -> PageInput:
    """The step of `row` as a page shows it.

    Args:
        row: the record of the step, which was compiled.
        trials: the trials that the step is one of, with `with_dump`.
        policy: the policy of the step.
        command: the words of the command that makes the page again. Empty where there is none.
    """
    from jaxremat.answer.savings import savings
    from jaxremat.answer.workload_estimate import estimate_workload
    from jaxremat.planner.shared_budget import one_of_each
    from jaxremat.xla.clock import times_of
    from jaxremat.xla.options import with_preset

    done, speed = trials.compile(policy, row.batch), trials.target.speed
    memory = done.memory_map
    return PageInput(
        title=row.model,
        policy=with_preset(row.policy, row.xla_preset),
        batch=row.batch,
        target=f"{row.target}: {trials.target.description}"
        + (f", one of {row.num_devices} in {row.mesh}" if row.mesh else ""),
        memory=memory,
        budget_bytes=row.budget_bytes,
        versions={name: version for name, version in row.versions.items() if version},
        command=shlex.join(command),
        savings=savings(one_of_each(estimate_workload(trials, speed, row.batch)).problem, memory)
        if speed and trials.factory.num_layers()
        else None,
        seconds=seconds_at(memory, times_of(done.module, speed)) if speed else (),
        interval=speed.interval if speed else None,
        findings=row.findings or (),
    )


def seconds_at(memory: "MemoryMap", times: Mapping[str, float]) -> list[float]:
    """The seconds at each position of the program.

    Those of an instruction that isn't in it, such as one of a computation that another one calls, count for the one before.

    Args:
        memory: the memory map of a step.
        times: the seconds of its instructions, in the order of the program.
    """
    position = {operation.name: n for n, operation in enumerate(memory.program)}
    seconds, at = [0.0] * len(memory.program), 0
    for name, time_s in times.items():
        at = position.get(name, at)
        seconds[at] += time_s
    return seconds
