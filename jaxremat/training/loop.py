"""The loop of a training run: step after step, with metrics, evaluations and checkpoints.

    ended = train(trials, batch=8, schedule=Schedule(num_steps=400), listener=listener)

The batch of a step follows from the seed and the step's number, and so do its random keys. The state of a checkpoint and its
step are therefore all that a later process needs to resume with the same losses.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxremat.config import TrainConfig
from jaxremat.errors import JaxrematError
from jaxremat.mesh.sharding import batch_shardings, replicated, tracing_on
from jaxremat.policy.spec import Policy
from jaxremat.policy.state import has_objects
from jaxremat.policy.tree import combine
from jaxremat.step.inputs import first_state, inputs, placed
from jaxremat.step.microbatches import sample_axes
from jaxremat.step.step import abstract_args, evaluation_key, params_key, step_shardings
from jaxremat.system.interrupt import deferred, in_xla
from jaxremat.training.checkpoints import Checkpoints, all_finite, digest
from jaxremat.training.metrics import MetricsFile, StepMetrics, finite
from jaxremat.training.run_folder import RunFolder
from jaxremat.trial.measure import StepTiming, largest_peak, step_timing
from jaxremat.trial.trials import Trials
from jaxremat.workload.user_code import output_to_stderr
from jaxremat.workload.workload import Workload, loss_and_aux
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.options import preset_options

#: The steps whose times a summary is made of: the last ones. The first two of a process are left out.
_TIMED = 1000


@dataclass(frozen=True)
class Schedule:
    """When something is done beside the steps.

    Attributes:
        num_steps: the number of the last step.
        checkpoint_every: steps from one checkpoint to the next. The last step has one in any case.
        eval_every: steps from one evaluation to the next. 0 evaluates never. The last step has one otherwise.
        eval_batches: batches of an evaluation.
        ignores_nan: whether a loss that is no finite number doesn't end the run.
    """

    num_steps: int
    checkpoint_every: int = 100
    eval_every: int = 100
    eval_batches: int = 10
    ignores_nan: bool = False

    def evaluates(self, step: int) -> bool:
        """Whether the loss is evaluated after this step."""
        return self.eval_every > 0 and (step % self.eval_every == 0 or step == self.num_steps)

    def stores(self, step: int) -> bool:
        """Whether there is a checkpoint after this step."""
        return step % self.checkpoint_every == 0 or step == self.num_steps


@dataclass(frozen=True)
class Listener:
    """The functions that are called during a run.

    Attributes:
        began: called once before the first step, with the number of steps done and the parameters.
        step: called after each step with its metrics, its loss and its seconds.
        note: called with what a person should know.
        agree: whether something is so in any of the processes that run the steps together.
    """

    began: Callable[[int, Any], None] = lambda step, params: None
    step: Callable[[StepMetrics, float, float], None] = lambda metrics, loss, seconds: None
    note: Callable[[str], None] = lambda text: None
    agree: Callable[[bool], bool] = bool


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        step: the number of steps done, in all processes of the run's life.
        params: the parameters then.
        timing: what the steps of this process took. None if there was none.
        interrupted: whether Ctrl-C or SIGTERM ended it.
    """

    step: int
    params: Any
    timing: StepTiming | None
    interrupted: bool


