"""Device kernels that the core launches itself: bound launches, copies, linear layers of a few rows."""
