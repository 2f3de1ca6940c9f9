"""One speculative round: draft, verify and draft-extend on static buffers."""
