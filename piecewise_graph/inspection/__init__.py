"""For whoever doubts: what became of a model (`report`, `page`), and where it departs (`bisection`)."""
