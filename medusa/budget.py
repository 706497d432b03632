"""How many nodes a step drafts: as many as make it fastest on this hardware, and for this request.

    tokens a second = sum over rows of tau(N) / (seconds of a forward of B rows of N tokens + seconds of proposing)

tau(N) is known before the forward: 1 + the chances of the N - 1 likeliest nodes. How far a row keeps what its chances
promise is followed from step to step (`RowRecord`) and scales them; where drafting does not pay for a while, not even
proposing is tried for some steps: for a row by itself, and for batches of one size, whoever is in them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from .candidates import CandidateDrafter
from .draft import Draft
from .drafter import Drafter
from .latency_curve import StepLatency

DECAY = 0.9  # of what a row accepted and was expected to, a step with drafts
IDLE_DECAY = 0.97  # a step without: slowly back to trusting it
PRIOR = 2.0  # tokens by which a ratio of 1 is believed at first
MAX_RATIO = 1.5
PATIENCE = 3  # steps that do not pay before proposing pauses
MAX_PAUSE = 32  # steps
FIRST_BATCH_PAUSE, MAX_BATCH_PAUSE = 16, 128  # steps, of several rows
# The least gain that counts for several rows. Measured at 8 and 16, what is promised as 1.1 was up to 8% lost: the more
# tokens a forward has, the more its time moves with whatever else the machine does.
FEW_ROWS, FEW_ROWS_GAIN, MANY_ROWS_GAIN = 8, 1.1, 1.25


@dataclass
class BatchPause:
    """Steps in which nothing is proposed for batches of about one size, `pause` of them to come.

    Rows together say at once whether proposing pays, so it pauses at once and longer, and starts again at once.
    """

    pause: int = 0
    last_pause: int = 0

    def count_gain(self, gain: float, num_rows: int) -> None:
        """After a choice. A little gain is none: what was measured, and what rows promise, is not so exact."""
        longer = min(max(FIRST_BATCH_PAUSE, 2 * self.last_pause), MAX_BATCH_PAUSE)
        least = FEW_ROWS_GAIN if num_rows < FEW_ROWS else MANY_ROWS_GAIN
        self.pause = self.last_pause = 0 if gain > least else longer


@dataclass
class RowRecord:
    """How one row's drafts went. Sums of accepted and of expected draft tokens, older steps counting less. pause: steps
    to come in which nothing is proposed for it when it is alone."""

    accepted: float = 0.0
    expected: float = 0.0
    num_unpaid: int = 0
    pause: int = 0
    last_pause: int = 0
    is_muted: bool = False

    @property
    def ratio(self) -> float:
        """Accepted by expected, 1 where nothing is known, 0 where nothing is to be drafted."""
        if self.is_muted:
            return 0.0
        return min((self.accepted + PRIOR) / (self.expected + PRIOR), MAX_RATIO)

    def count(self, accepted: float, expected: float) -> None:
        """After a step; expected is 0 where nothing was drafted, which brings the ratio back towards 1."""
        if not expected:
            self.accepted, self.expected = IDLE_DECAY * self.accepted, IDLE_DECAY * self.expected
            return
        self.accepted = DECAY * self.accepted + accepted
        self.expected = DECAY * self.expected + expected
        if accepted >= expected / 2:
            self.num_unpaid = self.last_pause = 0
        elif self.last_pause:  # what was tried after a pause failed too
            self._rest()

    def count_gain(self, gain: float) -> None:
        """After a choice: pauses of 1, 2, 4, ... steps while proposing keeps not paying."""
        if gain > 1.0:
            self.num_unpaid = self.pause = 0
        elif self.num_unpaid < PATIENCE - 1:
            self.num_unpaid += 1
        else:
            self._rest()

    def _rest(self) -> None:
        self.pause = self.last_pause = min(max(1, 2 * self.last_pause), MAX_PAUSE)


@dataclass(frozen=True)
class Choice:
    """num_nodes: N for all rows. gain: their speed together by that of one token a step."""

    num_nodes: int
    gain: float


class AdaptiveBudget:
    """Chooses by what steps of all sizes cost."""

    def __init__(self, latency: StepLatency) -> None:
        self.latency = latency
        self._seconds: dict[int, Tensor] = {}  # by number of rows: float64 [N]

    def choose(self, probability: Tensor, ratios: Tensor) -> Choice:
        """The fastest N. probability: float [B, N] as in `Candidates`; ratios: float [B], see `RowRecord.ratio`.

        Proposing has been paid for already when this is asked, so it counts for the root alone too; whether it was
        worth asking is what the gain tells, which is against a step without.
        """
        chances = (probability.double().cpu() * ratios[:, None]).clamp(max=1.0)
        chances[:, 0] = 1.0
        tau = chances.cumsum(dim=1)
        batch, num_nodes = tau.shape
        seconds = self._seconds_of(batch, num_nodes) + self.latency.propose(batch)
        best = int((tau.sum(dim=0) / seconds).argmax())
        gain = tau[:, best].mean() * self.latency.forward(batch, 1) / seconds[best]
        return Choice(best + 1, float(gain))

    def seconds(self, num_nodes: int) -> float:
        """What a step of one row takes, proposing included."""
        return float(self._seconds_of(1, num_nodes)[-1]) + self.latency.propose_seconds

    def _seconds_of(self, batch: int, num_nodes: int) -> Tensor:
        known = self._seconds.get(batch)
        if known is None or len(known) < num_nodes:
            sizes = [self.latency.forward(batch, nodes) for nodes in range(1, num_nodes + 1)]
            known = self._seconds[batch] = torch.tensor(sizes, dtype=torch.float64)
        return known[:num_nodes]


class AdaptiveDrafter(Drafter):
    """Drafts as many of another's candidates as `budget` finds fastest, for rows as their records say.

    The rows of a batch share N. A row alone pauses by its own record; rows together do by how batches of their size
    went, whoever was in them.
    """

    def __init__(self, inner: CandidateDrafter, budget: AdaptiveBudget) -> None:
        self.inner, self.budget, self.max_nodes = inner, budget, inner.max_nodes
        self._records: defaultdict[int, RowRecord] = defaultdict(RowRecord)
        self._batches: defaultdict[int, BatchPause] = defaultdict(BatchPause)  # 2-3 rows, 4-7, 8-15, ...
        self._expected: dict[int, float] = {}  # of the step that is being verified

    def record(self, row: int) -> RowRecord:
        return self._records[row]

    def propose(self, root: Tensor, hidden: Tensor) -> Draft:
        records = [self._records[row] for row in range(len(root))]
        batch = self._batches[len(records).bit_length()]
        pause = records[0] if len(records) == 1 else batch
        if pause.pause:
            pause.pause -= 1
            self._expected = dict.fromkeys(range(len(root)), 0.0)
            return Draft.of_roots(root)
        candidates = self.inner.candidates(root, hidden)
        ratios = torch.tensor([record.ratio for record in records], dtype=torch.float64)
        choice = self.budget.choose(candidates.probability, ratios)
        if len(records) == 1:
            records[0].count_gain(choice.gain)
        else:
            batch.count_gain(choice.gain, len(records))
        chosen = candidates.cut(choice.num_nodes)
        self._expected = dict(enumerate((chosen.probability.sum(dim=1) - 1.0).clamp(min=0.0).tolist()))
        return chosen.draft()

    def observe(self, rows: slice, tokens: Tensor, counts: Tensor, hidden: Tensor | None) -> None:
        self.inner.observe(rows, tokens, counts, hidden)
        for row, count in zip(range(rows.start, rows.stop), counts.tolist(), strict=True):
            if row in self._expected:  # not a prompt's
                self._records[row].count(count - 1, self._expected.pop(row))

    def clear_row(self, row: int) -> None:
        self.inner.clear_row(row)
        self._records.pop(row, None)
        self._expected.pop(row, None)

    def move_row(self, source: int, target: int) -> None:
        self.inner.move_row(source, target)
        self._records[target] = self._records.pop(source, RowRecord())
        self._expected.pop(target, None)

    def mute_row(self, row: int) -> None:
        self.inner.mute_row(row)
        self._records[row].is_muted = True