@dataclass
class Training:
    """A run at a batch, ready to go: its compiled step, where its arrays lie, and its folder.

    Attributes:
        trials: the trials that the step is one of.
        policy: the policy of the step.
        batch: samples of a microbatch, for each data-parallel group.
        schedule: when something is done beside the steps.
        listener: what is called meanwhile.
        folder: where metrics and checkpoints go. None stores nothing.
        writes: whether this process writes the metrics. Of several only the first does.
        weights: the file or folder with the parameters that the run begins with. None makes them by the seed.
    """

    trials: Trials
    policy: Policy
    batch: int
    schedule: Schedule
    listener: Listener = field(default_factory=Listener)
    folder: RunFolder | None = None
    writes: bool = True
    weights: Path | None = None

    def __post_init__(self) -> None:
        trials = self.trials
        self.workload: Workload = trials.workload_of(self.batch)
        self.train: TrainConfig = trials.train_at(self.batch)
        self.target = trials.target
        mesh = self.target.mesh
        state, _ = abstract_args(self.workload, self.train)
        if mesh is None:
            one = self.target.sharding
            self.state_shardings, self.batch_shardings = jax.tree.map(lambda _: one, state), None
        else:
            self.state_shardings, self.batch_shardings = step_shardings(mesh, self.workload, self.train)[0]
        self.state_shapes = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            state,
            self.state_shardings,
        )

    def run(self) -> Ended:
        """Runs the steps that are left, from the newest checkpoint on if there is one.

        Raises:
            JaxrematError: the loss is no finite number, the batches end, or the folder can't be written.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(output_to_stderr())
            stack.enter_context(jax.default_device(self.target.device))
            stack.enter_context(tracing_on(self.workload.mesh, is_own=True))
            compiled: Any = self.trials.compile(self.policy, self.batch).compiled
            stored_step, done, state = None, 0, self._first_state() if self._stores_trained else None
            checkpoints = None
            if self.folder:
                frozen = None if state is None else int(jax.jit(digest)(self.workload.split(state.params)[1]))
                shapes = self._stored(self.state_shapes)
                checkpoints = Checkpoints(self.folder.checkpoints, shapes, self.listener.agree, frozen=frozen)
            if checkpoints and (found := checkpoints.newest(self.listener.note)):
                stored_step = done = found[0]
                params = found[1].params
                if state is not None:
                    params = combine(params, self.workload.split(state.params)[1])
                state = found[1].replace(params=params)
            if state is None:
                state = self._first_state()
            metrics = MetricsFile(self.folder.metrics if self.folder and self.writes else None, done)
            if metrics.num_dropped and not done:
                self.listener.note("no checkpoint is there, so that the run begins again, and its metrics do")
            evaluate = self._evaluation()
            self.listener.began(done, state.params)
            peak_before = largest_peak(self.target.local_devices)
            batches, steps_s, result, interrupted = self._batches(done), [], None, False
            batch = next(batches) if done < self.schedule.num_steps else None
            missing: Exception | None = None
            are_finite = jax.jit(all_finite)
            interrupts = stack.enter_context(deferred(lambda: f"finishing step {min(done + 1, self.schedule.num_steps)}"))
            for step in range(done + 1, self.schedule.num_steps + 1):
                started = time.perf_counter()
                state, result = compiled(state, batch)
                try:
                    batch = next(batches) if step < self.schedule.num_steps else None  # made while the device computes
                except Exception as error:  # whatever a user's batches raise; this step is finished and stored first
                    missing = error
                jax.block_until_ready((state, result))
                steps_s.append(time.perf_counter() - started)
                loss = float(np.asarray(result[0] if isinstance(result, tuple) else result))
                metrics.time_s += steps_s[-1]
                evaluated = evaluate(state.params) if evaluate and self.schedule.evaluates(step) else None
                line = self._line(step, loss, steps_s[-1], metrics.time_s, evaluated)
                try:
                    metrics.append(line)
                except JaxrematError:
                    if checkpoints:
                        checkpoints.wait()
                    raise
                finally:
                    self.listener.step(line, loss, steps_s[-1])
                done = step
                if line.loss is None and not self.schedule.ignores_nan:
                    raise self._no_number(f"the loss of step {step} is {loss}", step, checkpoints, stored_step)
                ends = self.listener.agree(interrupts.pending or missing is not None)
                if ends or self.schedule.stores(step):
                    if not (self.schedule.ignores_nan or are_finite(state.params)):
                        raise self._no_number(
                            f"the update of step {step} left parameters that are no finite numbers",
                            step + 1,
                            checkpoints,
                            stored_step,
                        )
                    if checkpoints:
                        checkpoints.save(step, self._stored(state))
                        stored_step = step
                if missing is not None:
                    if checkpoints:
                        checkpoints.wait()
                    raise missing
                if interrupted := ends:
                    break
            timed = steps_s[2:][-_TIMED:] or steps_s
            timing = step_timing(timed, result, self.target.local_devices, peak_before) if timed else None
            if checkpoints:
                checkpoints.wait()
            return Ended(done, state.params, timing, interrupted)

    @property
    def _stores_trained(self) -> bool:
        """Whether a checkpoint has the trained parameters alone.

        The others are frozen, and no loss changes them.
        """
        return self.workload.trainable is not None and not has_objects(self.workload.params)

    def _stored(self, state: Any) -> Any:
        """What a checkpoint has of a state."""
        return state.replace(params=self.workload.split(state.params)[0]) if self._stores_trained else state

    def _first_state(self) -> Any:
        shardings = None if self.target.mesh is None else self.state_shardings
        read, params = self.workload.read_weights, None
        if self.weights and read:
            params = read(self.weights, params_key(self.train.seed))
        with in_xla():
            return jax.block_until_ready(first_state(self.workload, self.train, self.target.device, shardings, params))

    def _batches(self, done: int) -> Iterator[Any]:
        """The batches of the steps after `done` steps, on the device."""
        number = done
        for batch in inputs(self.workload, self.train, done):
            yield placed(batch, self.batch_shardings) if self.batch_shardings else jax.device_put(batch, self.target.device)
            number += 1
        raise JaxrematError(
            f"the batches of {self.workload.name} ended after {number}, and {self.schedule.num_steps} steps were requested",
            cause="its batches are an iterator with an end",
            next_step=f"--num-steps {number}, or batches without end",
        )

    def _evaluation(self) -> Callable[[Any], float] | None:
        """A function of the parameters that returns the mean loss of the evaluation's batches.

        None if there are none.
        """
        workload, mesh = self.workload, self.target.mesh
        if not self.schedule.eval_every or not workload.has_evaluation:
            return None
        loss = workload.eval_loss or workload.loss
        assert loss is not None
        key = (evaluation_key(self.train.seed),) if workload.takes_key and workload.eval_loss is None else ()
        batch_on_mesh = batch_shardings(mesh, workload.abstract_batch, sample_axes(workload, 1)) if mesh else None
        of_args = (self.state_shardings.params, batch_on_mesh) if mesh else None
        compiled: Any = lower_and_compile(
            lambda params, batch: loss_and_aux(loss(params, batch, *key))[0],
            (self.state_shapes.params, workload.abstract_batch),
            self.target,
            options=preset_options(self.trials.xla_preset) | dict(self.trials.options),
            shardings=(of_args, replicated(mesh)) if mesh and of_args else None,
        ).compiled

        def evaluate(params: Any) -> float:
            losses = []
            assert workload.eval_batches is not None
            for _, batch in zip(range(self.schedule.eval_batches), workload.eval_batches(), strict=False):
                batch = placed(batch, batch_on_mesh) if batch_on_mesh else jax.device_put(batch, self.target.device)
                losses.append(compiled(params, batch))
            return float(np.mean([float(np.asarray(loss)) for loss in losses]))

        return evaluate

    def _line(self, step: int, loss: float, seconds: float, time_s: float, evaluated: float | None) -> StepMetrics:
        accumulate, workload = self.train.accumulate, self.workload
        samples = self.trials.samples_at(self.batch)
        tokens = workload.num_tokens
        return StepMetrics(
            step=step,
            loss=finite(loss),
            tokens_per_s=None if tokens is None else accumulate * tokens / seconds,
            time_s=time_s,
            samples_per_s=None if samples is None else accumulate * samples / seconds,
            eval_loss=None if evaluated is None else finite(evaluated),
        )

    def _no_number(self, what: str, step: int, checkpoints: Checkpoints | None, stored_step: int | None) -> JaxrematError:
        """The error for a run whose numbers are not finite in `step`.

        `step` began with the parameters of the step before.
        """
        if checkpoints:
            checkpoints.wait()
        stored = ""
        if stored_step is not None:
            is_cause = stored_step == step - 1
            stored = f"; checkpoint {stored_step} {'has the parameters that led to it' if is_cause else 'is from before'}"
        return JaxrematError(
            f"{what}{stored}",
            cause="a learning rate that is too high, or numbers too large for the compute dtype",
            next_step="a lower --learning-rate, a lower --clip-norm, or --dtype float32, with another --run-dir; "
            "--on-nan continue trains all the same",
        )
