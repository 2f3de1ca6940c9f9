"""The second stage: steps become a program, one compiled function per distinct segment structure."""
