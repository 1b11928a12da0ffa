"""The text of a failed run: the failing ranks first, then where the others were."""

from collections.abc import Sequence

from plait.testing.jobs import Outcome

_ORDER = {"failed": 0, "died": 1, "hung": 2, "stopped": 3, "skipped": 4, "passed": 5}


def failed_ranks(outcomes: Sequence[Outcome]) -> list[int]:
    """Ranks whose own code failed, died or hung; not those stopped because of them."""
    return [r for r, outcome in enumerate(outcomes) if outcome.status in ("failed", "died", "hung")]


def describe(outcomes: Sequence[Outcome]) -> str:
    """One headline, one section per rank that has something to say.

    Equal tracebacks of several ranks are printed once.
    """
    bad = failed_ranks(outcomes)
    ranks = ", ".join(map(str, bad))
    noun = "rank" if len(bad) == 1 else "ranks"
    lines = [f"{noun} {ranks} of {len(outcomes)} failed"]
    for rank, outcome in enumerate(outcomes):
        what = outcome.summary or outcome.status
        lines.append(f"  rank {rank}: {what}")
    seen: dict[str, int] = {}
    for rank in sorted(range(len(outcomes)), key=lambda r: (_ORDER[outcomes[r].status], r)):
        body = outcomes[rank].text.rstrip()
        if body and outcomes[rank].status == "failed":
            if body in seen:
                lines += ["", f"─── rank {rank}: as rank {seen[body]} ───"]
            else:
                seen[body] = rank
                lines += ["", f"─── rank {rank} ───", body]
        if outcomes[rank].stack:
            lines += ["", f"─── rank {rank}: Python stacks ───", outcomes[rank].stack.rstrip()]
    return "\n".join(lines)
