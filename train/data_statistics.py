"""What a training set is made of, in one glance: the numbers to look at before hours are spent on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class DataStatistics:
    """Counts over the conversations that were kept; `skipped` counts the others by reason. Tokens, never padding."""

    conversations: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    longest: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def loss_share(self) -> float:
        """Share of the tokens that are under loss, 0 to 1."""
        return self.loss_tokens / max(self.tokens, 1)

    def to_dict(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "skipped"}
        return fields | {"loss_share": round(self.loss_share, 4), "skipped": dict(self.skipped)}

    def __str__(self) -> str:
        """A few aligned lines, no colour."""
        rows = [
            ("conversations", f"{self.conversations:,}"),
            (
                "tokens",
                f"{self.tokens:,} (mean {self.tokens / max(self.conversations, 1):,.0f}, longest {self.longest:,})",
            ),
            ("under loss", f"{self.loss_tokens:,} ({self.loss_share:.1%})"),
            (
                "truncated",
                f"{self.truncated:,}" + (f" ({self.truncated_tokens:,} tokens cut)" if self.truncated else ""),
            ),
            ("skipped", f"{self.skipped.total():,}" if self.skipped else "0"),
        ]
        rows += [("", f"{count:,} {reason}") for reason, count in self.skipped.most_common()]
        return "\n".join(f"{name:<14} {value}" for name, value in rows)
