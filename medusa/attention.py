"""Attention over a tree mask without copying the keys and values of grouped-query attention.

Stock scaled-dot-product attention repeats every key and value once per query head of its group when a mask is given.
Here the query heads of a group are laid behind each other as extra queries of their one key/value head: the same
products, no copies. The mask comes ready for that layout, float and repeated `groups` times along the queries; any
other mask (none, or the stock boolean one of a plain forward) goes to the stock function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

TREE_ATTENTION = "medusa_tree"


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, N, d], key and value [B, G, S, d], attention_mask float [B, 1, N * H / G, S] -> [B, N, H, d]."""
    if attention_mask is None or attention_mask.dtype == torch.bool:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    batch, num_heads, num_nodes, _ = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    if attention_mask.shape[2] != groups * num_nodes:  # built for another number of groups than this layer has
        attention_mask = attention_mask[:, :, :num_nodes].repeat(1, 1, groups, 1)
    folded = query.reshape(batch, num_kv_heads, groups * num_nodes, -1)
    output = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(batch, num_heads, num_nodes, -1).transpose(1, 2).contiguous(), None


def slow_tree_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """The obvious reference: query [B, H, N, d], key/value [B, G, S, d], visible bool [B, N, S] -> [B, N, H, d]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~visible[:, None], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
