"""A simulated run as text: its parameters, what happened in order, and the verdict. For people; `simulation` runs it."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.core.outputs import TokenEvent
from lockstep.core.records import StepPlan, StepResult
from lockstep.core.schema import FINISH_NONE
from lockstep.runtime.messages import ImportReport, WeightsReport
from lockstep.runtime.transport.cluster import FromStages
from lockstep.sim.clients import Client
from lockstep.sim.log import Log
from lockstep.sim.parts import Parts
from lockstep.sim.scenario import Ask, EngineShape, Fault, Scenario
from lockstep.sim.simulation import Outcome, run

LINES_MAX = 120
"""Of a transcript's log: the last ones, where the failure is."""


class Story(Log):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def plan(self, engine: int, time: float, plan: StepPlan) -> None:
        super().plan(engine, time, plan)
        self.lines.append(f"{_at(time)} engine {engine} plans {_plan_words(plan)}")

    def taken(self, engine: int, time: float, message: FromStages) -> None:
        super().taken(engine, time, message)
        self.lines.append(f"{_at(time)} engine {engine} takes {_taken_words(message)}")

    def event(self, client: Client, time: float, event: TokenEvent) -> None:
        super().event(client, time, event)
        end = "" if event.finish_reason is None else f", {event.finish_reason}" + (f": {event.error}" if event.error else "")
        self.lines.append(f"{_at(time)}   {client.ask.name} is told {list(event.token_ids)} from {event.index}{end}")

    def said(self, time: float, text: str) -> None:
        super().said(time, text)
        self.lines.append(f"{_at(time)} {text}")


def tell(scenario: Scenario, parts: Parts | None = None) -> tuple[Outcome, str]:
    """Run it; what came out, and the transcript."""
    story = Story()
    outcome = run(scenario, parts, log=story)
    left_out = len(story.lines) - LINES_MAX
    log = [f"... {left_out} lines before"] * (left_out > 0) + story.lines[-LINES_MAX:]
    verdict = [f"{failure.kind}: {failure.text}" for failure in outcome.failures] or ["every check is content"]
    return outcome, "\n".join([*_parameters(scenario), "----", *log, "----", *verdict, ""])


def _parameters(scenario: Scenario) -> list[str]:
    link = f"messages take {scenario.link_s:g} to {scenario.link_s * (1 + scenario.jitter):g} s{', as bytes' if scenario.framed else ''}"
    return [
        f"# seed {scenario.seed}; {link}",
        *(f"engine {number}: {_engine_words(engine)}" for number, engine in enumerate(scenario.engines)),
        *(f"request {_ask_words(ask)}" for ask in scenario.asks),
        *(f"fault {_fault_words(fault)}" for fault in scenario.faults),
    ]


def _engine_words(engine: EngineShape) -> str:
    kind = "asynchronous" if engine.asynchronous else "synchronous"
    parts = [
        f"{engine.stage_count} stages, {kind}, {engine.microbatch_count} microbatches, {engine.block_count} blocks of {engine.block_size}",
        f"{engine.slot_count} slots, {engine.token_budget} tokens a step, {engine.drafts_max} drafts",
    ]
    parts += ["prefix cache"] if engine.prefix_caching else []
    parts += ["priorities"] if engine.priorities else []
    return f"{', '.join(parts)}; work {engine.work_s} s, imports {engine.import_timeout_s:g} s, leases {engine.lease_s:g} s"


def _ask_words(ask: Ask) -> str:
    parts = [f"{ask.name} at {ask.at:.4f}: {len(ask.prompt)} tokens and up to {ask.tokens_max}, seed {ask.seed}, drafter {ask.drafter}"]
    parts += [f"temperature {ask.temperature:g} top_k {ask.top_k} top_p {ask.top_p:g} min_p {ask.min_p:g}"] if ask.temperature else []
    parts += [f"frequency_penalty {ask.frequency_penalty:g}"] if ask.frequency_penalty else []
    parts += [f"{len(ask.stop_ids)} stop ids"] if ask.stop_ids else []
    parts += [f"priority {ask.priority}"] if ask.priority else []
    parts += [f"salt {ask.cache_salt}"] if ask.cache_salt else []
    parts += [f"sibling of {ask.sibling_of}"] if ask.sibling_of else []
    parts += ["prompt logprobs"] if ask.prompt_logprobs else []
    parts += ["direct"] if ask.direct else []
    if ask.abort is not None:
        again = f", again after {ask.abort.again_after:g} s" if ask.abort.again_after >= 0 else ""
        parts += [f"gives up at {ask.abort.at:.4f} when {ask.abort.phase or 'it may be'}{again}"]
    return ", ".join(parts)


def _fault_words(fault: Fault) -> str:
    about = f" request {fault.request}" if fault.request else ""
    when = fault.phase or "it may be"
    return f"{fault.kind} at {fault.at:.4f} on engine {fault.engine}{about}, when {when}; target {fault.target}, other {fault.other}"


def _taken_words(message: FromStages) -> str:
    if isinstance(message, StepResult):
        return _result_words(message)
    if isinstance(message, ImportReport):
        return f"import of generation {message.generation}: {message.computed} positions"
    if isinstance(message, WeightsReport):
        return f"weights {message.weights} on stage {message.stage}: {message.error or 'ready'}"
    return f"grammar {message.key}: {message.error or 'compiled'}"


def _plan_words(plan: StepPlan) -> str:
    admitted = plan.admissions.values["generation"].tolist() if len(plan.admissions.slots) else []
    parts = [f"{plan.epoch}.{plan.step} horizon {plan.horizon}:"]
    parts += [f"release {plan.releases.generations.tolist()}"] if len(plan.releases.slots) else []
    parts += [f"admit {admitted}"] if admitted else []
    ready = zip(plan.ready.generations.tolist(), plan.ready.computed.tolist(), strict=True)
    parts += [f"ready {generation} with {computed}" for generation, computed in ready]
    parts += [f"export {transfer.number}" for transfer in plan.exports.transfers] + [f"unexport {transfer.number}" for transfer in plan.unexports]
    rows = plan.rows
    for generation, count, start, samples in zip(*(c.tolist() for c in (rows.generations, rows.counts, rows.starts, rows.samples)), strict=True):
        parts += [f"row {generation} {count} from {start if start >= 0 else '?'}{' samples' if samples else ''},"]
    return " ".join(parts).rstrip(",")


def _result_words(result: StepResult) -> str:
    rows: Sequence[str] = [
        f"{generation} {result.tokens.row(i).tolist()}{'' if result.finishes[i] == FINISH_NONE else ' ends'}"
        for i, generation in enumerate(result.generations.tolist())
    ]
    return f"result {result.epoch}.{result.step}: {', '.join(rows) or 'nothing sampled'}"


def _at(time: float) -> str:
    return f"{time:9.4f}"
