"""Other people's serving stacks on this backend; each is found by its stack, through an entry point."""
