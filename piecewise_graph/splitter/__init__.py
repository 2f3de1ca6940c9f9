"""The first stage: an FX graph becomes steps, cut at registered splitting ops."""
