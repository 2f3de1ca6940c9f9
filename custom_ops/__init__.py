"""Consumers of the core: ops to split graphs at. Installed as `piecewise_graph.custom_ops`."""
