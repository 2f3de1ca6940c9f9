"""A reference EAGLE loop: draft, verify and draft-extend on paged KV, each phase a graph."""
