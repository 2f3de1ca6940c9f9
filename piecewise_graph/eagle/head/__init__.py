"""The draft head: its model, its configuration, and the checkpoint formats that it is read from."""
