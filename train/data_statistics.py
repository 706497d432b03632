"""What a training set is made of, in one glance: the numbers to look at before hours are spent on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class SourceStatistics:
    """One source's kept conversations and their tokens; `weight` as in the config."""

    path: str
    weight: float = 1.0
    conversations: int = 0
    tokens: int = 0


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
    sources: list[SourceStatistics] = field(default_factory=list)

    @property
    def loss_share(self) -> float:
        """Share of the tokens that are under loss, 0 to 1."""
        return self.loss_tokens / max(self.tokens, 1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"loss_share": round(self.loss_share, 4), "skipped": dict(self.skipped)}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> DataStatistics:
        """What `to_dict` gave."""
        counts = {name: value for name, value in content.items() if name != "loss_share"}
        sources = [SourceStatistics(**source) for source in content["sources"]]
        return cls(**counts | {"skipped": Counter(content["skipped"]), "sources": sources})

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
        if len(self.sources) > 1 or any(source.weight != 1 for source in self.sources):
            rows += [("source", _describe(source)) for source in self.sources]
        return "\n".join(f"{name:<14} {value}" for name, value in rows)


def _describe(source: SourceStatistics) -> str:
    return f"{source.path}: {source.conversations:,} conversations, {source.tokens:,} tokens, weight {source.weight:g}"
