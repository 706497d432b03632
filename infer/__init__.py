"""Decoding: prefill, then propose, verify, accept and commit until done; generation, benchmark and server drive it."""
