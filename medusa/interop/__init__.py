"""Heads in and out of other engines' files: `medusa export`, `medusa import`, and a drafter for vLLM.

Pure tensors and files, one `*_format.py` an engine. What an engine would load silently wrong is refused, not written.
"""
