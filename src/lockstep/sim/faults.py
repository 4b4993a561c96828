"""What can go wrong in a simulated run, and who may notice it as what."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.sim.scenario import ENGINE_PHASES, REQUEST_PHASES

BUSY = ("prefill", "decode", "importing")
HAND_OVER = ("importing",)
COMPUTED = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """phases: of the engine, or of the request where it is about one, in which it can take effect. seen_as: classes of the errors by which some check
    may notice it; none for what nobody may notice. needs: 'drafts', 'engines' (two of them), 'stages' (two or more), or ''."""

    phases: tuple[str, ...]
    seen_as: tuple[str, ...] = ()
    needs: str = ""


_FLIP = Kind(phases=COMPUTED, seen_as=("DivergenceError", "LogError", "ProvenanceError", "LedgerError", "InternalError"))
FLIPS = ("token", "block", "seed", "computed", "known", "cap", "temperature")
"""What of a request's row in one replica's table is changed: `flips`. A draft is changed where its result arrives, since it is read at once."""

KINDS: dict[str, Kind] = {
    "crash": Kind(phases=ENGINE_PHASES, seen_as=("StageLostError",)),
    "stall": Kind(phases=ENGINE_PHASES, seen_as=("StalledError",)),
    "slow": Kind(phases=BUSY),
    "link-late": Kind(phases=(*BUSY, "recovering")),
    "link-drop": Kind(phases=(*BUSY, "recovering"), seen_as=("LinkError", "StalledError")),
    "link-duplicate": Kind(phases=(*BUSY, "recovering"), seen_as=("LinkError",)),
    "link-reorder": Kind(phases=BUSY, seen_as=("LinkError",)),
    "link-damage": Kind(phases=(*BUSY, "recovering"), seen_as=("LinkError", "StalledError")),
    "poison": Kind(phases=COMPUTED, seen_as=("StageLostError",)),
    "abort": Kind(phases=REQUEST_PHASES),
    "abort-again": Kind(phases=REQUEST_PHASES),
    "kv-pull-lost": Kind(phases=HAND_OVER, needs="engines"),
    "kv-part-lost": Kind(phases=HAND_OVER, needs="engines"),
    "kv-part-late": Kind(phases=HAND_OVER, needs="engines"),
    "kv-part-foreign": Kind(phases=HAND_OVER, seen_as=("ProvenanceError",), needs="engines"),
    "gone-by-lease": Kind(phases=HAND_OVER, needs="engines"),
    "gone-by-restart": Kind(phases=HAND_OVER, needs="engines"),
    "foreign-kv": Kind(phases=COMPUTED, seen_as=("ProvenanceError",)),
    **{f"flip-{name}": _FLIP for name in FLIPS},
    "flip-draft": Kind(phases=("decode",), seen_as=_FLIP.seen_as, needs="drafts"),
}

MODES = ("sync", "async", "sync+drafts", "async+drafts")


def mode_of(*, asynchronous: bool, drafts_max: int) -> str:
    return f"{'async' if asynchronous else 'sync'}{'+drafts' if drafts_max else ''}"


def cells() -> list[str]:
    """'kind / phase / mode' of everything that a large enough number of runs has to show."""
    return [
        f"{kind} / {phase} / {mode}"
        for kind, what in KINDS.items()
        for phase in what.phases
        for mode in MODES
        if what.needs != "drafts" or mode.endswith("drafts")
    ]
