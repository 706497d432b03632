"""Draft trees out of heads whose shape is chosen beforehand; those that are grown anew in each step are in
`dynamic_tree.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .candidates import CandidateDrafter, Candidates, by_probability
from .draft import Draft
from .heads import Heads
from .tree import DraftTree


class HeadsDrafter(CandidateDrafter):
    """What drafters with heads have in common: heads run once a row, on the last accepted position only."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads

    def _states(self, hidden: Tensor) -> Tensor:
        """hidden [B, (1 + F) x D], the base's last states, as the heads want them: [B, D]."""
        return self.heads.fuse(hidden)


class HeadGuesses:
    """Logits of one step, level by level. states: [B, D]."""

    def __init__(self, heads: Heads, states: Tensor) -> None:
        self.heads, self.states = heads, states
        self._independent = heads(states) if is_independent(heads) else None

    def logits(self, head: int, prefix: Tensor) -> Tensor:
        """Below n drafted prefixes a row, int64 [B, n, head + 1]: float32 [B, n, draft vocabulary], or [B, 1, ...]
        where the heads say the same below all of them."""
        if self._independent is not None:
            return self._independent[head, :, None].float()
        batch, num_prefixes, length = prefix.shape
        states = self.states.repeat_interleave(num_prefixes, dim=0)
        logits = self.heads.logits(head, states, prefix.reshape(-1, length))
        return logits.float().unflatten(0, (batch, num_prefixes))


def is_independent(heads: Heads) -> bool:
    """Whether no head looks at the drafted prefix: then all run at once, a time for each row."""
    return str(getattr(heads.config, "design", "medusa")) == "medusa"


class StaticTreeDrafter(HeadsDrafter):
    """Node (r0, .., rd) holds head d's guess of rank rd below the nodes before it.

    probabilities: chance of each of `tree.node_paths`; needed only where other candidates compete, 1 if not given: the
    tree stays as it is and others come on top. Raises ValueError for a tree that `check_tree` refuses.
    """

    def __init__(self, heads: Heads, tree: DraftTree, probabilities: Sequence[float] | None = None) -> None:
        super().__init__(heads)
        check_tree(heads, tree)
        self.tree, self.max_nodes = tree, tree.num_nodes
        self._probability = torch.tensor([1.0, *(probabilities or [1.0] * (tree.num_nodes - 1))])
        assert len(self._probability) == tree.num_nodes, (len(self._probability), tree.num_nodes)
        self._levels = [_Level(tree, depth) for depth in range(tree.max_depth)]

    @torch.no_grad()
    def propose(self, root: Tensor, hidden: Tensor) -> Draft:
        return Draft.of_tree(self.tree, self._tokens(root, hidden))

    @torch.no_grad()
    def candidates(self, root: Tensor, hidden: Tensor) -> Candidates:
        tokens = self._tokens(root, hidden)
        parent = self.tree.parent.to(root.device).expand_as(tokens)
        probability = self._probability.to(root.device).expand(tokens.shape)
        return by_probability(tokens, parent, probability, self.max_nodes)[0]

    def _tokens(self, root: Tensor, hidden: Tensor) -> Tensor:
        """int64 [B, N]."""
        tokens = root[:, None]
        if not self._levels:
            return tokens
        guesses = HeadGuesses(self.heads, self._states(hidden))
        for head, level in enumerate(self._levels):
            logits = guesses.logits(head, tokens[:, level.ancestors.to(root.device)])
            best = self.heads.draft_to_base(logits.topk(level.width, dim=-1).indices)
            slot = level.slot.to(root.device).clamp(max=best.shape[1] - 1)
            tokens = torch.cat([tokens, best[:, slot, level.rank.to(root.device)]], dim=1)
        return tokens


class _Level:
    """The nodes of depth + 1 and what they hang on. ancestors: int64 [n, depth + 1], the path of nodes to each of the
    n parents. slot, rank: int64 [m], for each node which of the parents is its own, and which guess it holds."""

    def __init__(self, tree: DraftTree, depth: int) -> None:
        nodes = (tree.depth == depth + 1).nonzero().flatten()
        parents, self.slot = tree.parent[nodes].unique(return_inverse=True)
        self.ancestors = torch.stack([tree.attention_mask[node].nonzero().flatten() for node in parents])
        self.rank = tree.rank[nodes]
        self.width = int(self.rank.max()) + 1


def check_tree(heads: Heads, tree: DraftTree) -> None:
    """Raises ValueError for a tree deeper than the heads or wider than their vocabulary, naming the path."""
    config = heads.config
    DraftTree.from_paths(tree.node_paths, max_depth=config.num_heads)
    for path in tree.node_paths:
        if max(path) >= config.num_draft_tokens:
            raise ValueError(
                f"draft tree: path {list(path)}: rank {max(path)} is asked for, but the heads guess among "
                f"{config.num_draft_tokens} tokens; use a narrower tree"
            )
