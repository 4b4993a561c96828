"""`SlotTable` against a list of dictionaries with lists of tokens in them, under whatever lawful plans and results hypothesis thinks of.

`test_core_table.py` has longer random histories with every sampling column; here the shortest history that goes wrong is found. What is unlawful
must be refused and leave the table as the twin has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_loop import Admission, Answer, Row, make_plan, make_result, run_plan
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lockstep.core.layout import BatchLayout
from lockstep.core.records import StepPlan
from lockstep.core.table import SlotTable, TableShape
from lockstep.errors import LogError

SLOTS, LENGTH, BLOCK_SIZE, DRAFTS = 3, 12, 2, 3
WORD = 1 << 64

tokens_of = st.integers(0, 9)


def mixed(value: int) -> int:
    """splitmix64's finaliser, from its paper."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB % WORD
    return value ^ value >> 31


def tag(tokens: list[int], salt: int) -> int:
    """Of a whole prefix of tokens: the sum of what each adds. A token's mark is 1, in the highest bit."""
    words = [(token + (position << 32) + (1 << 63) + 0x9E3779B97F4A7C15) % WORD for position, token in enumerate(tokens)]
    return sum(mixed((mixed(word) + salt) % WORD) for word in words) % WORD


class SlotTableAgainstTwin(RuleBasedStateMachine):
    """twin[slot]: None, or generation, tokens, cap, salt, computed, drafts, blocks, pending (step, positions sampled), finished, importing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(TableShape(slot_count=SLOTS, length_max=LENGTH, block_size=BLOCK_SIZE, drafts_max=DRAFTS), poison=True)
        self.twin: list[dict[str, Any] | None] = [None] * SLOTS
        self.generation = self.step = self.applied = 0
        self.sampled: list[list[tuple[int, int]]] = []

    def held(self) -> list[tuple[int, dict[str, Any]]]:
        return [(slot, one) for slot, one in enumerate(self.twin) if one is not None]

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        """Release, admit, start imports, give blocks, compute: any of them, to any slot."""
        releases = [(slot, one["generation"]) for slot, one in self.held() if data.draw(st.integers(0, 5)) == 5]
        for slot, _ in releases:
            self.twin[slot] = None
        admits = [self._admission(data, slot) for slot in range(SLOTS) if self.twin[slot] is None and data.draw(st.booleans())]
        ready = []
        for slot, one in self.held():
            if one["importing"] and data.draw(st.booleans()):
                one["computed"] = data.draw(st.integers(0, len(one["tokens"]) - 1))
                one["importing"] = False
                ready.append((slot, one["generation"], one["computed"]))
        rows, blocks = self._rows(data)
        plan = make_plan(self.step, self.applied, releases=releases, admits=admits, ready=ready, blocks=blocks, rows=rows)
        self._compare_and_note(plan, run_plan(self.table, plan), {row.slot: row.count for row in rows})
        self.step += 1

    def _admission(self, data: st.DataObject, slot: int) -> Admission:
        self.generation += 1
        tokens = data.draw(st.lists(tokens_of, min_size=1, max_size=5))
        cap, importing = data.draw(st.sampled_from([LENGTH, len(tokens) + 1, LENGTH - 1, LENGTH])), data.draw(st.integers(0, 4)) == 4
        computed, salt = 0 if importing else data.draw(st.integers(0, len(tokens) - 1)), data.draw(st.sampled_from([0, 5]))
        self.twin[slot] = {
            "generation": self.generation,
            "tokens": list(tokens),
            "cap": cap,
            "salt": salt,
            "computed": computed,
            "drafts": [],
            "blocks": [],
            "pending": None,
            "finished": 0,
            "importing": importing,
        }
        columns = {"importing": int(importing), "kv_salt": salt}
        return Admission(slot=slot, generation=self.generation, tokens=tokens, cap=cap, computed=computed, columns=columns)

    def _rows(self, data: st.DataObject) -> tuple[list[Row], list[tuple[int, list[int]]]]:
        rows, blocks = [], []
        for slot, one in self.held():
            if one["pending"] is None and not one["importing"] and data.draw(st.integers(0, 3)) < 3:
                budget = data.draw(st.sampled_from([6, 2, 1, 6]))
                end = one["computed"] + self.count(one, budget)
                fresh = [data.draw(st.integers(0, 99)) for _ in range(-(-end // BLOCK_SIZE) - len(one["blocks"]))]
                if fresh:
                    one["blocks"] += fresh
                    blocks.append((slot, fresh))
                start = data.draw(st.sampled_from([one["computed"], -1]))
                rows.append(Row(slot, one["generation"], budget, start, end >= len(one["tokens"])))
        return data.draw(st.permutations(rows)), blocks

    @staticmethod
    def count(one: dict[str, Any], budget: int) -> int:
        """Up to the last draft, and not to the cap's own position, which is never computed."""
        end = one["computed"]
        while end - one["computed"] < budget and end < len(one["tokens"]) + len(one["drafts"]) and end < one["cap"] - 1:
            end += 1
        return int(end - one["computed"])

    def _compare_and_note(self, plan: StepPlan, layout: BatchLayout, budgets: dict[int, int]) -> None:
        live = [slot for slot in plan.rows.slots.tolist() if not self.twin[slot]["finished"]]  # type: ignore[index]
        assert layout.slot.tolist() == live
        sampled, at, q, s = [], 0, 0, 0
        for r, slot in enumerate(live):
            one: dict[str, Any] = self.twin[slot]  # type: ignore[assignment]
            start, count = one["computed"], self.count(one, budgets[slot])
            sequence, end, known = one["tokens"] + one["drafts"], start + count, len(one["tokens"])
            assert (layout.generation[r], layout.start[r], layout.count[r], layout.known[r]) == (one["generation"], start, count, known)
            assert layout.row_starts[r] == at
            assert layout.token_ids[at : at + count].tolist() == sequence[start:end]
            assert layout.positions[at : at + count].tolist() == list(range(start, end))
            assert layout.tags[at : at + count].tolist() == [tag(sequence[: i + 1], one["salt"]) for i in range(start, end)]
            used = -(-end // BLOCK_SIZE)
            assert [block for block in layout.block_tables[0][r].tolist() if block >= 0] == one["blocks"][:used]
            full = start // BLOCK_SIZE
            assert layout.block_tags[r, :full].tolist() == [tag(sequence[: (b + 1) * BLOCK_SIZE], one["salt"]) for b in range(full)]
            assert not layout.block_tags[r, full:].any()
            assert layout.tail_tags[r] == (tag(sequence[:start], one["salt"]) if start % BLOCK_SIZE else 0)
            at += count
            if end < known:
                one["computed"] = end
                continue
            assert (layout.sample_row[q], layout.sample_starts[q], layout.length_cap[q]) == (r, s, one["cap"])
            assert layout.draft_ids.row(q).tolist() == one["drafts"][: end - known]
            verified = end - known + 1
            assert layout.sampling.position[s : s + verified].tolist() == list(range(known, end + 1))
            assert layout.sampling.index[s : s + verified].tolist() == list(range(at - verified, at))
            one["pending"] = (plan.step, verified)
            sampled.append((slot, one["generation"]))
            q, s = q + 1, s + verified
        assert (layout.token_count, len(layout.sample_row), len(layout.sampling.index)) == (at, q, s)
        assert layout.row_starts[-1] == at
        assert layout.sample_starts[-1] == s
        self.sampled.append(sampled)

    def _answer(self, data: st.DataObject, slot: int, generation: int) -> Answer:
        one = self.twin[slot]
        if one is None or one["generation"] != generation:
            return Answer(slot, generation, data.draw(st.lists(tokens_of, min_size=1, max_size=4)), data.draw(st.integers(0, 2)))
        room = one["cap"] - len(one["tokens"])
        tokens = data.draw(st.lists(tokens_of, min_size=1, max_size=min(one["pending"][1], room)))
        finish = 2 if len(tokens) == room else data.draw(st.sampled_from([0, 0, 0, 1]))
        return Answer(
            slot,
            generation,
            tokens,
            finish,
            [] if finish else data.draw(st.lists(tokens_of, max_size=DRAFTS, min_size=data.draw(st.sampled_from([2, 0])))),
        )

    @rule(data=st.data())
    def result(self, data: st.DataObject) -> None:
        if self.applied < self.step:
            answers = [self._answer(data, slot, generation) for slot, generation in self.sampled[self.applied]]
            self.table.apply_result(make_result(self.applied, answers))
            self.applied += 1
            for answer in answers:
                one = self.twin[answer.slot]
                if one is not None and one["generation"] == answer.generation:
                    one["tokens"] += answer.tokens
                    one.update(computed=len(one["tokens"]) - 1, drafts=list(answer.drafts), finished=answer.finish, pending=None)

    @rule(data=st.data(), kind=st.sampled_from(["missing", "twice", "long", "empty", "not waiting", "beyond"]))
    def unlawful_result(self, data: st.DataObject, kind: str) -> None:
        if self.applied == self.step:
            return
        answers = [self._answer(data, slot, generation) for slot, generation in self.sampled[self.applied]]
        waiting = [i for i, answer in enumerate(answers) if self._holds(answer.slot, answer.generation)]
        idle = [(slot, one) for slot, one in self.held() if one["pending"] is None and slot not in [answer.slot for answer in answers]]
        if kind == "not waiting" and idle:
            answers.append(Answer(idle[0][0], idle[0][1]["generation"], [1]))
        elif kind == "beyond":
            answers.append(Answer(data.draw(st.sampled_from([-1, SLOTS])), 1, [1]))
        elif kind in ("missing", "twice", "long", "empty") and waiting:
            i = waiting[0]
            tokens = {"long": [1] * 9, "empty": []}.get(kind, answers[i].tokens)
            changed = Answer(answers[i].slot, answers[i].generation, tokens)
            answers[i : i + 1] = {"missing": [], "twice": [answers[i], answers[i]]}.get(kind, [changed])
        else:
            return
        with pytest.raises(LogError):
            self.table.apply_result(make_result(self.applied, answers))

    def _holds(self, slot: int, generation: int) -> bool:
        one = self.twin[slot]
        return one is not None and one["generation"] == generation

    @invariant()
    def table_is_the_twin(self) -> None:
        assert self.table.applied == self.applied
        assert self.table.held_slots() == [slot for slot, _ in self.held()]
        for slot, one in self.held():
            assert self.table.known_tokens(slot) == one["tokens"]
            names = ("generation", "length_cap", "computed", "draft_count", "finished", "importing", "pending")
            pending = -1 if one["pending"] is None else one["pending"][0]
            expected = (one["generation"], one["cap"], one["computed"], len(one["drafts"]), one["finished"], one["importing"], pending)
            assert tuple(int(self.table.columns[name][slot]) for name in names) == expected
            assert self.table.drafts[slot, : len(one["drafts"])].tolist() == one["drafts"]
            count = int(self.table.block_counts[0, slot])
            assert self.table.blocks[0, slot, :count].tolist() == one["blocks"]
            assert np.array_equal(
                self.table.tags[slot, : len(one["tokens"])], [tag(one["tokens"][: i + 1], one["salt"]) for i in range(len(one["tokens"]))]
            )


SlotTableAgainstTwin.TestCase.settings = settings(max_examples=150, stateful_step_count=20, deadline=None, derandomize=True, print_blob=True)
TestSlotTableAgainstTwin = SlotTableAgainstTwin.TestCase
