"""The fourth stage: a call becomes a decision, and a decision a replay."""
